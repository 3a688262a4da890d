"""A run on three hosts, each process on a host of its own, to be attacked: server, storage units, clients."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from children import Child, answer, outcome, say
from queue_runs import asking_again_soon

import asyncflow_sdk as af
from asyncflow_sdk.queue import connection as CALLS
from asyncflow_sdk.queue import server as WAITS
from asyncflow_sdk.queue.stores.unit import UnitConfig
from asyncflow_sdk.queue.unit_process import run_unit
from asyncflow_sdk.types.events import HomeLost
from asyncflow_sdk.wire import RunKey
from asyncflow_sdk.wire import client as SOCKETS
from benchmarks.hosts.network import Network

SERVER, NEAR, FAR = 1, 2, 3
PORT = 7000
BEAT_S = 0.2
WIDTH = 3000


class Attacked:
    """A run on three hosts. Host 1 has the server; NEAR and FAR have units and clients as they are started."""

    def __init__(self, network: Network, folder: Path, ends: contextlib.ExitStack) -> None:
        self.network, self.folder, self._ends = network, folder, ends
        self.address = f"tcp://{network.address(SERVER)}:{PORT}"
        self.key = str(folder / "run" / "run.key")
        self.units: dict[int, Child] = {}
        self.options: dict[str, Any] = {}

    def start(self, host: int, function: Callable[..., None], *arguments: Any) -> Child:
        """Start a process on a host."""
        return self._ends.enter_context(Child(function, *arguments, within=self.network.within(host)))

    def begin(self, *, batch_rows: int | None = None, **options: Any) -> list[Child]:
        """Serve the run, and start a unit and a client on NEAR and FAR. Returns the clients."""
        self.serve(**options)
        self.declare(batch_rows)
        return self.populate(NEAR, FAR)

    def serve(self, **options: Any) -> Any:
        """Serve the run, again after ``kill``. Returns what was recovered."""
        self.options = options
        self.server = self.start(SERVER, serve, str(self.folder / "run"), self.address, options)
        return self.server.hear()

    def kill_server(self) -> None:
        """Kill the server, and serve its run again. The journal gives the same answers."""
        live = self.audit()["live"]
        self.server.kill()
        assert self.serve(**self.options) == {"rows": live, "differing": 0}

    def declare(self, batch_rows: int | None = None) -> None:
        """A lost attempt is a failed row. ``batch_rows``: of a step, if rows are trained in steps."""
        self.server("queue.declare('score', needs=['x', 'number'], gives=['y'], max_attempts=1)")
        needs = ["x", "ids", "text", "y", "number"]
        self.server(f"queue.declare('train', needs={needs}, max_attempts=1, batch_rows={batch_rows})")

    def unit(self, host: int, *, listen: str | None = None, key: str = "") -> Child:
        return self.start(host, unit, self.address, key or self.key, listen)

    def client(self, host: int, *, key: str = "", patience_s: float = 0.0) -> Child:
        name = f"client of host {host}"
        return self.start(host, client, self.address, key or self.key, name, patience_s)

    def populate(self, *hosts: int, patience_s: float = 0.0) -> list[Child]:
        """Start a unit and a client on each host, all at the same time. Returns the clients."""
        self.units |= {host: self.unit(host) for host in hosts}
        clients = [self.client(host, patience_s=patience_s) for host in hosts]
        for host in hosts:
            assert "is served at" in self.units[host].hear()
        for client in clients:
            assert client.hear() == "connected"
        return clients

    def audit(self) -> dict[str, int]:
        return self.server("audit()")

    def home(self, host: int) -> dict[str, Any]:
        (found,) = (home for home in self.server("run.homes()") if home["name"].startswith(f"host{host}-"))
        return found

    def evict(self, host: int) -> None:
        name = self.home(host)["name"]
        self.server(f"run.evict_home(next(home for home in run.homes() if home.name == {name!r}), 'it burns')")

    def absent(self, host: int) -> bool:
        return not self.home(host)["address"]

    def folder_of(self, host: int) -> Path:
        """The directory of a host's unit, as this process sees it."""
        return self.network.memory(host) / Path(self.home(host)["directory"]).name

    def ended(self, **states: int) -> None:
        """Each row ended once: ``states`` are all that there are."""
        audit = self.audit()
        assert audit == {**dict.fromkeys(audit, 0), **states, "put": sum(states.values())}


# ---- in processes on the hosts


def serve(directory: str, address: str, options: dict[str, Any]) -> None:
    """Serve a run. A unit that is silent for 2 s is absent. ``store``: options of the store."""
    WAITS.UNIT_SILENCE_S = 2.0
    events: list[HomeLost] = []
    own = {"fetch_s": 3.0, **options.pop("store", {})}
    with af.serve(
        directory, address=address, store=af.Store(kind="hosts", options=own),
        on_event=lambda event: events.append(event) if isinstance(event, HomeLost) else None, **options,
    ) as run:  # fmt: skip
        say(run.recovered and {"rows": run.recovered.rows, "differing": run.recovered.differing})

        def audit() -> dict[str, int]:
            found = run.audit()
            assert found.balanced
            return {"put": found.put, "live": found.live, **found.terminal}

        answer({"run": run, "queue": run.queue, "events": events, "audit": audit, "failed": lambda: failed(run)})


def failed(run: af.Run) -> dict[str, list[Any]]:
    """The number of failed rows, and their reasons, by key."""
    found: dict[str, list[Any]] = {}
    for group in run.queue.failed():
        entry = found.setdefault(group.key, [0, []])
        entry[0] += group.rows
        entry[1] += group.reasons
    return found


def unit(address: str, key: str, listen: str | None) -> None:
    """A storage unit. It says where it serves, and why it ends."""
    load = lambda: UnitConfig(address, key=RunKey.load(key), listen=listen)  # noqa: E731
    say(outcome(lambda: run_unit(load(), say, threading.Event(), beat_s=BEAT_S)) or "ended")


def client(address: str, key: str, name: str, patience_s: float) -> None:
    """A producer, a worker of "score" and a trainer. The server is lost for a call after twice
    ``patience_s``; 0: after the usual time."""
    asking_again_soon()
    if patience_s:
        CALLS.CALL_S = SOCKETS.GRACE_S = patience_s
    run = outcome(lambda: af.connect(address, key=key, name=name))
    say(run if isinstance(run, str) else "connected")
    if not isinstance(run, str):
        work = Work(run.queue)
        calls = {each.__name__: each for each in (work.put, work.score, work.train, work.begin_step, work.end_step)}
        answer({"run": run, "queue": run.queue, **calls})


def values_of(number: int) -> dict[str, Any]:
    """The columns of row ``number``, NaNs among them."""
    random = np.random.default_rng(number)
    return {
        "x": np.frombuffer(random.bytes(8 * WIDTH), np.float64),
        "ids": random.integers(0, 1 << 40, 1 + number % 7),
        "text": random.bytes(number % 50).hex(),
    }


def score_of(x: Any) -> Any:
    return np.frombuffer(x.tobytes(), np.int64)[:100] ^ 0x55AA


class Work:
    """Rows are known by their numbers. All that is read is compared to what was written, bit for bit."""

    def __init__(self, queue: af.TransferQueue) -> None:
        self.queue = queue

    def put(self, numbers: list[int], **options: Any) -> int:
        rows = [values_of(number) for number in numbers]
        columns = {name: [row[name] for row in rows] for name in ("ids", "text")}
        options = {"timeout_s": 150.0, **options}
        x = np.stack([row["x"] for row in rows])
        return self.queue.put({"number": np.array(numbers), "x": x, **columns}, **options).count

    def score(self, count: int) -> list[int]:
        return self._end("score", count, lambda batch: batch.complete({"y": np.stack([*map(score_of, batch["x"])])}))

    def train(self, count: int) -> list[int]:
        return self._end("train", count, lambda batch: (check(batch), batch.ack()))

    def _end(self, task: str, count: int, end: Callable[[Any], object]) -> list[int]:
        """Lease rows and end them, others if these end meanwhile. Returns their numbers."""
        while True:
            with (
                contextlib.suppress(af.LeaseLost),
                self.queue.get(task, count, at_least=count, timeout_s=150.0) as batch,
            ):
                numbers: list[int] = batch["number"].tolist()
                end(batch)
                return numbers

    def begin_step(self) -> list[int]:
        """Lease a step in parts of two rows, and read the first one. Returns the numbers of its rows."""
        self.steps = iter(self.queue.steps("train", part_rows=2, timeout_s=150.0))
        self.step = next(self.steps)
        self.parts = self.step.parts()
        return check(next(self.parts))

    def end_step(self) -> list[int]:
        """Read the other parts, and acknowledge the step. Returns the numbers of the rows in these parts."""
        numbers = [number for part in self.parts for number in check(part)]
        self.step.ack()
        return numbers


def check(batch: Any) -> list[int]:
    """Compare rows to what was written. Returns their numbers."""
    for at, number in enumerate(batch["number"].tolist()):
        wanted = values_of(number)
        assert batch["x"][at].tobytes() == wanted["x"].tobytes()
        assert batch["ids"][at].tolist() == wanted["ids"].tolist()
        assert batch["text"][at] == wanted["text"]
        assert batch["y"][at].tobytes() == score_of(wanted["x"]).tobytes()
    return batch["number"].tolist()
