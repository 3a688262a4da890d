"""The status of a queue: what is where, who holds it, who waits for what and since when; at a price that stays."""

import asyncio
import threading

import numpy as np
from queue_runs import ClientProcess, Served, runs_over, values_of
from waiting import until

import asyncflow_sdk

run = runs_over("ipc")


def test_it_says_who_holds_what_and_who_waits_for_what(run: Served) -> None:
    # given a consumer of another process that holds rows, and a trainer that waits for them
    queue, trainer = run.queue(), run.queue("trainer-0")
    queue.declare("work", needs=["x"], gives=["y"])
    queue.declare("train", needs=["y"])
    queue.put({"x": values_of(0, 8)})
    with ClientProcess(run.address, "consumer") as child:
        token = child('(batch := queue.get("work", 5)).token')
        waiting = threading.Thread(target=lambda: trainer.get("train", timeout_s=100).ack(), daemon=True)
        waiting.start()
        # when
        until(lambda: queue.status().parked, "the get that waits")
        status = queue.status()
        # then
        assert status.rows["work"] == {"waiting": 0, "ready": 3, "selected": 0, "leased": 5, "done": 0}
        assert status.rows["train"]["waiting"] == status.live == status.put == 8
        assert (status.arrived["work"], status.completed["work"], status.arrived["train"]) == (8, 0, 0)
        (parked,) = status.parked
        assert (parked.name, parked.verb, status.parked_count) == ("trainer-0", "get train", 1)
        assert parked.since_s >= 0
        assert 0 < parked.left_s <= 100
        assert "8 rows lack column 'y', given by task 'work'" in parked.why
        assert "by consumer for" in parked.why
        assert status.oldest is not None
        assert (status.oldest.token, status.oldest.task, status.oldest.name) == (token, "work", "consumer")
        assert (status.oldest.rows, status.lease_count) == (5, 1)
        assert 0 < status.oldest.left_s <= 600
        sessions = {session.name: session for session in status.sessions}
        assert set(sessions) == {"driver", "test", "trainer-0", "consumer"}
        worker = sessions["consumer"]
        assert (worker.pid, worker.rows, worker.leases, worker.task) == (child.pid, 5, 1, "work")
        assert worker.host == status.host != ""
        assert worker.age_s >= worker.held_s >= 0
        assert 64 <= status.payload_bytes == status.written_bytes < 1024
        assert status.held_bytes >= status.payload_bytes
        assert status.sdk == asyncflow_sdk.__version__
        # and when it has come
        assert child('batch.complete({"y": np.zeros(5)}).tolist()') == []
        waiting.join(100)
        assert not waiting.is_alive()
        until(lambda: queue.status().rows["work"]["done"] == 5 - queue.status().ended["consumed"], "the end of a row")
        after = queue.status()
        assert (after.completed["work"], after.arrived["train"], after.lease_count) == (5, 5, 0)
        assert after.written_bytes >= status.written_bytes + 40
    until(lambda: len(queue.status().sessions) == 3, "the session to go")


def test_bytes_go_with_the_rows(run: Served) -> None:
    queue = run.queue()
    queue.declare("work", needs=["x"])
    queue.put({"x": [np.arange(3), np.arange(5)], "t": ["a", "bc"]})
    written = queue.status().payload_bytes
    assert 8 * 8 + 3 * 8 + 3 + 3 * 8 <= written < 1024
    with queue.get("work", 2) as batch:
        batch.ack()
    status = queue.status()
    assert (status.payload_bytes, status.live, status.ended["consumed"]) == (0, 0, 2)
    assert status.written_bytes == written


def test_a_thousand_waiting_sessions_are_counted_and_the_longest_waiting_named(run: Served) -> None:
    # given more requests that wait than anybody reads
    queue = run.queue()
    queue.declare("work", needs=["x"])
    crowd = threading.Thread(target=_wait_often, args=(run, 150), daemon=True)
    crowd.start()
    # when
    until(lambda: queue.status().parked_count == 150, "all of them")
    status = queue.status()
    # then
    assert len(status.parked) == 100
    assert [p.since_s for p in status.parked] == sorted((p.since_s for p in status.parked), reverse=True)
    queue.put({"x": np.zeros(150)})
    crowd.join(100)
    assert queue.audit().consumed == 150


def _wait_often(run: Served, count: int) -> None:
    aio = run.queue("crowd").aio

    async def one() -> None:
        async with await aio.get("work", timeout_s=100) as batch:
            await batch.ack()

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(count)))

    asyncio.run(all_of_them())
