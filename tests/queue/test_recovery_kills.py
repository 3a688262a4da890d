"""Real processes, killed at random moments: what was acknowledged is there, nothing is done twice, values are exact.

``ASYNCFLOW_KILLS=200 pytest tests/queue/test_recovery_kills.py`` looks longer.
"""

import contextlib
import os
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import Child, hear, say
from queue_runs import Durable, asking_again_soon, values_of
from waiting import until

import asyncflow_sdk as af

RUNS = int(os.environ.get("ASYNCFLOW_KILLS", "2"))
PUTS, SIZE = 40, 4


def work_all(address: str, task: str) -> None:
    """Complete rows of a task until the end; say which, once it is acknowledged."""
    asking_again_soon()
    queue = af.connect(address, name="consumer").queue
    numbers = np.random.default_rng(os.getpid())
    with contextlib.suppress(af.Ended):
        while True:
            batch = queue.get(task, int(numbers.integers(1, 9)), timeout_s=60)
            rows, x = batch.array("number"), batch.array("x")
            exact = all(values_of(int(n), 1)[0] == v for n, v in zip(rows, x, strict=True))
            try:
                batch.complete({"y": x * 2}) if task == "work" else batch.ack()
            except af.LeaseLost:
                continue
            say({"numbers": rows.tolist(), "exact": bool(exact)})
    say("done")
    hear()


def put_all(address: str, first: int, puts: int, size: int) -> None:
    """Put rows number first, first + 1, ...: each put under its key; what is said was acknowledged."""
    asking_again_soon()
    queue = af.connect(address, name="producer").queue
    for number in range(first, puts):
        values = {"number": np.arange(size) + number * size, "x": values_of(number * size, size)}
        queue.put(values, key=f"put-{number}")
        say(number)
    say("done")
    hear()


class Heard:
    """All that a child says, as it says it."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.child, self.said = Child(function, *arguments), list[Any]()
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        while "done" not in self.said:
            try:
                self.said.append(self.child.hear())
            except AssertionError:  # it was killed
                return

    @property
    def done(self) -> bool:
        return "done" in self.said

    def end(self) -> int:
        """Kill it. Returns how much it has said."""
        self.child.kill()
        self.thread.join(60)
        self.child.__exit__()
        return len(self.said)


@pytest.mark.timeout(60 + 60 * RUNS)
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("seed", range(RUNS))
def test_whoever_is_killed_at_any_moment(seed: int, tmp_path: Path) -> None:
    # given a producer and two consumers of a run
    numbers, clients_die, kills = random.Random(seed), seed % 2 == 1, 0
    with Durable(tmp_path / "run") as run, run.client("driver") as driver:
        driver.queue.declare("work", needs=["number", "x"], gives=["y"], max_attempts=1000)
        driver.queue.declare("last", needs=["number", "x", "y"], max_attempts=1000)
        producer, put = Heard(put_all, run.address, 0, PUTS, SIZE), 0
        workers = {task: [Heard(work_all, run.address, task)] for task in ("work", "last")}
        # when the server is killed at random moments, and sometimes a client
        while kills < 2 or not producer.done:
            progress = len(producer.said) + numbers.randint(1, 10)
            until(lambda: len(producer.said) >= progress or producer.done, "progress")  # noqa: B023
            if clients_die and numbers.random() < 0.5:
                if numbers.random() < 0.5 and not producer.done:
                    put += producer.end()
                    producer = Heard(put_all, run.address, max(put - 2, 0), PUTS, SIZE)
                else:
                    task = numbers.choice(["work", "last"])
                    workers[task][-1].end()
                    workers[task].append(Heard(work_all, run.address, task))
            found = run.again()
            assert (found["differing"], found["lost"]) == (0, 0)
            kills += 1
        driver.queue.end()
        until(lambda: all(each[-1].done for each in workers.values()), "the end")
        # then every row that was put is there, and was consumed once
        audit = driver.queue.audit()
        assert audit.balanced
        assert (audit.put, audit.consumed) == (PUTS * SIZE, PUTS * SIZE)
        for each in workers.values():
            batches = [said for worker in each for said in worker.said if said != "done"]
            assert all(said["exact"] for said in batches)
            done = Counter(number for said in batches for number in said["numbers"])
            assert set(done.values()) <= {1}, "a row was completed twice"
            assert clients_die or sorted(done) == list(range(PUTS * SIZE))
        for worker in (producer, *workers["work"], *workers["last"]):
            worker.end()
