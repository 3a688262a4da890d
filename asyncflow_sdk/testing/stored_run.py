"""StoredRun: a served run with a store, and its clients, for tests of stores.

with StoredRun(Store(kind="mine", options={...})) as stored:
    stored.start_unit()
    stored.queue("writer", far=True).put({"x": [1.0, 2.0]})
    stored.process("square", 2)                      # python -m asyncflow_sdk.testing.stored_run ADDRESS square 2 ""
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from ..interfaces import TransferQueue
from ..interfaces.store import PayloadStore
from ..plugins import registry
from ..queue.connection import Connection
from ..queue.stores.unit import UnitConfig, ensure_unit
from ..queue.unit_process import run_unit
from ..types.config import Store
from ..workflow import Run, connect, serve
from .kit.check import CheckFailed, expect

BEAT_S = 0.2
LIMIT_S = 60.0
"""Limit of each wait."""


class StoredRun:
    """A run without keys, and its clients, until the block ends. ``run``: its server. ``has_homes``:
    False if all payload is in the server's memory. Raises PluginError, ConfigError."""

    def __init__(self, store: Store) -> None:
        self.has_homes = registry().get("store", store.kind).spec.can.get("hosts") != "one"
        self.run: Run = serve(address="tcp://127.0.0.1:0", insecure=True, store=store)
        self._ends = contextlib.ExitStack()
        self._ends.callback(self.run.close)

    def client(self, name: str = "test", *, far: bool = False) -> Run:
        """Return a new client. ``far``: it does not see the server's memory, like one on another host."""
        address, insecure = (self.run.address, True) if far else (self.run.addresses[1], False)
        client = connect(address, name=name, insecure=insecure, shared_memory=not far)
        return self._ends.enter_context(contextlib.closing(client))

    def queue(self, name: str = "test", *, far: bool = False) -> TransferQueue:
        """Return the queue of a new client."""
        return self.client(name, far=far).queue

    def start_unit(self, *, process: bool = False) -> None:
        """Start the storage unit of this host, in a thread or a process. It ends with the run."""
        config = UnitConfig(self.run.address, insecure=True)
        if process:
            ensure_unit(connection_of(self.client("starter")).run, config, self._has_unit)
            return
        ended: Future[None] = Future()

        def _serve() -> None:
            try:
                run_unit(config, lambda text: None, threading.Event(), beat_s=BEAT_S)
                ended.set_result(None)
            except BaseException as error:
                ended.set_exception(error)

        thread = threading.Thread(target=_serve, name="unit")
        self._ends.callback(thread.join, LIMIT_S)
        self._ends.callback(self.run.close)  # the unit then removes its files
        thread.start()
        until(lambda: ended.done() or self._has_unit(), "the start of the storage unit")
        if ended.done():
            ended.result()

    def _has_unit(self) -> bool:
        return any(home.address for home in self.run.homes())

    def kill_unit(self) -> None:
        """Kill the process of the storage unit, and wait until the server knows."""
        (unit,) = (each for each in self.run.queue.status().sessions if each.name == "store")
        os.kill(unit.pid, signal.SIGKILL)
        until(lambda: not self._has_unit(), "the end of the storage unit")

    def process(self, action: str, rows: int, key: str = "") -> None:
        """Run a client in a process of its own, until it has ended. ``action``: "put" rows with a column x, by
        ``key``; "square": add the column y; "use": compare both."""
        command = [sys.executable, "-m", __name__, self.run.addresses[1], action, str(rows), key]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT_S)
        if done.returncode:
            raise CheckFailed(f"{action} of {rows} rows in a process of its own failed: {done.stderr[-2000:]}")

    def __enter__(self) -> StoredRun:
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()


def connection_of(client: Run) -> Connection:
    """Return the connection of a client."""
    connection: Connection = client.queue.connection
    return connection


def store_of(client: Run) -> PayloadStore:
    """Return the store of a client."""
    return connection_of(client).store


def until(condition: Callable[[], Any], what: str, limit_s: float = 2 * LIMIT_S) -> None:
    """Wait for a condition. Raises CheckFailed after the limit."""
    end = time.monotonic() + limit_s
    while not condition():
        expect(time.monotonic() < end, f"not within {limit_s:g} s: {what}")
        time.sleep(0.02)


def squares(x: Any) -> Any:
    """Return the squares of a column."""
    return np.square(x)


def _run_client(address: str, action: str, count: str, key: str) -> None:
    rows = int(count)
    with connect(address, name=action) as run:
        if action == "put":
            run.queue.put({"x": np.arange(float(rows))}, key=key)
            return
        while rows:
            with run.queue.get(action, rows, timeout_s=LIMIT_S) as batch:
                rows -= batch.rows
                x = batch.array("x")
                if action == "square":
                    batch.complete({"y": squares(x)})
                    continue
                if (batch.array("y") != squares(x)).any():
                    raise ValueError(f"squares of {x.tolist()} are read as {batch.array('y').tolist()}")
                batch.ack()


if __name__ == "__main__":
    _run_client(*sys.argv[1:])
