"""A real server and real connections, over each of the ways a client may reach it."""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncflow_sdk.memory import Arena
from asyncflow_sdk.queue import Connection, QueueServer, TransferQueue, open_queue
from asyncflow_sdk.wire import fresh_keys

KINDS = ("in-process", "ipc", "tcp", "remote")
"""``remote``: over tcp, and as if the server's memory were out of sight."""
_numbers = itertools.count()
_arenas: weakref.WeakKeyDictionary[Connection, Arena] = weakref.WeakKeyDictionary()  # where its values are written


class Run:
    """A server, its address of one kind, and the connections made by ``queue``."""

    def __init__(self, kind: str, **options: Any) -> None:
        extra = {"in-process": f"inproc://run{next(_numbers)}", "ipc": None}.get(kind, "tcp://127.0.0.1:0")
        self.shared_memory = kind != "remote"
        self.insecure = options.get("insecure", False)
        keys = fresh_keys() if extra is not None and extra.startswith("tcp:") and not self.insecure else None
        self.key = None if keys is None else keys.run
        self.server = QueueServer([extra] if extra else [], keys=keys, **options)
        self.address = self.server.addresses[-1]
        self._connections: list[Connection] = []

    def queue(self, name: str = "test") -> TransferQueue:
        connection = Connection(
            self.address, name, key=self.key, insecure=self.insecure, shared_memory=self.shared_memory
        )
        self._connections.append(connection)
        _arenas[connection] = self.server._remote.arena if connection.inline else connection.arena
        return open_queue(connection)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self.server.close()


@contextlib.contextmanager
def running(kind: str = "ipc", **options: Any) -> Iterator[Run]:
    run = Run(kind, **options)
    try:
        yield run
    finally:
        run.close()


def runs_over(*kinds: str) -> Any:
    """A fixture ``run``: the tests of a file run once over each of ``kinds``."""

    @pytest.fixture(params=kinds)
    def run(request: pytest.FixtureRequest) -> Iterator[Run]:
        with running(request.param) as run:
            yield run

    return run


def arena_of(queue: TransferQueue) -> Arena:
    """Where what is put lies."""
    return _arenas[queue._port.connection]


def blocks_in_use(queue: TransferQueue) -> int:
    """Blocks that a writer still counts as somebody's."""
    return arena_of(queue).blocks


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What ``work(0)``, ``work(1)``, ... give, each in a thread of its own."""
    outcomes: list[Any] = [None] * count

    def run(number: int) -> None:
        try:
            outcomes[number] = work(number)
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes
