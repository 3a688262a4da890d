"""AsyncFlow's TransferQueue, with everything on: leases, types, completion, the audit checked at the end.

``ours-journal``: with a journal that survives the kill of any process. ``ours-tcp``: as from another host, without
keys, as the floor and the peer have none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import asyncflow_sdk as af

from .contender import Client, Service, Task
from .samples import Columns


class Ours(Service):
    def __init__(self, kind: str) -> None:
        self._kind = kind

    def start(self, tasks: dict[str, Task]) -> str:
        self._folder = tempfile.TemporaryDirectory()
        options: dict[str, Any] = {
            "ours-journal": {"directory": self._folder.name, "durability": "process"},
            "ours-tcp": {"address": "tcp://127.0.0.1:0", "insecure": True},
        }.get(self._kind, {})
        self._run = af.serve(**options)
        for name, task in tasks.items():
            self._run.queue.declare(name, needs=task.needs, gives=task.gives)
        return self._run.address

    def end(self) -> None:
        self._run.queue.end()

    def check(self, put: int) -> None:
        audit = self._run.audit()
        assert audit.balanced, audit
        assert (audit.put, audit.consumed, audit.live) == (put, put, 0), audit

    def stop(self) -> None:
        self._run.close()
        self._folder.cleanup()


class OurClient(Client):
    def __init__(self, kind: str, address: str) -> None:
        self._run = af.connect(address, insecure=kind == "ours-tcp", shared_memory=kind != "ours-tcp")
        self._last: af.LeasedBatch | None = None

    def prepare(self, columns: Columns) -> dict[str, Any]:
        return {name: af.Ragged(*column) if isinstance(column, tuple) else column for name, column in columns.items()}

    def put(self, prepared: dict[str, Any]) -> None:
        self._run.queue.put(prepared)

    def take(self, task: str, count: int, more: Callable[[], bool]) -> Any:
        last, self._last = self._last, None
        try:
            return self._run.queue.get(task, count, ack=last)
        except af.Ended:
            return None

    def finish(self, taken: Any, prepared: Any = None) -> None:
        taken.finish(prepared)
        self._last = taken

    def settle(self) -> None:
        if self._last is not None:
            with self._last:
                self._last = None

    def values(self, taken: Any) -> list[Any]:
        arrays = (taken[name] for name in taken)
        return [array.values if isinstance(array, af.Ragged) else array for array in arrays]

    def rows(self, taken: Any) -> int:
        return int(taken.rows)

    def close(self) -> None:
        self._run.close()


def service(name: str) -> Service:
    return Ours(name)


def client(name: str, address: str) -> Client:
    return OurClient(name, address)
