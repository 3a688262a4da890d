"""One engine, in this process: ``python -m benchmarks.engines.drive NAME OPTIONS`` prints one JSON object.

Three ways take turns with the same engine, round after round: its own calls; the adapter's ``generate``; a whole run, whose queue is
served by another process and whose rows are leased, generated, completed, assembled into a step and acknowledged. Then the time for
which nothing is generated in an update, by the SDK and by the engine's own way.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

import asyncflow_sdk as af
from asyncflow_sdk.testing.transport_harness import TransportHarness
from asyncflow_sdk.weights import Update
from asyncflow_sdk.weights.transports.shm import ShmTransport

from .contender import PLACES, Contender
from .work import Work

WARM = 1
"""Rounds that are not counted."""


class Rounds:
    def __init__(self, contender: Contender, engine: Any, work: Work) -> None:
        self._contender, self._engine, self._work = contender, engine, work
        self._batches = iter(range(1_000_000, 2_000_000))
        self.rates: dict[str, list[float]] = {"direct": [], "adapter": [], "run": []}
        self.updates: dict[str, list[float]] = {"direct": [], "adapter": []}

    async def measure(self, rounds: int, queue_side: Any) -> None:
        for number in range(WARM + rounds):
            for name, way in (("direct", self._direct), ("adapter", self._adapter)):
                began = time.perf_counter()
                tokens = await way()
                self._note(number, name, tokens, time.perf_counter() - began)
            said = await asyncio.to_thread(queue_side)
            self._note(number, "run", said["tokens"], said["s"])

    async def update(self, rounds: int, tensors: dict[str, Any], folder: str) -> None:
        with TransportHarness(ShmTransport, ShmTransport) as ends:
            receiver = ends.receiver()
            for number in range(WARM + rounds):
                update = Update(number + 1, [ends.fetch(receiver, ends.publish(number + 1, tensors))])
                try:
                    await self._timed(number, "adapter", lambda update=update: self._engine.load_weights(update))
                finally:
                    update.release()
                await self._timed(number, "direct", lambda: self._contender.update(self._engine, folder))

    async def _timed(self, number: int, name: str, work: Callable[[], Awaitable[Any]]) -> None:
        began = time.perf_counter()
        await work()
        if number >= WARM:
            self.updates[name].append(time.perf_counter() - began)

    def _note(self, number: int, name: str, tokens: int, seconds: float) -> None:
        wanted = self._work.prompts * self._work.n * self._work.max_tokens
        assert tokens == wanted, f"{name} gave {tokens} tokens, not {wanted}"
        if number >= WARM:
            self.rates[name].append(tokens / seconds)

    async def _direct(self) -> int:
        prompts = self._work.batch(next(self._batches))
        return await self._contender.generate(self._engine, prompts, self._work.n, self._work.max_tokens)

    async def _adapter(self) -> int:
        sampling = af.Sampling(max_tokens=self._work.max_tokens)
        requests = [af.Request(prompt, sampling, self._work.n) for prompt in self._work.batch(next(self._batches))]

        async def answer(request: af.Request) -> int:
            return sum([len(each.token_ids) async for some in self._engine.generate(request) for each in some.each()])

        return sum(await asyncio.gather(*(answer(request) for request in requests)))


class QueueSide:
    """The process on the other side."""

    def __init__(self, work: Work) -> None:
        self._folder = tempfile.TemporaryDirectory()
        command = [sys.executable, "-m", "benchmarks.engines.queue_side", f"{self._folder.name}/run"]
        self._process = subprocess.Popen(
            [*command, json.dumps(vars(work))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self.address = self._out.readline().strip()

    def round(self) -> dict[str, Any]:
        self._in.write("\n")
        self._in.flush()
        said: dict[str, Any] = json.loads(self._out.readline())
        return said

    def end(self) -> None:
        """The stream ends."""
        self._in.close()

    def __enter__(self) -> QueueSide:
        return self

    def __exit__(self, *exc: object) -> None:
        self._in.close()
        self._process.wait(30.0)
        self._folder.cleanup()


def tensors_of(model: str) -> dict[str, Any]:
    return {name: array for file in Path(model).glob("*.safetensors") for name, array in load_file(file).items()}


async def drive(contender: Contender, model: str, tensors: dict[str, Any], rounds: int, work: Work) -> dict[str, Any]:
    engine = contender.make(model, work.prompts * work.n)
    found = Rounds(contender, engine, work)
    with QueueSide(work) as other, af.connect(other.address) as run:
        producer = af.EngineProducer(run.queue, engine, sampling=af.Sampling(max_tokens=work.max_tokens))
        producing = asyncio.create_task(producer.run())
        measuring = asyncio.create_task(found.measure(rounds, other.round))
        await asyncio.wait([producing, measuring], return_when=asyncio.FIRST_COMPLETED)
        if not measuring.done():
            producing.result()
        measuring.result()
        await found.update(rounds, tensors, model)
        other.end()
        await asyncio.wait_for(producing, 30.0)  # which closes the engine
    return {
        "tokens_s": found.rates,
        "update_s": found.updates,
        "nbytes": sum(each.nbytes for each in tensors.values()),
    }


if __name__ == "__main__":
    asked = json.loads(sys.argv[2])
    model, rounds = asked.pop("model"), asked.pop("rounds")
    contender = PLACES[sys.argv[1]].contender()
    print(json.dumps(asyncio.run(drive(contender, model, tensors_of(model), rounds, Work(**asked)))))
