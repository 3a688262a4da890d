"""Processes that die or freeze at any moment: no row is lost, none is done twice, and nothing is left behind."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from children import Child
from queue_children import consume, produce, publish, serve, use_after_fork, values_of, write_only
from queue_runs import Run, blocks_in_use, running
from waiting import until

from asyncflow_sdk.errors import LeaseLost
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.queue import QueueServer
from asyncflow_sdk.weights import WeightPublisher


@pytest.fixture(params=["ipc", "tcp"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    with running(request.param) as run:
        yield run


def segments(run: Run, pattern: str = "s*") -> list[str]:
    return sorted(path.name for path in run.server.directory.path.glob(pattern))


def test_rows_of_a_killed_consumer_come_again_and_its_token_is_stale(run: Run) -> None:
    # given a consumer in another process that holds rows
    queue = run.queue()
    queue.declare("work", needs=["x"], gives=["y"])
    queue.put({"x": values_of(0, 8)})
    with Child(consume, run.address, 5) as child:
        held = child.hear()
        assert held["ids"] == [0, 1, 2, 3, 4]
        # when
        child.kill()
        # then others get them, first of all, without waiting for the lease
        batch = queue.get("work", 8, timeout_s=30)
        while batch.rows < 8:
            batch.give_back()
            batch = queue.get("work", 8, timeout_s=30)
        assert sorted(batch.ids.tolist()) == list(range(8))
        assert batch.array("x").tobytes() == values_of(0, 8)[batch.ids].tobytes()
        # and nobody can complete them with the dead one's token
        stale = cmd.Complete(token=held["token"], columns={})
        with pytest.raises(LeaseLost):
            queue._port.connection.answered(
                queue._port.connection.wire.exchange(queue._port.connection.call(stale), 5)
            )
        batch.complete({"y": np.arange(8.0)})
        assert queue.audit().balanced


def test_a_frozen_consumer_loses_its_rows_and_keeps_its_view(run: Run) -> None:
    # given a consumer that is frozen past its lease
    queue = run.queue()
    queue.declare("work", needs=["x"], gives=["y"], lease_s=1.0)
    queue.declare("end", needs=["y"])
    rows = 3000  # so many that they are viewed and not copied
    queue.put({"x": values_of(0, rows)})
    with Child(consume, run.address, rows) as child:
        child.hear()
        child.stop()
        # when another does its rows, they end, and their memory is wanted again and again
        queue.get("work", rows, timeout_s=30).complete({"y": np.full(rows, 7.0)})
        queue.get("end", rows).ack()
        queue.flush()
        arena = queue._port.connection.arena
        for number in range(200):
            blocks = [arena.allocate(1 << (8 + (number + n) % 12)) for n in range(20)]
            for block in blocks:
                block.memory[16:] = 255
            arena.free([block.serial for block in blocks])
        assert arena.nbytes <= 8 << 20  # it costs its own bytes and holds up no others
        # then it wakes up, has no effect, and sees what it saw
        child.resume()
        child.say("complete")
        outcome = child.hear()
        assert outcome["outcome"].startswith("LeaseLost: lease")
        assert outcome["same"]
    audit = queue.audit()
    assert audit.balanced
    assert audit.put == audit.consumed


def test_rows_of_a_killed_producer_stay_readable_to_the_last_bit(run: Run) -> None:
    # given a producer that is killed when its put is acknowledged
    queue = run.queue()
    queue.declare("read", needs=["x", "text"])
    with Child(produce, run.address, 5000) as child:
        assert child.hear() == [0, 5000]
        child.kill()
        until(lambda: "producer-child" not in str(run.server.ledger.sessions), "its death")
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


def test_a_producer_killed_between_write_and_put_leaves_nothing(run: Run) -> None:
    # given
    queue = run.queue()
    with Child(write_only, run.address) as child:
        session, segment = child.hear()
        assert segment in segments(run, f"s{session}-*")
        # when
        child.kill()
        # then
        until(lambda: not segments(run, f"s{session}-*"), "its segments to go")
    assert queue.audit().put == 0


def test_weights_of_a_dead_trainer_stay_until_newer_ones_are_there(run: Run) -> None:
    # given two trainers, one after the other, each killed after it published
    with Child(publish, run.address, 1) as child:
        first = child.hear()
        child.kill()
    with Child(publish, run.address, 2) as child:
        second = child.hear()
        child.kill()
    until(lambda: not run.server.ledger.sessions, "their deaths")
    # then both versions are kept, as the newest two are
    assert segments(run, f"w0.{first}-*")
    assert segments(run, f"w0.{second}-*")
    # when a third publishes
    queue = run.queue()
    publisher = WeightPublisher(queue)
    publisher.publish(3, [("w", np.zeros(1000))]).wait()
    # then the first's bytes go, and later the second's
    assert not segments(run, f"w0.{first}-*")
    publisher.publish(4, [("w", np.zeros(1000))]).wait()
    assert not segments(run, f"w0.{second}-*")
    publisher.close()


def test_a_forked_child_is_refused_before_it_writes_into_its_parents_memory(run: Run) -> None:
    queue = run.queue()
    queue.declare("work", needs=["x"], gives=["y"])
    queue.put({"x": np.zeros((4, 1000))})  # so much that it is viewed and not copied
    with Child(use_after_fork, run.address) as child:
        assert child.hear() == [3, 0.0, 100]
    assert queue.audit().put == 4


def test_sessions_that_come_and_go_leave_nothing(run: Run) -> None:
    # given
    queue = run.queue()
    queue.declare("work", needs=["x"])
    for number in range(15):
        other = run.queue(f"visitor-{number}")
        other.put({"x": [number]})
        other.get("work").ack() if number % 2 else other.get("work")
        other._port.connection.close()
    # when those who held rows have left, the rows are there again
    taken = 0
    while taken < 8:
        with queue.get("work", 8, timeout_s=10) as batch:
            taken += batch.rows
            batch.ack()
    # then
    queue.flush()
    assert segments(run) == []
    assert list(run.server._wire._sessions) == [queue._port.connection.wire.session]
    assert run.server._pending == {}
    assert run.server._freed == {}
    assert blocks_in_use(queue) == 0


def test_nothing_is_left_after_close() -> None:
    with running("tcp") as run:
        queue = run.queue()
        queue.put({"x": np.zeros(1000)})
        path = run.server.directory.path
        assert path.is_dir()
    assert not path.exists()


def test_what_a_killed_server_left_goes_with_the_next_start() -> None:
    # given
    with Child(serve) as child:
        directory, _ = child.hear()
        assert list(Path(directory).glob("s1-*"))
        child.kill()
        assert Path(directory).is_dir()
        # when
        server = QueueServer([])
        # then
        assert not Path(directory).exists()
        server.close()
    assert not server.directory.path.exists()
