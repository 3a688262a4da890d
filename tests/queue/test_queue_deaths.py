"""Processes that die or freeze at any moment: no row is lost, none is done twice, and nothing is left behind."""

import os

import numpy as np
from children import Child, say
from queue_runs import ClientProcess, Served, memory_of, running, serve, values_of
from waiting import until

import asyncflow_sdk as af


def use_after_fork(address: str) -> None:
    """Use a queue from a forked child, which must neither reach the server nor touch the parent's memory."""
    queue = af.connect(address, name="forker").queue
    batch = queue.get("work", 4)
    loader = af.StreamDataLoader(queue, "work", ["x"], 4, collate=lambda batch: batch.rows)
    if not (child := os.fork()):
        refused = 0
        for attempt in (
            lambda: queue.put({"x": np.ones(100)}),
            lambda: batch.complete({"y": np.ones(4)}),
            lambda: batch.torch("x"),
            lambda: next(iter(loader)),
        ):
            try:
                attempt()
            except af.AsyncFlowError as error:
                refused += "fork()" in str(error)
        os._exit(refused)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    batch.complete({"y": np.zeros(4)})
    say([code, float(batch.array("x").sum())])


def segments(run: Served, pattern: str = "s*") -> list[str]:
    return sorted(path.name for path in run.memory.glob(pattern))


def test_rows_of_a_killed_consumer_come_again(run: Served) -> None:
    # given a consumer in another process that holds rows
    queue = run.queue()
    queue.declare("work", needs=["x"], gives=["y"])
    queue.put({"x": values_of(0, 8)})
    with ClientProcess(run.address) as child:
        assert child('queue.get("work", 5).ids.tolist()') == [0, 1, 2, 3, 4]
        # when
        child.kill()
        # then others get them, without waiting for the lease
        seen: list[int] = []
        while len(seen) < 8:
            batch = queue.get("work", 8, timeout_s=60)
            assert batch.array("x").tobytes() == values_of(0, 8)[batch.ids].tobytes()
            batch.complete({"y": np.zeros(batch.rows)})
            seen += batch.ids.tolist()
        assert sorted(seen) == list(range(8))
        assert queue.audit().balanced


def test_a_frozen_consumer_loses_its_rows_and_keeps_its_view(run: Served) -> None:
    # given a consumer that is frozen past its lease
    queue = run.queue()
    queue.declare("work", needs=["x"], gives=["y"], lease_s=60.0)
    queue.declare("end", needs=["y"])
    rows = 3000  # so many that they are viewed and not copied
    queue.put({"x": values_of(0, rows)})
    with ClientProcess(run.address) as child:
        assert child(f'(batch := queue.get("work", {rows})).rows') == rows
        child.stop()
        run.pass_time(61.0)
        # when another does its rows, they end, and their memory is wanted again and again
        left = rows
        while left:  # in quarters
            batch = queue.get("work", rows, timeout_s=100)
            batch.complete({"y": np.full(batch.rows, 7.0)})
            left -= batch.rows
        queue.get("end", rows).ack()
        queue.declare("more", needs=["z"], partitions=["more"])
        for _ in range(100):
            queue.put({"z": np.full((10, 3000), 255.0)}, partition="more")
            queue.get("more", 10).ack()
        assert run.held_bytes() <= 10 << 20  # a view costs its own bytes and holds up no others
        # then it wakes up, has no effect, and sees what it saw
        child.resume()
        assert child('batch.complete({"y": np.zeros(batch.rows)})').startswith("LeaseLost: lease")
        assert child('batch.array("x").tobytes() == values_of(0, batch.rows).tobytes()')
    audit = queue.audit()
    assert audit.balanced
    assert audit.put == audit.consumed


def test_rows_of_a_killed_producer_stay_readable_to_the_last_bit(run: Served) -> None:
    # given a producer that is killed when its put is acknowledged
    queue = run.queue()
    queue.declare("read", needs=["x", "text"])
    with ClientProcess(run.address, "producer") as child:
        texts = r'[f"row {i} \u00e4\0" for i in range(5000)]'
        assert child(f'queue.put({{"x": values_of(0, 5000), "text": {texts}}}).count') == 5000
        child.kill()
    until(lambda: "producer" not in str(queue.status().sessions), "its death")
    # when
    with queue.get("read", 5000) as batch:
        # then
        assert batch.array("x").tobytes() == values_of(0, 5000).tobytes()
        assert batch.texts("text") == [f"row {i} \u00e4\0" for i in range(5000)]
        assert segments(run)
        batch.ack()
    # and its memory goes with its last row
    queue.flush()
    assert segments(run) == []


def test_weights_of_a_dead_trainer_stay_until_newer_ones_are_there(run: Served) -> None:
    # given two trainers, one after the other, each killed after it published
    sessions = []
    for version in (1, 2):
        with ClientProcess(run.address) as child:
            weights = f'[("w", np.full(1000, {version}, np.float32))]'
            sessions.append(child(f"[run.weight_publisher().publish({version}, {weights}).wait(), run.session][1]"))
            child.kill()
    until(lambda: len(run.run.queue.status().sessions) == 1, "their deaths")
    # then both versions are kept, as the newest two are
    first, second = (f"w0.{session}-*" for session in sessions)
    assert segments(run, first)
    assert segments(run, second)
    # when a third publishes
    publisher = run.client().weight_publisher()
    publisher.publish(3, [("w", np.zeros(1000))]).wait()
    # then the first's bytes go, and later the second's
    assert not segments(run, first)
    publisher.publish(4, [("w", np.zeros(1000))]).wait()
    assert not segments(run, second)
    publisher.close()


def test_a_forked_child_is_refused_before_it_writes_into_its_parents_memory(run: Served) -> None:
    queue = run.queue()
    queue.declare("work", needs=["x"], gives=["y"])
    queue.put({"x": np.zeros((4, 1000))})  # so much that it is viewed and not copied
    with Child(use_after_fork, run.address) as child:
        assert child.hear() == [4, 0.0]
    assert queue.audit().put == 4


def test_sessions_that_come_and_go_leave_nothing(run: Served) -> None:
    # given
    queue = run.queue()
    queue.declare("work", needs=["x"])
    for number in range(15):
        with run.client(f"visitor-{number}") as visitor:
            visitor.queue.put({"x": [number]})
            visitor.queue.get("work").ack() if number % 2 else visitor.queue.get("work")
    # when those who held rows have left, the rows are there again
    queue.get("work", 8, at_least=8, timeout_s=60).ack()
    # then
    queue.flush()
    assert segments(run) == []
    status = queue.status()
    assert [session.name for session in status.sessions] == ["driver", "test"]
    assert (status.payload_bytes, status.live, status.lease_count) == (0, 0, 0)


def test_nothing_is_left_after_close() -> None:
    with running() as run:
        run.queue().put({"x": np.zeros(1000)})
        assert run.memory.is_dir()
    assert not run.memory.exists()


def test_what_a_killed_server_left_goes_with_the_next_start() -> None:
    # given
    with Child(serve, None, {}) as child:
        addresses = child.hear()["addresses"]
        memory = memory_of(addresses)
        client = af.connect(addresses[-1])
        client.queue.put({"x": values_of(0, 10_000)})
        assert list(memory.glob("s*"))
        child.kill()  # from now on, any server that starts on this host removes it
        # when
        with running() as run:
            # then
            until(lambda: not memory.exists(), "its end, by this server or one that started just before")
    assert not run.memory.exists()
