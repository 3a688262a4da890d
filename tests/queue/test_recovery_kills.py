"""Real processes, killed at random moments: what was acknowledged is there, nothing is done twice, values are exact.

``ASYNCFLOW_KILLS=200 pytest tests/queue/test_recovery_kills.py`` looks longer.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from children import Child
from journal_children import put_all, serve_and_die, work_all
from waiting import until

from asyncflow_sdk.memory import sweep
from asyncflow_sdk.queue import Connection, open_queue
from asyncflow_sdk.wire import client

RUNS = int(os.environ.get("ASYNCFLOW_KILLS", "3"))
PUTS, SIZE = 40, 4
MOMENTS = ["before", "after", "torn", "before", "after", "torn", "before the snapshot", "after the snapshot"]


class Heard:
    """All that a child says, as it says it."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.child = Child(function, *arguments)
        self.said: list[Any] = []
        self.over = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.child._out:
            self.said.append(json.loads(line))
        self.over.set()

    def speaks(self) -> bool:
        return bool(self.said) or self.over.is_set()

    @property
    def done(self) -> bool:
        return "done" in self.said

    def end(self) -> None:
        self.child.kill()
        assert self.over.wait(30)
        self.child.__exit__()


class Deadly:
    """A run whose server dies again and again, and sometimes its clients."""

    def __init__(self, path: Path, seed: int, clients_die: bool) -> None:
        self.random = random.Random(seed)
        self.path, self.clients_die = path, clients_die
        self.deaths = 0
        self.server = self._serve(10**9)
        self.address = self.server.said[0]["address"]
        self.directory = os.path.dirname(self.address.removeprefix("ipc://"))
        self.queue = open_queue(Connection(self.address, "driver"))
        self.queue.declare("work", needs=["number", "x"], gives=["y"], max_attempts=1000)
        self.queue.declare("last", needs=["number", "x", "y"], max_attempts=1000)
        self.past: list[Heard] = []
        self.producer = Heard(put_all, self.address, 0, PUTS, SIZE)
        self.workers = {task: Heard(work_all, self.address, task) for task in ("work", "last")}

    def _serve(self, writes: int) -> Heard:
        """A server that will be killed about its so many-th commit: perhaps while it starts, then there is another."""
        while True:
            moment = self.random.choice(MOMENTS)
            server = Heard(serve_and_die, str(self.path), writes, moment)
            until(server.speaks, "the server")
            if server.said:
                break
            assert server.child.wait() == -signal.SIGKILL, server.child.errors()
            server.end()
            self.deaths += 1
        assert server.said[0]["differing"] == server.said[0]["lost"] == 0
        assert server.said[0]["damaged"] == ""
        return server

    def again(self) -> None:
        """The server is killed at some commit to come, and another takes over."""
        if not self.server.over.is_set() and self.deaths == 0:
            self.server.child.kill()  # the first one knows no moment of its own
        until(self.server.over.is_set, "the server's death")
        self.server.end()
        self.deaths += 1
        last = self.producer.done and self.random.random() < 0.3
        self.server = self._serve(10**9 if last else self.random.randint(8, 35))

    def kill_a_client(self) -> None:
        task = self.random.choice(["producer", "work", "last"])
        if task == "producer" and not self.producer.done:
            self.producer.end()
            self.past.append(self.producer)
            acknowledged = sum(len(each.said) for each in self.past if each not in self.workers.values())
            self.producer = Heard(put_all, self.address, max(acknowledged - 2, 0), PUTS, SIZE)
        elif task != "producer":
            self.workers[task].end()
            self.workers[task] = Heard(work_all, self.address, task)

    def run(self) -> None:
        while not self.producer.done:
            if self.server.over.is_set() or self.deaths == 0:
                self.again()
            if self.clients_die and self.random.random() < 0.02:
                self.kill_a_client()
            self.producer.over.wait(0.02)
            assert self.producer.done or not self.producer.over.is_set(), self.producer.child.errors()
        ended = threading.Thread(target=self.queue.end)
        ended.start()
        while not all(worker.done for worker in self.workers.values()) or ended.is_alive():
            if self.server.over.is_set():
                self.again()
            ended.join(0.02)
            for worker in self.workers.values():
                assert worker.done or not worker.over.is_set(), worker.child.errors()

    def audit(self) -> Any:
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.append(self.queue.audit()))
        asking.start()
        while asking.is_alive():
            asking.join(0.02)
            if self.server.over.is_set():
                self.again()
        return found[0]

    def close(self) -> None:
        for each in (self.producer, *self.workers.values()):
            each.end()


@pytest.mark.timeout(60 + 60 * RUNS)
@pytest.mark.parametrize("seed", range(RUNS))
def test_whoever_is_killed_at_any_moment(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RESEND_S", 0.1)
    # given a producer and two consumers of a run, when its server dies at random commits
    clients_die = seed % 3 == 2
    run = Deadly(tmp_path / "journal", seed, clients_die)
    try:
        run.run()
        if run.server.over.is_set():
            run.again()
        audit = run.audit()
        while audit.live:
            audit = run.audit()
        # then every row that was put is there, and was consumed once
        assert audit.balanced
        assert (audit.put, audit.consumed) == (PUTS * SIZE, PUTS * SIZE)
        for worker in run.workers.values():
            batches = [said for said in worker.said if said != "done"]
            assert all(said["exact"] for said in batches)
            numbers = Counter(number for said in batches for number in said["numbers"])
            assert set(numbers.values()) <= {1}, "a row was completed twice"
            assert clients_die or sorted(numbers) == list(range(PUTS * SIZE))
        assert run.deaths > 1
    finally:
        run.close()
        run.server.end()
        run.queue._port.connection.wire.close()
        shutil.rmtree(run.path)
        sweep(Path(run.directory).parent)
