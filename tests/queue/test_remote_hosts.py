"""Two hosts: the queue across a cable that is long, that loses packets, that is cut and mended."""

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
from children import Child, hear, say
from hosts_in_namespaces import HERE, network, poor_cable

import asyncflow_sdk as af

ADDRESS = f"tcp://{HERE}:7000"
ROWS, WIDTH = 4, 40_000
PARTS = 10


def values(number: int) -> "np.ndarray[Any, Any]":
    """What part ``number`` of the work consists of."""
    return np.random.default_rng(number).random((ROWS, WIDTH))


def serve(directory: str) -> None:
    """Serve a run with keys; when asked, say how it went."""
    with af.serve(directory, address=ADDRESS) as run:
        run.queue.declare("work", needs=["x"], gives=["sum"])
        run.queue.declare("end", needs=["x", "sum"])
        say(run.address)
        hear()
        right = 0
        for _ in range(PARTS):
            with run.queue.get("end", ROWS, at_least=ROWS) as batch:
                wanted = np.concatenate([values(int(i) // ROWS)[int(i) % ROWS][None] for i in batch.ids])
                right += int((batch.array("x") == wanted).all() and (batch.array("sum") == wanted.sum(1)).all())
                batch.ack()
        audit = run.audit()
        say([right, audit.put, audit.consumed, audit.failed])
        hear()


def work(key: str) -> None:
    """Put parts, take them, complete them, and say so after each."""
    with af.connect(ADDRESS, key=key, name="far-worker") as run:
        say("connected")
        for number in range(PARTS):
            run.queue.put({"x": values(number)}, key=str(number))
            with run.queue.get("work", ROWS, timeout_s=60) as batch:
                batch.complete({"sum": batch.array("x").sum(1)})
            say(number)
        hear()


def test_work_goes_on_over_a_cable_that_is_long_loses_packets_and_is_cut_and_mended(tmp_path: Path) -> None:
    # given a server, and a worker on another host that sees none of its memory
    with (
        network(2) as hosts,
        poor_cable(hosts) as cable,
        Child(serve, str(tmp_path / "run"), within=hosts.within(1)) as server,
    ):
        assert server.hear() == ADDRESS
        key = shutil.copy(tmp_path / "run" / "run.key", tmp_path / "copy.key")
        cable({"delay_s": 0.004, "loss": 0.01})
        # when
        with Child(work, str(key), within=hosts.within(2)) as worker:
            assert worker.hear() == "connected"
            for number in range(3):
                assert worker.hear() == number
            cable({"loss": 1.0})
            time.sleep(1.0)  # nothing can be waited for: no frame passes
            cable({"loss": 0.01})
            # then it goes on, and nothing was lost or done twice
            for number in range(3, PARTS):
                assert worker.hear() == number
            cable({"delay_s": 0.0, "loss": 0.0})
            server.say("how did it go")
            assert server.hear() == [PARTS, PARTS * ROWS, PARTS * ROWS, 0]
