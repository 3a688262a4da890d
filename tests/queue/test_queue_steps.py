"""Steps delivered in parts over a real queue: trainers, ranks and servers that die in the middle of a step."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from queue_runs import KINDS, ClientProcess, Durable, RawClient, Served, in_threads, running
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import AsyncFlowError, DeadlineExceeded, LeaseLost, ProtocolError, SchemaError
from asyncflow_sdk.interfaces import LeasedStep, StepConsumer, TransferQueue
from asyncflow_sdk.ledger import commands as cmd

ROWS = 8
Begun = Callable[[StepConsumer], LeasedStep]


@pytest.fixture
def begun() -> Iterator[Begun]:
    """Leases the first step of a stream, whose loop lasts as long as the test."""
    with contextlib.suppress(AsyncFlowError), contextlib.ExitStack() as stack:
        yield lambda steps: next(iter(stack.enter_context(steps)))


def declared(queue: TransferQueue, **more: Any) -> TransferQueue:
    """A training task with steps of 8 rows."""
    queue.declare("train", needs=["x"], batch_rows=ROWS, **more)
    return queue


def put(queue: TransferQueue, *rows: int) -> None:
    """Groups of two rows each."""
    queue.put({"x": [np.arange(count) for count in rows]}, group_size=2)


STEP = '(stream := iter(queue.steps("train", part_rows={rows}, timeout_s=60{more})), step := next(stream), parts := step.parts()) and [step.token, step.index]'
PART = "((part := next(parts)).part, part.ids.tolist(), part.last)"


def begin(child: ClientProcess, rows: int = 2, more: str = "") -> Any:
    """Token and number of the step that a process leases in parts."""
    return child(STEP.format(rows=rows, more=more))


# ---- parts


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_comes_in_parts_while_the_rest_of_it_is_made(kind: str) -> None:
    with running(kind) as run:
        # given half a step
        queue = declared(run.queue())
        put(queue, 3, 4)
        steps = iter(queue.steps("train", part_rows=2, timeout_s=60))

        # when it is leased, and completed while it is
        step = next(steps)
        parts = step.parts()
        first = next(parts)
        assert (step.rows, step.complete, queue.status().in_parts) == (4, False, ((0, 4),))
        with pytest.raises(SchemaError, match="step 0 is not delivered whole"):
            step.ack()
        put(queue, 5, 6)
        rest = list(parts)

        # then its parts have all rows, each once, and one acknowledgement ends them
        assert [(part.index, part.part, part.last, part.rows) for part in (first, *rest)] == [
            (0, 0, False, 4),
            (0, 1, True, 4),
        ]
        assert [len(row) for part in (first, *rest) for row in part["x"]] == [3, 3, 4, 4, 5, 5, 6, 6]
        assert [part.groups.tolist() for part in rest] == [[4, 4, 6, 6]]
        assert (step.rows, step.complete, step.held) == (8, True, True)
        step.ack(filtered=np.arange(8) == 5)
        audit = queue.audit()
        assert (audit.consumed, audit.filtered, audit.live, step.held) == (7, 1, 0, False)


def test_the_steps_of_a_stream_come_one_after_another_and_each_is_told_once() -> None:
    told: list[tuple[int, list[int]]] = []
    with running(on_step=lambda step, read: told.append((step, read().ids.tolist()))) as run:
        queue, seen = declared(run.queue()), []
        put(queue, *[2] * 6)
        for step in queue.steps("train", part_rows=3, timeout_s=60):
            for part in step.parts():
                seen.append((part.index, part.part, part.ids.tolist()))
                if not part.last:  # the rest of the last step
                    put(queue, 2, 2)
            step.ack()
            if step.index == 1:
                queue.end()
    assert seen == [(0, 0, list(range(8))), (1, 0, list(range(8, 12))), (1, 1, list(range(12, 16)))]
    assert told == [(0, list(range(8))), (1, list(range(8, 16)))]


def test_an_event_loop_gets_the_same_parts(run: Served) -> None:
    async def train() -> list[int]:
        queue, rows = run.client().queue.aio, []
        async for step in queue.steps("train", timeout_s=60):
            async for part in step.parts():
                rows += part.ids.tolist()
            await step.renew()
            await step.ack(filtered=np.zeros(step.rows, bool))
        return rows

    queue = declared(run.queue())
    put(queue, *[2] * 8)
    queue.end()
    assert asyncio.run(train()) == list(range(16))
    assert queue.audit().consumed == 16


def test_a_step_that_is_left_comes_again_with_its_parts(run: Served) -> None:
    # given a loop that leaves its first step in the middle, and one that ends its turn without a word
    queue = declared(run.queue())
    put(queue, 1, 2)
    rows = []
    with contextlib.suppress(ZeroDivisionError), queue.steps("train", timeout_s=60) as steps:
        for step in steps:
            rows.append([next(step.parts()).ids.tolist()])
            raise ZeroDivisionError
    put(queue, 3, 4)
    queue.end()

    # when
    for turn, step in enumerate(queue.steps("train", part_rows=8, timeout_s=60)):
        rows.append([part.ids.tolist() for part in step.parts()])
        if turn:
            step.ack()

    # then
    assert rows == [[[0, 1, 2, 3]], [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert queue.audit().consumed == 8


def test_a_step_that_is_given_back_goes_to_another_client_whole_or_in_parts(run: Served, begun: Begun) -> None:
    queue, other = declared(run.queue()), run.queue("other")
    put(queue, 1, 2)
    with begun(queue.steps("train", timeout_s=60)) as step:
        pass
    assert not step.held
    with pytest.raises(LeaseLost, match=r"lease \d+ is not held by test: left without acknowledging"):
        step.ack()
    put(queue, 3, 4)
    other.get("train", timeout_s=60).ack()
    assert queue.audit().consumed == 8


# ---- deaths


def test_a_killed_trainer_leaves_the_same_parts_to_the_next(run: Served, begun: Begun) -> None:
    # given a trainer that is killed with two of four parts
    queue = declared(run.queue())
    with ClientProcess(run.address) as child:
        put(queue, 2)
        token, _ = begin(child)
        before = [child(PART)]
        put(queue, 3)
        before.append(child(PART))
        put(queue, 4)
        child.kill()
    until(lambda: queue.status().lease_count == 0, "its death")

    # when another goes on
    step = begun(queue.steps("train", part_rows=8, timeout_s=60))
    parts = step.parts()
    again = [next(parts), next(parts)]
    put(queue, 5)

    # then the parts are the same, under another token, and the rest is one part more
    assert [[part.part, part.ids.tolist(), part.last] for part in again] == before
    assert step.token > token
    assert [(part.part, part.ids.tolist(), part.last) for part in parts] == [(2, [4, 5, 6, 7], True)]
    step.ack()
    assert queue.audit().consumed == 8


def test_a_killed_rank_takes_the_step_from_all_and_each_gets_its_shares_again(run: Served) -> None:
    queue = declared(run.queue("admin"), sampler=("token_balanced", {"column": "x"}))
    ranks = [f', group="dp", rank={rank}, world_size=2' for rank in range(2)]

    def both(expressions: list[str], *children: ClientProcess) -> list[Any]:
        for child, expression in zip(children, expressions, strict=True):
            child.say(expression)
        return [child.hear() for child in children]

    begins = [STEP.format(rows=4, more=more) for more in ranks]
    with ClientProcess(run.address, "first") as first:
        # given two ranks, of which one is killed after the first part
        put(queue, 9, 1)
        with ClientProcess(run.address, "second") as second:
            (token, _), (same, _) = both(begins, first, second)
            before = both([PART] * 2, first, second)
            put(queue, 1)
            second.kill()
        until(lambda: queue.status().lease_count == 0, "its death")
        reason = first("step.renew()")
        assert reason.startswith(f"LeaseLost: lease {token} is not held by first: rank 1 of group 'dp' (second): "), (
            reason
        )

        # when it is started again
        with ClientProcess(run.address, "second") as second:
            tokens = [token for token, _ in both(begins, first, second)]
            again = both([PART] * 2, first, second)
            put(queue, 9)
            rest = both([PART] * 2, first, second)

            # then the shares are as they were, and balanced in whole groups
            assert token == same != tokens[0] == tokens[1]
            assert again == before
            assert sorted(rows for _, rows, _ in before) == [[0, 1], [2, 3]]
            assert sorted(rows for _, rows, _ in rest) == [[4, 5], [6, 7]]
            assert [last for _, _, last in rest] == [True, True]
            assert both(
                ["step.ack()", "step.ack(filtered=np.array([True, False, False, False]))"], first, second
            ) == [
                None,
                None,
            ]
    audit = queue.audit()
    assert (audit.consumed, audit.filtered, audit.live) == (7, 1, 0)


def test_a_rank_may_have_no_rows_in_a_part(run: Served) -> None:
    queue = declared(run.queue("admin"))
    put(queue, 1, 1, 1, 1)
    put(queue, 1)
    queues = [run.queue(f"rank-{rank}") for rank in range(3)]

    def work(rank: int) -> list[tuple[int, int, bool]]:
        steps = iter(queues[rank].steps("train", group="dp", rank=rank, world_size=3, timeout_s=60))
        step, seen = next(steps), []
        for part in step.parts():
            assert set(part) == {"x"}
            seen.append((part.part, part.rows, part.last))
        step.ack()
        step = next(steps)
        part = next(step.parts())
        seen.append((part.part, part.rows, part.last))
        return seen

    seen = in_threads(3, work)
    assert sorted(each[0] for each in seen) == [(0, 2, True), (0, 2, True), (0, 4, True)]
    assert sorted(each[1] for each in seen) == [(0, 0, False), (0, 0, False), (0, 2, False)]
    assert queue.audit().consumed == 8


def test_a_step_outlives_its_server(tmp_path: Path, soon: None, begun: Begun) -> None:
    with Durable(tmp_path / "run") as durable:
        # given a trainer with the first part, and its server, which is killed and comes back
        queue = declared(durable.client().queue)
        put(queue, 2, 3)
        with ClientProcess(durable.address) as child:
            token, _ = begin(child)
            before = child(PART)
            found = durable.again()
            assert (found["rows"], found["differing"]) == (4, 0)

            # when it goes on, and is killed, too
            put(queue, 4)
            assert child(PART) == [1, [4, 5], False]
            durable.again()
            child.kill()
        until(lambda: queue.status().lease_count == 0, "its death")
        durable.again()

        # then another gets the same parts
        put(queue, 5)
        step = begun(queue.steps("train", timeout_s=60))
        again = [[part.part, part.ids.tolist(), part.last] for part in step.parts()]
        assert again == [before, [1, [4, 5], False], [2, [6, 7], True]]
        assert step.token > token
        step.ack()
        assert queue.audit().consumed == 8


def test_a_run_with_parts_is_replayed_as_it_was(tmp_path: Path, begun: Begun) -> None:
    directory = tmp_path / "run"
    with af.serve(directory, durability="process", history=True) as run:
        queue = declared(run.queue)
        put(queue, 1, 2)
        with contextlib.suppress(ZeroDivisionError), begun(queue.steps("train")) as step:
            next(step.parts())
            raise ZeroDivisionError
        step = begun(queue.steps("train"))
        queue.cancel([0])
        with pytest.raises(LeaseLost):
            list(step.parts())
        put(queue, 3, 4)
        step = begun(queue.steps("train"))
        replayed = af.replay(directory)
    assert (replayed.differing, replayed.audit.cancelled, replayed.audit.live) == (0, 2, 6)


def test_a_frozen_trainer_has_no_effect_when_it_wakes_up(run: Served, begun: Begun) -> None:
    # given a trainer that is frozen past its lease with the whole step
    queue = declared(run.queue(), lease_s=60.0)
    put(queue, 1, 2, 3, 4)
    with ClientProcess(run.address) as child:
        begin(child)
        assert child(PART) == [0, list(range(8)), True]
        child.stop()
        run.pass_time(61.0)

        # when another gets the same step
        step = begun(queue.steps("train", timeout_s=100))
        assert [part.ids.tolist() for part in step.parts()] == [list(range(8))]

        # then the first wakes up, and acknowledges nothing
        child.resume()
        before = queue.audit()
        assert child("step.ack()").startswith("LeaseLost")
        assert child("step.held") is False
        assert queue.audit() == before
        step.renew()
        step.ack()
    assert queue.audit().consumed == 8


def test_a_lease_does_not_expire_while_its_holder_waits_for_a_part(run: Served) -> None:
    # given a lease that is shorter than the wait
    queue = declared(run.queue(), lease_s=20.0)
    put(queue, 1)
    with ClientProcess(run.address) as child:
        begin(child)
        child(PART)
        child.say(PART)
        until(lambda: any(parked.verb == "get train" for parked in queue.status().parked), "its wait")

        # when more time passes than the lease has
        run.pass_time(21.0)
        assert queue.status().lease_count == 1
        put(queue, 2, 3, 4)

        # then
        assert child.hear() == [1, [2, 3, 4, 5, 6, 7], True]


# ---- rows that end, and rows that never come


def test_a_step_is_void_without_a_delivered_row(run: Served) -> None:
    # given a trainer that waits for the next part
    queue = declared(run.queue())
    put(queue, 1, 2)
    with ClientProcess(run.address) as child:
        begin(child)
        child(PART)
        child.say(PART)
        until(lambda: queue.status().parked_count == 1, "its wait")

        # when a delivered row is cancelled
        assert queue.cancel([2], reason="it is wrong") == 2

        # then it is woken, and the step comes again without the group
        why = "rows 2, 3 of its step ended (cancelled): it is wrong"
        assert why in (reason := child.hear()), reason
        assert child("step.ack()").endswith(why)
        assert child("step.held") is False
        put(queue, 3, 4, 5)
        begin(child)
        assert child(PART) == [0, [0, 1], False]
        assert child(PART) == [1, [4, 5, 6, 7, 8, 9], True]
        assert child("step.ack()") is None
    audit = queue.audit()
    assert (audit.consumed, audit.cancelled, audit.live) == (8, 2, 0)


def test_a_rollback_takes_a_step_back_that_has_rows_of_its_version(begun: Begun) -> None:
    with running(max_staleness=1) as run:
        # given a step with delivered rows of version 1
        queue, replica = run.queue("trainer"), run.client("replica")
        queue.declare("rollout", needs=["prompt"], gives=["x"], admits=True)
        declared(queue)
        publisher = run.run.weight_publisher()

        def generate(groups: int) -> None:
            queue.put({"prompt": np.arange(groups)}, group_size=2)
            for _ in range(groups):
                with replica.queue.get("rollout", 2) as batch:
                    batch.complete({"x": [np.arange(3)] * 2})

        publisher.publish(0, [("w", np.zeros(4, np.float32))]).wait()
        replica.queue.loaded(0)
        generate(4)
        queue.get("train").ack()
        publisher.publish(1, [("w", np.ones(4, np.float32))]).wait()
        replica.queue.loaded(1)
        generate(2)
        step = begun(queue.steps("train", timeout_s=60))
        assert (step.index, step.version, step.rows) == (1, 1, 4)

        # when
        assert run.run.rollback(0, "it diverged").expired == 4

        # then what was computed from the step is void, and it is filled anew
        with pytest.raises(LeaseLost, match=r"rows 8, 9, 10, 11 of its step ended \(expired\): version 1 was rolled"):
            step.renew()
        run.run.restored(2)
        replica.queue.loaded(2)
        generate(4)
        step = begun(queue.steps("train", timeout_s=60))
        assert [(part.version, part.ids.tolist(), part.last) for part in step.parts()] == [
            (2, list(range(12, 20)), True)
        ]
        step.ack()
        audit = queue.audit()
        assert (audit.consumed, audit.expired, audit.live) == (16, 4, 0)
        publisher.close()


def test_a_step_whose_last_group_never_comes_names_it_and_its_holder(run: Served, begun: Begun) -> None:
    # given a step of which one group hangs in a stage, and another was not begun
    queue = run.queue("trainer")
    queue.declare("rollout", needs=["prompt"], gives=["x"])
    declared(queue)
    queue.put({"prompt": np.arange(4)}, group_size=2)
    with ClientProcess(run.address, "gen-7") as child:
        assert child('[batch.complete({"x": [np.arange(2)] * 4}).tolist() for batch in [queue.get("rollout", 4)]]')
        child('(held := queue.get("rollout", 2)).rows')
        step = begun(queue.steps("train", timeout_s=0.05))
        parts = step.parts()
        next(parts)

        # when
        with pytest.raises(DeadlineExceeded) as late:
            next(parts)

        # then
        text = str(late.value)
        assert "0 of 1 rows for the next part of step 0" in text
        assert "2 rows from 4 on (2 leased in task 'rollout' by gen-7 for" in text
        assert "2 rows from 6 on (2 ready for task 'rollout')" in text

        # and the step goes on when they come
        child('held.complete({"x": [np.arange(2)] * 2}).tolist()')
        assert [part.ids.tolist() for part in [next(step.parts())]] == [[4, 5]]


def test_a_stream_that_ends_in_the_middle_of_a_step_voids_it(run: Served) -> None:
    queue = declared(run.queue())
    put(queue, 1, 2)
    steps = iter(queue.steps("train", timeout_s=60))
    step = next(steps)
    queue.end()
    with pytest.raises(LeaseLost, match=r"ended \(cancelled\): too few to fill a step"):
        list(step.parts())[1:]
    assert next(steps, None) is None
    assert queue.audit().cancelled == 4


# ---- requests that no client makes


def test_wrong_requests_for_parts_are_refused_and_change_nothing(run: Served) -> None:
    queue = declared(run.queue())
    queue.declare("score", needs=["x"], gives=["y"])
    queue.declare("other", needs=["y"])
    put(queue, 1, 2)
    raw = RawClient(run.run.addresses[1])
    lease = raw.send(cmd.LeaseRows(task="train", count=1, parts=True))
    scored = raw.send(cmd.LeaseRows(task="score", count=1))
    before = queue.audit(), queue.status().rows
    ask = {"task": "train", "count": 1, "parts": True, "token": lease.token}
    wrong: list[tuple[dict[str, Any], type[AsyncFlowError], str]] = [
        ({"token": 10**9}, LeaseLost, "is not held by raw"),
        ({"token": -1}, LeaseLost, "is not held by raw"),
        ({"token": scored.token}, SchemaError, "is not of a step of task 'train' in parts"),
        ({"parts": False}, SchemaError, "is named in a request for another lease"),
        ({"task": "score"}, SchemaError, "task 'score' has no steps to lease in parts"),
        ({"task": "other"}, SchemaError, "task 'other' has no steps to lease in parts"),
        ({"at_least": ROWS + 1}, SchemaError, "at_least is a number of rows up to 8"),
        ({"count": 0}, SchemaError, "count of 1 or more"),
        ({"world_size": 2, "group": "dp"}, SchemaError, "is of group '' with 1 ranks and 1 shards, and not of 'dp'"),
        ({"rank": 1}, SchemaError, "ranks are 0 to world_size - 1"),
        ({"token": "1"}, ProtocolError, "cannot read"),
        ({"parts": 3}, ProtocolError, "cannot read"),
    ]
    for changes, error, text in wrong:
        with pytest.raises(error, match=text):
            raw.send(cmd.LeaseRows(**{**ask, **changes}))
        assert (queue.audit(), queue.status().rows) == before, changes
    for command in (
        cmd.Complete(token=lease.token, columns={}),
        cmd.Complete(token=lease.token, columns={}, index=b"\0\0\0\0"),
        cmd.Complete(token=lease.token, columns={}, filtered=b"\xff\xff\xff\x7f"),
    ):
        with pytest.raises(SchemaError):
            raw.send(command)
    put(queue, 3, 4)
    last = raw.send(cmd.LeaseRows(**ask))
    assert last.last
    with pytest.raises(SchemaError, match="step 0 is delivered whole"):
        raw.send(cmd.LeaseRows(**ask))
    with pytest.raises(SchemaError, match="1 of 8 rows of step 0 are acknowledged"):
        raw.send(cmd.Complete(token=lease.token, columns={}, index=b"\0\0\0\0"))
    raw.send(cmd.Complete(token=lease.token, columns={}))
    with pytest.raises(LeaseLost):
        raw.send(cmd.LeaseRows(**ask))
    raw.close()


def test_a_mask_of_another_length_is_refused_before_it_is_sent(run: Served, begun: Begun) -> None:
    queue = declared(run.queue())
    put(queue, 1, 2, 3, 4)
    step = begun(queue.steps("train"))
    for mask in (np.zeros(7, bool), np.zeros(8, int)):
        with pytest.raises(SchemaError, match=r"filtered must be bool of shape \(8,\)"):
            step.ack(filtered=mask)
    assert step.held


# ---- a loop of one's own


def test_a_consumer_of_a_run_gets_steps_in_parts() -> None:
    with running() as run:
        put(run.run.queue, 1, 2, 3, 4)
        run.run.queue.end()
        consumer = run.run.consumer("train", batch_size=ROWS, part_rows=4, needs=("x",))
        assert consumer.current is None
        for step in consumer:
            assert consumer.current is step
            assert sum(part.rows for part in step.parts()) == step.rows == ROWS
            step.ack()
        assert run.run.audit().consumed == ROWS


def test_a_failed_worker_ends_the_wait_for_a_part(begun: Begun) -> None:
    with running() as run:
        put(run.run.queue, 1, 2)
        step = begun(run.run.consumer("train", batch_size=ROWS, part_rows=1, needs=("x",)))
        parts = step.parts()
        next(parts)
        run.run.failure = af.EngineError("it is broken")
        with pytest.raises(af.EngineError, match="it is broken"):
            next(parts)


def test_a_checkpoint_waits_for_the_acknowledgement_of_a_step_in_parts(tmp_path: Path, begun: Begun) -> None:
    with af.serve(tmp_path / "run", checkpoints=True) as run:
        put(run.queue, 1, 2, 3, 4)
        consumer = run.consumer("train", batch_size=ROWS, part_rows=8, needs=("x",))
        step = begun(consumer)
        rows = [part.ids.tolist() for part in step.parts()]
        with pytest.raises(af.ConfigError, match="step 0 is not acknowledged"):
            run.checkpoint(lambda path: None)
        step.ack()

        # when it is to be trained again, the parts are the same
        run.resume()
        step = begun(run.consumer("train", batch_size=ROWS, part_rows=1, needs=("x",)))
        assert [part.ids.tolist() for part in step.parts()] == rows
        step.ack()
        run.checkpoint(lambda path: None, keep=1)
        assert run.audit().consumed == ROWS
