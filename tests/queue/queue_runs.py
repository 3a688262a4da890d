"""A served run, clients that reach it in each of the ways there are, a relay between them, and a server that is killed."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from children import Child
from queue_children import serve

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import TransferQueue

KINDS = ("ipc", "remote")
"""``ipc``: values go through shared memory. ``remote``: over tcp, as from another host. Also ``in-process`` and ``tcp``."""
_numbers = itertools.count()


class Served:
    """A run that this process serves, and its clients."""

    def __init__(self, kind: str = "ipc", directory: Path | None = None, **options: Any) -> None:
        address = {"in-process": f"inproc://run-{next(_numbers)}", "ipc": None}.get(kind, "tcp://127.0.0.1:0")
        self.shares_memory, self.insecure = kind != "remote", options.get("insecure", False)
        self.run = af.serve(directory, address=address, **options)
        self.address, self.memory = self.run.address, memory_of(self.run.addresses)
        self._clients: list[af.Run] = []
        self._relays: list[Relay] = []

    def client(self, name: str = "test", address: str = "", **options: Any) -> af.Run:
        """A client, at ``address`` instead of the run's own where a proxy or a relay stands between."""
        options = {"insecure": self.insecure, "shared_memory": self.shares_memory, **options}
        self._clients.append(af.connect(address or self.address, name=name, **options))
        return self._clients[-1]

    def queue(self, name: str = "test", **options: Any) -> TransferQueue:
        return self.client(name, **options).queue

    def relayed(self, name: str = "test", **options: Any) -> tuple["Relay", TransferQueue]:
        """A client behind a relay."""
        self._relays.append(relay := Relay(self.run.addresses[1]))
        return relay, self.queue(name, address=relay.address, insecure=True, **options)

    def held_bytes(self) -> int:
        """Bytes of shared memory that the run takes."""
        return self.run.queue.status().held_bytes

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for relay in self._relays:
            relay.close()
        self.run.close()


@contextlib.contextmanager
def running(kind: str = "ipc", directory: Path | None = None, **options: Any) -> Iterator[Served]:
    with contextlib.closing(Served(kind, directory, **options)) as run:
        yield run


def runs_over(*kinds: str) -> Any:
    """A fixture ``run``: the tests of a file run once over each of ``kinds``."""

    @pytest.fixture(params=kinds)
    def run(request: pytest.FixtureRequest) -> Iterator[Served]:
        with running(request.param) as run:
            yield run

    return run


def memory_of(addresses: list[str]) -> Path:
    """The directory of a run's shared memory."""
    (socket,) = (Path(address.removeprefix("ipc://")) for address in addresses if address.startswith("ipc:"))
    return socket.parent


class Durable:
    """A run served by a process of its own, which is killed and started again. ``found``: what the last one recovered."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.directory, self.options = directory, {"durability": "process", **options}
        self.start()
        self.address, self.memory = self.said["addresses"][-1], memory_of(self.said["addresses"])

    def start(self) -> dict[str, Any]:
        self.server = Child(serve, str(self.directory), self.options)
        self.said = self.server.hear()
        self.options.pop("durability", None)  # a run that comes back has what it had
        found: dict[str, Any] = self.said["found"]
        return found

    def kill(self) -> None:
        self.server.kill()

    def again(self) -> dict[str, Any]:
        """Kill the server and start another. Returns what it found."""
        self.kill()
        self.server.__exit__()
        return self.start()

    def client(self, name: str = "client", **options: Any) -> af.Run:
        return af.connect(self.address, name=name, key=options.pop("key", None), **options)

    def __enter__(self) -> "Durable":
        return self

    def __exit__(self, *error: object) -> None:
        self.server.__exit__()
        if (self.directory / "journal").is_dir():
            with af.serve(self.directory) as run:  # removes its shared memory
                run.queue.end(cancel=True)


class Relay:
    """Stands between a client and a server, message by message: counts ``requests``, sends what ``changed`` makes of each,
    and brings no answers back while ``answering`` is not set."""

    def __init__(self, address: str) -> None:
        self.requests, self.answering = 0, threading.Event()
        self.changed: Callable[[list[bytes]], Iterable[list[bytes]]] = lambda message: [message]
        self.answering.set()
        self._server, self._closed = address, False
        self._front = zmq.Context.instance().socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._thread.join(60)

    def _pass_on(self) -> None:
        backs: dict[bytes, zmq.Socket[bytes]] = {}  # one for each socket of the client
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._closed:
            ready = dict(poller.poll(20))
            if self._front in ready:
                peer, *message = self._front.recv_multipart()
                if peer not in backs:
                    backs[peer] = zmq.Context.instance().socket(zmq.DEALER)
                    backs[peer].connect(self._server)
                    poller.register(backs[peer], zmq.POLLIN)
                self.requests += 1
                for each in self.changed(message):
                    backs[peer].send_multipart(each)
            if not self.answering.is_set():
                time.sleep(0.005)
                continue
            for peer, back in backs.items():
                if back in ready:
                    self._front.send_multipart([peer, *back.recv_multipart()])
        for socket in (self._front, *backs.values()):
            socket.close(linger=0)


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
