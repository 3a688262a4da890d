"""One contender, version by version: ``python -m benchmarks.weights.drive shm '{"gb": 1.0, "versions": 6}'``.

A trainer and a replica, each a process of the contender's own environment. Before each version, while both are idle, a memcpy
of as many bytes is timed. The last line printed is the result, as JSON: of each version that counts, seconds from the call of
publish to being in the replica's parameters, seconds the trainer was held, seconds generation was held, and of the memcpy.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

WARM = 4
"""Versions before those that count: more than anybody keeps, so that all memory has been used once."""
LIMIT_S = 180.0
_spawn = mp.get_context("spawn")


def drive(name: str, *, gb: float, versions: int, seed: int = 0) -> dict[str, Any]:
    """The result. Raises RuntimeError where what arrived was not what was sent."""
    trainer = _Child("trainer", _trainer, name, gb, seed)
    address = trainer.ask("start")
    replica = _Child("replica", _replica, name, gb)
    trainer.tell("meet")
    replica.ask("start", address)
    trainer.hear()
    rows = []
    for version in range(1, WARM + versions + 1):
        sent = trainer.ask("change", version)
        copy_s = replica.ask("copy")
        replica.ask("ready")
        replica.tell("take", version)
        began, held_s = trainer.ask("publish", version)
        done, swap_s = replica.hear()
        trainer.ask("settle")
        if replica.ask("sample") != sent:
            raise RuntimeError(f"{name}: version {version} did not arrive as it was sent")
        swap_s = min(swap_s, done - began)  # not what it waited, ready, for the trainer to begin
        rows.append({"seconds": done - began, "held_s": held_s, "swap_s": swap_s, "copy_s": copy_s})
    nbytes = trainer.ask("nbytes")
    for child in (replica, trainer):
        child.ask("close")
        child.end()
    return {"name": name, "nbytes": nbytes, "versions": rows[WARM:]}


class _Child:
    """A process and the pipe to it. It answers what it is asked by the method of that name."""

    def __init__(self, title: str, work: Callable[..., Any], *arguments: Any) -> None:
        self._title = title
        self._pipe, there = _spawn.Pipe()
        self._process = _spawn.Process(target=_answer, args=(there, work, *arguments), daemon=False)
        self._process.start()
        there.close()

    def tell(self, what: str, *arguments: Any) -> None:
        self._pipe.send((what, arguments))

    def hear(self) -> Any:
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError(f"no word from the {self._title} in {LIMIT_S:.0f} s")
        try:
            value, error = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the {self._title} died") from None
        if error:
            raise RuntimeError(f"{self._title}: {error}")
        return value

    def ask(self, what: str, *arguments: Any) -> Any:
        self.tell(what, *arguments)
        return self.hear()

    def end(self) -> None:
        self._pipe.close()
        self._process.join(30)


def _answer(pipe: Any, work: Callable[..., Any], *arguments: Any) -> None:
    warnings.filterwarnings("ignore")  # others' libraries talk a lot
    methods = work(*arguments)
    while True:
        try:
            what, given = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((methods[what](*given), ""))
        except Exception:
            pipe.send((None, traceback.format_exc()))


def _trainer(name: str, gb: float, seed: int) -> dict[str, Callable[..., Any]]:
    from . import contender, model

    parameters = model.made(gb * 1e9, seed)
    ours = contender.trainer(name)

    def change(version: int) -> str:
        model.change(parameters, version)
        return model.sample(parameters)

    def publish(version: int) -> tuple[float, float]:
        began = time.perf_counter()  # one clock for all processes of a host
        ours.publish(version)
        return began, time.perf_counter() - began

    return {
        "start": lambda: ours.start(parameters), "meet": ours.meet, "change": change, "publish": publish,
        "settle": ours.settle, "close": ours.close, "nbytes": lambda: sum(t.nbytes for t in parameters.values()),
    }  # fmt: skip


def _replica(name: str, gb: float) -> dict[str, Callable[..., Any]]:
    from . import contender, model

    parameters = model.made(gb * 1e9, 99)
    copy = model.Copy(parameters)
    ours = contender.replica(name)

    def take(version: int) -> tuple[float, float]:
        swap_s = ours.take(version)
        return time.perf_counter(), swap_s

    return {
        "start": lambda address: ours.start(parameters, address), "copy": copy.seconds, "ready": lambda: None,
        "take": take, "sample": lambda: model.sample(parameters), "close": ours.close,
    }  # fmt: skip


if __name__ == "__main__":
    chosen, options = sys.argv[1:]
    print(json.dumps(drive(chosen, **json.loads(options))))
