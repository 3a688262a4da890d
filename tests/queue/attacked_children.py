"""The server, storage units and clients of ``test_attacked_hosts``, each a process on a host of its own."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import msgspec
import numpy as np
from children import hear, say
from queue_children import asking_again_soon

import asyncflow_sdk as af
from asyncflow_sdk.queue import connection as CALLS
from asyncflow_sdk.queue import server as WAITS
from asyncflow_sdk.queue.unit_process import run_unit
from asyncflow_sdk.queue.unit_start import UnitConfig
from asyncflow_sdk.types.events import HomeLost
from asyncflow_sdk.wire import RunKey
from asyncflow_sdk.wire import client as SOCKETS

BEAT_S = 0.2
WIDTH = 3000


def answer(known: dict[str, Any]) -> None:
    """Say what each expression that is heard gives. An error of the SDK is its name and text."""
    while True:
        try:
            value = eval(hear(), known)
        except af.AsyncFlowError as error:
            value = f"{type(error).__name__}: {error}"
        say(msgspec.to_builtins(value))


def serve(directory: str, address: str, options: dict[str, Any]) -> None:
    """Serve a run. A unit that is silent for 2 s is absent. ``store``: options of the store."""
    WAITS.UNIT_SILENCE_S = 2.0
    events: list[HomeLost] = []
    own = {"fetch_s": 3.0, **options.pop("store", {})}
    with af.serve(
        directory, address=address, store=af.Store(kind="hosts", options=own),
        on_event=lambda event: events.append(event) if isinstance(event, HomeLost) else None, **options,
    ) as run:  # fmt: skip
        say(None if run.recovered is None else {"rows": run.recovered.rows, "differing": run.recovered.differing})

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
    try:
        config = UnitConfig(address, key=RunKey.load(key), listen=listen)
        run_unit(config, say, threading.Event(), beat_s=BEAT_S)
    except af.AsyncFlowError as error:
        say(f"{type(error).__name__}: {error}")
    else:
        say("ended")


def client(address: str, key: str, name: str, patience_s: float) -> None:
    """A producer, a worker of "score" and a trainer. The server is lost for a call after twice ``patience_s``; 0: after the
    usual time."""
    asking_again_soon()
    if patience_s:
        CALLS.CALL_S = SOCKETS.GRACE_S = patience_s
    try:
        run = af.connect(address, key=key, name=name)
    except af.AsyncFlowError as error:
        say(f"{type(error).__name__}: {error}")
        return
    say("connected")
    work = Work(run)
    answer({
        "run": run, "queue": run.queue, "put": work.put, "score": work.score, "train": work.train,
        "begin_step": work.begin_step, "end_step": work.end_step,
    })  # fmt: skip


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

    def __init__(self, run: af.Run) -> None:
        self.queue = run.queue

    def put(self, numbers: list[int], **options: Any) -> int:
        rows = [values_of(number) for number in numbers]
        columns = {name: [row[name] for row in rows] for name in ("ids", "text")}
        options = {"timeout_s": 50.0, **options}
        x = np.stack([row["x"] for row in rows])
        return self.queue.put({"number": np.array(numbers), "x": x, **columns}, **options).count

    def score(self, count: int) -> list[int]:
        """Score rows, others if these end meanwhile. Returns their numbers."""
        with (
            contextlib.suppress(af.LeaseLost),
            self.queue.get("score", count, at_least=count, timeout_s=50.0) as batch,
        ):
            batch.complete({"y": np.stack([score_of(x) for x in batch["x"]])})
            return batch["number"].tolist()  # type: ignore[no-any-return]
        return self.score(count)

    def train(self, count: int) -> list[int]:
        """Train rows, others if these end meanwhile. Returns their numbers."""
        with (
            contextlib.suppress(af.LeaseLost),
            self.queue.get("train", count, at_least=count, timeout_s=50.0) as batch,
        ):
            numbers = check(batch)
            batch.ack()
            return numbers
        return self.train(count)

    def begin_step(self) -> list[int]:
        """Lease a step in parts of two rows, and read the first one. Returns the numbers of its rows."""
        self.steps = iter(self.queue.steps("train", part_rows=2, timeout_s=50.0))
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
    return batch["number"].tolist()  # type: ignore[no-any-return]
