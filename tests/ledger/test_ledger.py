"""The ledger's guarantees about rows, one test each: leases, columns, puts, limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ledger_queue import (
    LAST,
    NUMBER,
    PLAIN,
    ROLLOUT,
    TEXT,
    TOKENS,
    TRAIN,
    Queue,
    ids,
    packed,
    produce,
    running,
)

from asyncflow_sdk.errors import (
    ConfigError,
    DeadlineExceeded,
    LeaseLost,
    SchemaError,
    WriteOnceError,
)
from asyncflow_sdk.ledger import Ledger, TaskSpec, unpack_ids
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types import ColumnSpec
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.types.blocks import Block

pytestmark = pytest.mark.fast

# ---- leases and fencing


def test_a_token_that_expired_has_no_effect() -> None:
    # given a lease that ran out, its row with another worker now
    queue = Queue(PLAIN, LAST)
    slow, quick = queue.join("slow"), queue.join("quick")
    queue.put(1)
    old = queue.lease(slow, "plain")
    queue.at(10.0)
    new = queue.lease(quick, "plain")
    # when the slow worker completes, renews or gives back after all
    for command in (
        cmd.Complete(token=old.token, columns={"answer": TEXT}),
        cmd.Complete(token=old.token, columns={}, filtered=packed(0)),
        cmd.GiveBack(token=old.token),
        cmd.Renew(token=old.token),
    ):
        with pytest.raises(LeaseLost, match=r"lease 1 is not held by slow: .*expired"):
            queue.do(slow, command)
    # then nothing changed, and the one who holds the row completes it
    assert ids(new) == ids(old)
    queue.complete(quick, new)


def test_a_token_works_once_and_for_its_session_only() -> None:
    queue = Queue(PLAIN, LAST)
    owner, thief = queue.join("owner"), queue.join("thief")
    queue.put(1)
    lease = queue.lease(owner, "plain")
    with pytest.raises(LeaseLost, match="not held by thief"):
        queue.complete(thief, lease)
    queue.complete(owner, lease)
    with pytest.raises(LeaseLost):
        queue.complete(owner, lease)


def test_renewing_keeps_a_lease() -> None:
    queue = Queue(PLAIN)
    worker = queue.join("w")
    queue.put(1)
    lease = queue.lease(worker, "plain")
    queue.at(9.0)
    queue.do(worker, cmd.Renew(token=lease.token))
    queue.at(18.9)
    queue.complete(worker, lease)


def test_rows_completed_one_by_one_stay_done_when_the_rest_expires() -> None:
    queue = Queue(PLAIN, LAST)
    worker = queue.join("w")
    queue.put(3)
    queue.complete(worker, queue.lease(worker, "plain"), 1)
    queue.at(10.0)
    assert ids(queue.lease(worker, "plain")) == [0]
    assert ids(queue.lease(queue.join("other"), "plain")) == [2]


def test_a_row_completed_twice_in_one_lease_is_done_once() -> None:
    queue = Queue(PLAIN, LAST)
    worker = queue.join("w")
    queue.put(2)
    lease = queue.lease(worker, "plain")
    assert queue.complete(worker, lease, 0).revoked == b""
    again = queue.complete(worker, lease, 0, 1)
    assert unpack_ids(again.revoked).tolist() == [0]


def test_a_dead_worker_is_named_and_its_rows_come_first() -> None:
    queue = Queue(PLAIN)
    doomed, other = queue.join("doomed"), queue.join("other")
    queue.put(3)
    queue.lease(doomed, "plain", 1)
    queue.die(doomed)
    (returned,) = (event for event in queue.events if isinstance(event, ev.LeaseReturned))
    assert (returned.worker, returned.task, returned.count, returned.reason) == ("doomed", "plain", 1, "killed")
    queue.complete(other, queue.lease(other, "plain", 1))
    assert ids(queue.lease(other, "plain")) == [1, 2]
    with pytest.raises(LeaseLost, match="closed; connect again"):
        queue.lease(doomed, "plain")


@pytest.mark.parametrize(
    "garbage",
    [packed(-1), packed(2), packed(0, 0), packed(0)[:3], packed(1 << 30), b"\x80" * 4],
    ids=["negative", "out of range", "repeated", "odd length", "huge", "lowest"],
)
def test_garbage_positions_are_refused_without_effect(garbage: bytes) -> None:
    queue = Queue(PLAIN)
    worker = queue.join("w")
    queue.put(2)
    lease = queue.lease(worker, "plain")
    for command in (
        cmd.Complete(token=lease.token, columns={"answer": TEXT}, index=garbage),
        cmd.Complete(token=lease.token, columns={"answer": TEXT}, filtered=garbage),
        cmd.GiveBack(token=lease.token, index=garbage),
    ):
        with pytest.raises(SchemaError, match="positions"):
            queue.do(worker, command)


# ---- columns


def test_a_second_write_names_the_row_and_the_column() -> None:
    queue = Queue(PLAIN)
    worker = queue.join("w")
    queue.put(2)
    queue.put(1, answer=TEXT, prompt=TEXT)
    lease = queue.lease(worker, "plain")
    with pytest.raises(WriteOnceError, match=r"column 'answer' of row 2 is already written"):
        queue.complete(worker, lease, answer=TEXT)


def test_another_type_names_the_column_and_both_types() -> None:
    queue = Queue(PLAIN)
    worker = queue.join("w")
    queue.put(2)
    lease = queue.lease(worker, "plain")
    queue.complete(worker, lease, 0, answer=NUMBER)
    for other in (TOKENS, ColumnSpec("fixed", "float64"), ColumnSpec("fixed", "float32", (3,))):
        with pytest.raises(SchemaError, match=r"column 'answer' is fixed float32\[\]; it cannot take ") as error:
            queue.complete(worker, lease, 1, answer=other)
        assert str(other) in str(error.value)
    with pytest.raises(SchemaError, match="column 'prompt' is text"):
        queue.put(1, prompt=TOKENS)


def test_a_completion_without_what_the_task_gives_is_refused() -> None:
    queue = Queue(PLAIN)
    worker = queue.join("w")
    queue.put(2)
    lease = queue.lease(worker, "plain")
    with pytest.raises(SchemaError, match="task 'plain' gives 'answer', missing in this command"):
        queue.complete(worker, lease, drop=(0,), other=TEXT)
    queue.complete(worker, lease, drop=(0, 1), other=TEXT)  # rows that are dropped need no answer


def test_there_are_64_columns_and_refused_ones_do_not_count() -> None:
    queue = Queue()
    queue.put(1, **{f"c{i}": NUMBER for i in range(60)})
    for attempt in range(3):
        with pytest.raises(SchemaError, match="at most 64 columns; 'x4' is one too many"):
            queue.put(1, **{f"x{i}": NUMBER for i in range(5)})
        with pytest.raises(SchemaError, match="cannot take"):
            queue.put(1, c0=TEXT, **{f"attempt{attempt}-{i}": NUMBER for i in range(3)})
    with pytest.raises(SchemaError, match="at most 64"):
        queue.do(queue.admin, cmd.Declare(task=TaskSpec(name="t", needs=("a", "b", "c"), gives=("d", "e"))))
    queue.put(1, **{f"y{i}": NUMBER for i in range(4)})
    with pytest.raises(SchemaError, match="at most 64"):
        queue.put(1, z=NUMBER)


# ---- putting


def test_the_same_key_puts_nothing_twice() -> None:
    queue = Queue()
    first = queue.put(2, 3, key="epoch-0")
    again = queue.put(2, 3, key="epoch-0")
    assert (first.first, first.count, first.again) == (0, 6, False)
    assert (again.first, again.count, again.again) == (0, 6, True)
    assert queue.put(1, 3, key="epoch-1").first == 6
    assert queue.audit().put == 9
    queue.do(queue.admin, cmd.End())
    assert queue.put(2, 3, key="epoch-0").again  # also where a new put would be refused


def test_a_full_queue_parks_a_put_and_wakes_it() -> None:
    # given a full queue and a put that waits
    queue = Queue(PLAIN, TaskSpec(name="end", needs=("prompt",)), capacity_rows=4)
    worker = queue.join("w")
    queue.put(4)
    ticket = queue.ask(queue.admin, cmd.AddRows(groups=2, group_size=1, columns={"prompt": TEXT}, timeout_s=9))
    lease = queue.lease(worker, "end", 4)
    # when rows are through
    queue.complete(worker, queue.lease(worker, "plain", 2))
    assert ticket not in queue.answers
    queue.complete(worker, lease)
    # then it goes in, with ids of its own
    assert queue.answers[ticket] == cmd.PutDone(first=4, count=2, again=False)


def test_a_large_put_is_not_overtaken() -> None:
    queue = Queue(TaskSpec(name="end", needs=("prompt",)), capacity_rows=4)
    worker = queue.join("w")
    queue.put(3)
    large = queue.ask(queue.admin, cmd.AddRows(groups=4, group_size=1, columns={"prompt": TEXT}, timeout_s=5))
    small = queue.ask(queue.admin, cmd.AddRows(groups=1, group_size=1, columns={"prompt": TEXT}, timeout_s=50))
    with pytest.raises(DeadlineExceeded, match="earlier puts wait for room"):
        queue.put(1)
    queue.complete(worker, queue.lease(worker, "end", 1))
    assert not {large, small} & queue.answers.keys()
    queue.at(5.0)  # the large one gives up
    assert isinstance(queue.answers[large], DeadlineExceeded)
    assert queue.answers[small].count == 1


def test_a_put_that_cannot_fit_beside_the_open_step_does_not_stop_those_that_can() -> None:
    queue, *_ = running(capacity_rows=6)
    queue.put(2)
    large = queue.ask(queue.admin, cmd.AddRows(groups=5, group_size=1, columns={"prompt": TEXT}, timeout_s=5))
    assert queue.put(2).count == 2  # the step lacked them
    with pytest.raises(DeadlineExceeded, match="earlier puts wait"):
        queue.put(1)  # now it lacks nothing
    queue.at(5.0)
    assert isinstance(queue.answers[large], DeadlineExceeded)


def test_a_small_put_goes_as_soon_as_a_new_step_lacks_rows() -> None:
    # given the rows of a whole step, and a large and a small put waiting
    queue, replica, judge, trainer = running(capacity_rows=7)
    queue.put(4)
    produce(queue, replica, judge, 4)
    queue.complete(trainer, queue.lease(trainer, "train"))
    queue.put(4)
    waiting = [
        queue.ask(queue.admin, cmd.AddRows(groups=groups, group_size=1, columns={"prompt": TEXT}, timeout_s=50))
        for groups in (7, 2)
    ]
    assert not queue.answers.keys() & set(waiting)
    # when that step is full, and the next one has nothing
    produce(queue, replica, judge, 4)
    # then what fits goes in; the large one has its turn when the queue is empty
    assert queue.answers[waiting[1]].count == 2
    assert waiting[0] not in queue.answers


def test_a_waiting_put_is_refused_as_soon_as_it_has_become_wrong() -> None:
    queue = Queue(PLAIN, capacity_rows=4)
    worker = queue.join("w")
    queue.put(4)
    groups = cmd.AddRows(groups=1, group_size=3, columns={"prompt": TEXT}, timeout_s=50)
    answer = cmd.AddRows(groups=1, group_size=1, columns={"prompt": TEXT, "answer": NUMBER}, timeout_s=50)
    asked = [queue.ask(queue.admin, command) for command in (answer, groups)]
    queue.complete(worker, queue.lease(worker, "plain", 1), answer=TEXT)
    assert "column 'answer' is text" in str(queue.answers[asked[0]])
    queue.do(queue.admin, cmd.Declare(task=TRAIN))
    assert "batch_rows=4 is not a multiple of group_size=3" in str(queue.answers[asked[1]])


def test_two_puts_with_one_key_that_wait_are_one() -> None:
    queue = Queue(TaskSpec(name="end", needs=("prompt",)), capacity_rows=4)
    worker = queue.join("w")
    queue.put(4)
    put = cmd.AddRows(groups=2, group_size=1, columns={"prompt": TEXT}, key="k", timeout_s=50)
    first, second = queue.ask(queue.admin, put), queue.ask(worker, put)
    queue.complete(worker, queue.lease(worker, "end", 2))
    assert queue.answers[first] == cmd.PutDone(first=4, count=2, again=False)
    assert queue.answers[second] == cmd.PutDone(first=4, count=2, again=True)


def test_a_put_larger_than_the_queue_is_refused_at_once() -> None:
    queue = Queue(capacity_rows=4)
    with pytest.raises(SchemaError, match=r"5 rows in one put .* \(capacity_rows=4\); put fewer at a time"):
        queue.put(5, wait=60)
    for groups, size in ((0, 1), (1, 0), (-1, -1)):
        with pytest.raises(SchemaError, match="a put needs rows"):
            queue.put(groups, size)
    with pytest.raises(SchemaError, match="at least one column"):
        queue.do(queue.admin, cmd.AddRows(groups=1, group_size=1, columns={}))


# ---- configuration


def test_a_capacity_that_no_step_fits_is_refused_whenever_it_is_said() -> None:
    queue = Queue(capacity_rows=3)
    with pytest.raises(ConfigError, match="a step of 4 rows cannot fill in a queue of capacity_rows=3"):
        queue.do(queue.admin, cmd.Declare(task=TRAIN))
    queue = Queue(TRAIN, capacity_rows=4)
    with pytest.raises(ConfigError, match="a step of 4 rows cannot fill in a queue of capacity_rows=3"):
        queue.do(queue.admin, cmd.Configure(capacity_rows=3))


@pytest.mark.parametrize(
    "limits",
    [{"capacity_rows": 0}, {"max_staleness": -1}, {"steps": 0}, {"max_staleness": 1 << 70}, {"capacity_rows": -5}],
)
def test_limits_that_cannot_be_are_refused(limits: dict[str, int]) -> None:
    queue = Queue()
    with pytest.raises(ConfigError, match="cannot be"):
        queue.do(queue.admin, cmd.Configure(**limits))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lease_s": 0.0}, "above 0"),
        ({"lease_s": float("nan")}, "above 0"),
        ({"max_attempts": 0}, "above 0"),
        ({"batch_rows": 0}, "a step of 0 rows"),
        ({"batch_rows": 4}, "already makes the steps"),
        ({"admits": True}, "one such task, and 'rollout' is it"),
        ({"admits": True, "batch_rows": 4}, "cannot admit"),
    ],
)
def test_tasks_that_cannot_work_are_refused(changes: dict[str, Any], text: str) -> None:
    queue = Queue(ROLLOUT, TRAIN) if changes != {"batch_rows": 0} else Queue(ROLLOUT)
    spec = {"name": "new", "needs": ("prompt",)} | changes
    with pytest.raises(ConfigError, match=text):
        queue.do(queue.admin, cmd.Declare(task=TaskSpec(**spec)))


def test_saying_a_task_again_does_nothing_and_saying_it_otherwise_is_an_error() -> None:
    queue = Queue(PLAIN)
    assert queue.do(queue.admin, cmd.Declare(task=PLAIN)) == cmd.Done()
    with pytest.raises(ConfigError, match="'plain' is already declared as"):
        queue.do(queue.admin, cmd.Declare(task=TaskSpec(name="plain", needs=("other",))))


def test_a_task_declared_late_gets_the_rows_that_live() -> None:
    queue = Queue(PLAIN)
    worker = queue.join("w")
    queue.put(3)
    queue.complete(worker, queue.lease(worker, "plain", 2))
    queue.do(queue.admin, cmd.Declare(task=LAST))
    assert ids(queue.lease(worker, "last")) == [0, 1]
    with pytest.raises(SchemaError, match="no task 'lost'; declared: last, plain"):
        queue.lease(worker, "lost")


@pytest.mark.parametrize("late", [ROLLOUT, TRAIN], ids=lambda spec: str(spec.name))
def test_a_task_declared_late_leaves_no_group_waiting_for_rows_that_have_ended(late: TaskSpec) -> None:
    # given two groups of two; in one of them a row has been through all tasks
    queue = Queue(TaskSpec(name="side", needs=("prompt",), partitions=("*",)))
    worker = queue.join("w")
    queue.put(2, size=2)
    queue.complete(worker, queue.lease(worker, "side", 1))
    queue.do(queue.admin, cmd.AddRows(groups=1, group_size=1, columns={"prompt": TEXT}, partition="other"))
    # when a task is declared that leases whole groups
    queue.do(queue.admin, cmd.Declare(task=late))
    # then the other row of that group is cancelled with the reason, and the second group stays
    assert queue.live.keys() == {2, 3, 4}
    reason = f"other rows of their group had ended before task {late.name!r} was declared"
    assert queue.audit().reasons == {f"cancelled: {reason}": 1}


def test_a_block_is_placed_with_its_rows_and_one_of_a_dropped_request_is_not() -> None:
    # given room for two rows, and two puts in line behind one that fills it
    ledger, columns = Ledger(), {"prompt": TEXT}
    ledger.apply(0, cmd.OpenSession(name="one"), 0.0, 1)
    ledger.apply(1, cmd.Configure(capacity_rows=2), 0.0, 2)
    blocks = [Block("s1-1", 64 * number, number + 1, 2, 64, ("prompt",)) for number in range(3)]
    for number, block in enumerate(blocks):
        ledger.apply(
            1, cmd.AddRows(groups=2, group_size=1, columns=columns, timeout_s=9.0, block=block), 0.0, 10 + number
        )
    (first,) = (effects := ledger.drain()).placed
    assert (first.block, first.ids.tolist(), first.entries.tolist(), effects.over) == (blocks[0], [0, 1], [0, 1], {})
    # when the second is dropped, then its block is nowhere
    ledger.forget(11, 1.0)
    dropped = ledger.drain()
    assert (dropped.placed, dropped.answers, list(dropped.over)) == ([], [], [11])
    assert dropped.over[11].command.block is blocks[1]
    # and when there is room, the third is placed
    ledger.apply(1, cmd.Cancel(ids=cmd.pack_ids(np.arange(2))), 2.0, 20)
    (third,) = (effects := ledger.drain()).placed
    assert (third.block, third.ids.tolist(), list(effects.over)) == (blocks[2], [2, 3], [12])
