"""What makes an order certain on a machine of any speed: trainers that wait at a step until a test has done what it does there,
replicas that wait with their first responses, and replicas that wait between two tokens until they have loaded a newer version."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import StepResult, WeightUpdate
from asyncflow_sdk.testing import EchoRollout, EchoTrain
from asyncflow_sdk.testing.echo_ranks import EchoRanks
from asyncflow_sdk.types import Batch, VersionSpan
from asyncflow_sdk.types.events import Event, StepTrained, WorkerState


class Gates:
    """Steps that a trainer does not begin before they are opened."""

    def __init__(self, folder: Path, *steps: int) -> None:
        self.folder = folder
        folder.mkdir()
        for step in steps:
            (folder / str(step)).touch()

    def trainer(self, engine: str = "gates:Gated", **options: Any) -> af.Train:
        return af.Train(engine, gates=str(self.folder), **options)

    def open(self, *steps: int) -> None:
        """Those that are open are opened again, without effect."""
        for step in steps:
            (self.folder / str(step)).unlink(missing_ok=True)


class Killer:
    """Kills a worker after each of the given steps, as soon as it has said that it is ready."""

    def __init__(self, worker: str, at: list[int], gates: Path | None = None) -> None:
        self.worker, self.at, self.pid, self.step, self.killed = worker, list(at), 0, -1, 0
        self.events: list[Event] = []
        self._gates = Gates(gates, *(step + 1 for step in at)) if gates is not None else None

    def trainer(self, engine: str = "gates:Gated", **options: Any) -> af.Train:
        """A trainer that does not begin the step after one of these before the worker was killed."""
        assert self._gates is not None
        return self._gates.trainer(engine, **options)

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, WorkerState) and event.worker == self.worker and event.state == "ready":
            self.pid = event.pid
        if isinstance(event, StepTrained):
            self.step = event.step
        if self.at and self.step >= self.at[0] and self.pid:
            os.kill(self.pid, signal.SIGKILL)
            step = self.at.pop(0)
            self.pid, self.killed = 0, self.killed + 1
            if self._gates is not None:
                self._gates.open(step + 1)


class Gated(EchoTrain):
    """Begins no step of which there is a file in ``gates``, or else in the folder that the variable GATES names."""

    def __init__(self, model: str = "", *, gates: str = "", **options: Any) -> None:
        super().__init__(model, **options)
        self._gates = Path(gates or os.environ.get("GATES", "no gates"))

    def train_step(self, batch: Batch) -> StepResult:
        _pass(self._gates, self.steps)
        return super().train_step(batch)


class GatedRanks(EchoRanks):
    """The same of several ranks."""

    def __init__(self, model: str = "", *, gates: str, **options: Any) -> None:
        super().__init__(model, **options)
        self._gates = Path(gates)

    def train_step(self, batch: Batch) -> StepResult:
        _pass(self._gates, self.steps)
        return super().train_step(batch)


def _pass(gates: Path, step: int) -> None:
    while (gates / str(step)).exists():
        time.sleep(0.01)


class Held(EchoRollout):
    """Answers nothing as long as there is the file ``held``."""

    def __init__(self, model: str = "", *, held: str, **options: Any) -> None:
        super().__init__(model, **options)
        self._held_by = Path(held)

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        while self._held_by.exists():
            await asyncio.sleep(0.01)
        async for completion in super().generate(request):
            yield completion


class LoadsAtGate(EchoRollout):
    """Is not made as long as there is the file ``loads``, as one with a large model."""

    def __init__(self, model: str = "", *, loads: str, **options: Any) -> None:
        while Path(loads).exists():
            time.sleep(0.01)
        super().__init__(model, **options)


class Together(EchoRollout):
    """Answers nothing before another replica was asked, too: see ``meet``."""

    def __init__(self, model: str = "", *, met: str, **options: Any) -> None:
        super().__init__(model, **options)
        self._met = Path(met)

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        await meet(self._met)
        async for completion in super().generate(request):
            yield completion


async def meet(folder: Path) -> None:
    """Wait until two processes are here. Neither may take all the prompts that there are: give each a small ``max_rows``."""
    (folder / str(os.getpid())).touch()
    while len(os.listdir(folder)) < 2:
        await asyncio.sleep(0.01)


class Pauses:
    """Make a replica with the engine ``gates:Pausing`` pause in the middle of its next request until it has loaded a newer version.

    Call `request`, wait with `begun`, publish the newer version, wait with `ended`; then the next pause can be requested.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def rollout(self, **options: Any) -> af.Rollout:
        return af.Rollout("gates:Pausing", pauses=str(self.folder), **options)

    def request(self) -> None:
        for state in ("taken", "begun", "ended"):
            (self.folder / state).unlink(missing_ok=True)
        (self.folder / "requested").touch()

    def begun(self) -> None:
        until((self.folder / "begun").exists, "a replica that pauses between two tokens")

    def ended(self) -> None:
        until((self.folder / "ended").exists, "the end of the responses of the replica that pauses")


class Pausing(EchoRollout):
    """Take each requested pause in one request of one replica: draw the first token of its responses, wait until a newer version
    was loaded, and draw the other tokens. ``pauses``: the folder of `Pauses`."""

    def __init__(self, model: str = "", *, pauses: str, **options: Any) -> None:
        super().__init__(model, **options)
        self._pauses, self._loaded = Path(pauses), -1

    async def load_weights(self, update: WeightUpdate) -> Set[str]:
        taken = await super().load_weights(update)
        self._loaded = update.version
        return taken

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        try:
            (self._pauses / "requested").rename(self._pauses / "taken")
        except FileNotFoundError:
            async for completion in super().generate(request):
                yield completion
            return
        try:
            one = replace(request, sampling=replace(request.sampling, max_tokens=1))
            begun = {completion.index: completion async for completion in super().generate(one)}
            newest = max(span.version for completion in begun.values() for span in completion.spans)
            (self._pauses / "begun").touch()
            while self._loaded <= newest:
                await asyncio.sleep(0.01)
            rest = replace(  # an echo's responses to one prompt are equal
                request,
                prompt_ids=np.concatenate([request.prompt_ids, begun[0].token_ids]),
                sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - 1),
                drawn=request.drawn + 1,
            )
            async for completion in super().generate(rest):
                yield _joined(begun[completion.index], completion)
        finally:
            (self._pauses / "ended").touch()


def _joined(first: af.Completion, second: af.Completion) -> af.Completion:
    """Return the response whose two parts different versions drew."""
    at = len(first.token_ids)
    return replace(
        second,
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        spans=[*first.spans, *(VersionSpan(span.version, at + span.start, at + span.end) for span in second.spans)],
    )
