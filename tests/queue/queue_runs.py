"""A served run, clients that reach it in each of the ways there are, and servers and clients in processes."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import Child, answer, hear, say
from flaky_proxy import WHOLE, FlakyProxy
from msgspec.structs import replace
from waiting import in_thread

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import TransferQueue
from asyncflow_sdk.queue.protocol import Block, Call, ClientHello, decode_result, encode
from asyncflow_sdk.wire import Client
from asyncflow_sdk.wire import client as WAITS

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
        self._ends = contextlib.ExitStack()
        self._ends.callback(self.run.close)
        self.close = self._ends.close

    def client(self, name: str = "test", address: str = "", **options: Any) -> af.Run:
        """A client, at ``address`` instead of the run's own where a proxy stands between."""
        options = {"insecure": self.insecure, "shared_memory": self.shares_memory, **options}
        return self._ends.enter_context(contextlib.closing(af.connect(address or self.address, name=name, **options)))

    def queue(self, name: str = "test", **options: Any) -> TransferQueue:
        return self.client(name, **options).queue

    def proxied(self, name: str = "test", **options: Any) -> tuple[FlakyProxy, TransferQueue]:
        """A client behind a proxy, which can change its messages."""
        proxy = self._ends.enter_context(FlakyProxy(self.run.addresses[1].removeprefix("ipc://"), pieces=WHOLE))
        proxy.changed = lambda message: [message]
        return proxy, self.queue(name, address=proxy.address, insecure=True, **options)

    def pass_time(self, seconds: float) -> None:
        """Let so much time pass for the server: leases end without anybody's waiting for it."""
        vars(vars(self.run)["_server"])["_clock"].offset += seconds

    def held_bytes(self) -> int:
        return self.run.queue.status().held_bytes


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
        return self.said["found"]

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


class ClientProcess(Child):
    """A client in a process of its own. ``process("queue.put({'x': [1.0]}).count")`` returns what that is there."""

    def __init__(self, address: str, name: str = "child", **options: Any) -> None:
        super().__init__(evaluate, address, name, options)


class RawClient:
    """A session that sends whatever it is told to: commands that no queue would send, and bytes that are none.
    ``sdk``: the version that its hello names; None: it says none."""

    def __init__(self, address: str, name: str = "raw", *, sdk: str | None = af.__version__) -> None:
        self._client = Client(address)
        self.close = self._client.close
        if sdk is not None:
            self.send(ClientHello(name, 0, "", sdk))

    def send(self, command: Any, *block: Any, **more: Any) -> Any:
        """The reply to a command, of which the payload lies in a ``block``: segment, start, serial, rows, bytes, columns.
        Raises what the server reports."""
        return self.send_bytes(encode(Call(replace(command, block=Block(*block)) if block else command, **more)))

    def send_inline(self, command: Any, rows: int, image: bytes) -> Any:
        """The same for payload that comes beside its command: ``rows`` rows as an ``image`` of a block."""
        return self.send_bytes(encode(Call(command, payload=rows)), [image])

    def send_bytes(self, body: bytes, payload: Any = ()) -> Any:
        """The reply to a call as it lies on the wire. ``payload``: what comes beside it."""
        answer = decode_result(self._client.exchange(body, 60, payload).body)
        answer.raise_error()
        return answer.reply


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What ``work(0)``, ``work(1)``, ... give, each in a thread of its own."""
    outcomes = [join() for join in [in_thread(work, number) for number in range(count)]]
    for error in (outcome for outcome in outcomes if isinstance(outcome, BaseException)):
        raise error
    return outcomes


# ---- in processes of their own


def asking_again_soon() -> None:
    """Ask a silent server again after 0.1 s: tests cannot wait as long as people can."""
    WAITS.RESEND_S = 0.1


def serve(directory: str, options: dict[str, Any]) -> None:
    """Serve a run directory; say where, and what was found there."""
    with af.serve(directory, **options) as run:
        found = run.recovered and {**dataclasses.asdict(run.recovered), "text": str(run.recovered)}
        say({"addresses": run.addresses, "found": found})
        hear()


def values_of(first: int, count: int) -> Any:
    return (np.arange(first, first + count) * np.pi) ** 0.5


def evaluate(address: str, name: str, options: dict[str, Any]) -> None:
    """Be a client that says what each expression gives."""
    run = af.connect(address, name=name, **options)
    answer({"af": af, "np": np, "run": run, "queue": run.queue, "values_of": values_of})
