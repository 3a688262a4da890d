"""Cancelling, dead letters, room by bytes, and how long keys are remembered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ledger_queue import LAST, PLAIN, TEXT, TOKENS, Queue, ids, running

from asyncflow_sdk.errors import DeadlineExceeded, LeaseLost, SchemaError
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.ledger import pack_ids
from asyncflow_sdk.types.events import RowsEnded
from asyncflow_sdk.types.tasks import TaskSpec

pytestmark = pytest.mark.fast


def put(queue: Queue, groups: int, size: int = 1, nbytes: int = 0, **more: Any) -> Any:
    command = cmd.AddRows(groups=groups, group_size=size, columns={"prompt": TEXT}, nbytes=nbytes, **more)
    return queue.do(queue.admin, command)


def cancel(queue: Queue, *rows: int, **which: Any) -> int:

    packed = pack_ids(np.array(rows)) if rows else b""
    return int(queue.do(queue.admin, cmd.Cancel(ids=packed, **which)).count)


# ---- cancel


def test_cancelled_rows_end_with_their_groups_and_leave_the_queue() -> None:
    queue = Queue(PLAIN, LAST)
    put(queue, 3, 2)

    assert cancel(queue, 2) == 2

    assert ids(queue.lease(queue.admin, "plain")) == [0, 1, 4, 5]
    assert queue.audit().cancelled == 2
    assert queue.audit().reasons == {"cancelled: cancelled by request": 2}


def test_reasons_that_are_all_different_take_up_no_more_than_so_many() -> None:
    queue = Queue(PLAIN, LAST)
    put(queue, 210)

    for row in range(210):
        cancel(queue, row, reason=f"row {row} raised\nTraceback " + "x" * 10_000)

    reasons = queue.audit().reasons
    assert (reasons["cancelled: row 0 raised"], reasons["cancelled: other reasons"]) == (1, 10)
    assert (len(reasons), sum(reasons.values())) == (201, 210)
    told = {event.reason for event in queue.events if isinstance(event, RowsEnded)}
    assert {f"cancelled: {reason}" for reason in told} == set(reasons)
    put(queue, 1)
    queue.complete(queue.admin, queue.lease(queue.admin, "plain"))
    queue.complete(queue.admin, queue.lease(queue.admin, "last"))
    assert queue.audit().reasons == reasons  # what is consumed needs none


def test_a_holder_of_cancelled_rows_learns_which_it_lost() -> None:
    queue = Queue(PLAIN, LAST)
    put(queue, 2, 2)
    lease = queue.lease(queue.admin, "plain")

    cancel(queue, 0)

    done = queue.complete(queue.admin, lease)
    assert cmd.unpack_ids(done.revoked).tolist() == [0, 1]
    cancel(queue, 2)
    with pytest.raises(LeaseLost):
        queue.complete(queue.admin, lease)


def test_rows_are_cancelled_by_the_key_of_their_put_and_by_partition() -> None:
    queue = Queue(PLAIN)
    put(queue, 2, key="first")
    put(queue, 3, partition="other")
    put(queue, 4)

    assert cancel(queue, key="first") == 2
    assert cancel(queue, partition="other") == 3
    assert cancel(queue, key="first") == 0
    assert queue.audit().live == 4


def test_a_full_step_keeps_its_rows() -> None:
    queue, replica, judge, trainer = running()
    queue.put(2, 2)
    rollout = queue.lease(replica, "rollout")
    queue.complete(replica, rollout, response=TOKENS)
    reward = queue.lease(judge, "reward")
    queue.complete(judge, reward, reward=TOKENS)
    step = queue.lease(trainer, "train")

    assert cancel(queue, *ids(step)) == 0
    queue.complete(trainer, step)
    assert queue.audit().consumed == 4


def test_what_was_never_put_cannot_be_cancelled() -> None:
    queue = Queue(PLAIN)
    put(queue, 2)
    with pytest.raises(SchemaError, match="row 7 was never put; the newest is 1"):
        cancel(queue, 1, 7)
    with pytest.raises(SchemaError, match="no put with key 'x' is remembered"):
        cancel(queue, key="x")
    with pytest.raises(SchemaError, match="one of: ids, key, partition"):
        cancel(queue)
    assert queue.audit().live == 2


# ---- dead letters


def test_a_group_that_failed_for_good_is_kept_with_the_reason_of_each_attempt() -> None:
    queue = Queue(PLAIN, LAST)
    put(queue, 2, key="other")
    put(queue, 2, 2, key="mine")
    put(queue, 1, 2)
    for why in ("it broke", "it broke again", "and again"):
        lease = queue.lease(queue.admin, "plain", 8)
        back = [at for at, row in enumerate(ids(lease)) if row in (4, 5)]
        other = [at for at, row in enumerate(ids(lease)) if row not in (4, 5)]

        queue.do(queue.admin, cmd.GiveBack(token=lease.token, index=np.array(other, "<i4").tobytes()))
        command = cmd.GiveBack(token=lease.token, index=np.array(back, "<i4").tobytes(), reason=why, blame=True)
        queue.do(queue.admin, command)

    failed = queue.do(queue.admin, cmd.GetFailed())

    (group,) = failed.groups
    assert (group.first, group.rows, group.task, group.key, group.place) == (4, 2, "plain", "mine", 1)
    assert group.reasons == ("plain: it broke", "plain: it broke again", "plain: and again")
    assert queue.audit().failed == 2


def test_only_the_newest_failures_are_kept() -> None:
    queue = Queue(TaskSpec(name="plain", needs=("prompt",), max_attempts=1))
    put(queue, 1005)

    for _ in range(1005):
        lease = queue.lease(queue.admin, "plain", 1)
        queue.do(queue.admin, cmd.GiveBack(token=lease.token, blame=True, reason="no"))

    failed = queue.do(queue.admin, cmd.GetFailed(count=3))
    assert [group.first for group in failed.groups] == [1002, 1003, 1004]


# ---- room by bytes


def test_bytes_reserved_block_new_rows_and_never_what_is_in_progress() -> None:
    queue = Queue(PLAIN, LAST, capacity_bytes=1000, row_bytes=400)
    put(queue, 2, nbytes=20)

    with pytest.raises(DeadlineExceeded, match="1 more rows may take 400 bytes, and the queue has 800 of 1000"):
        put(queue, 1)
    lease = queue.lease(queue.admin, "plain")
    big = cmd.Complete(token=lease.token, columns={"answer": TOKENS}, nbytes=5000)
    queue.do(queue.admin, big)

    assert queue.status().charged_bytes > 5000
    queue.complete(queue.admin, queue.lease(queue.admin, "last"))
    assert queue.status().charged_bytes == 0
    put(queue, 2)


def test_without_a_size_the_largest_row_so_far_is_what_a_row_may_take() -> None:
    queue = Queue(PLAIN, LAST, capacity_bytes=1000)
    put(queue, 1, nbytes=100)
    lease = queue.lease(queue.admin, "plain")
    queue.do(queue.admin, cmd.Complete(token=lease.token, columns={"answer": TOKENS}, nbytes=300))
    queue.complete(queue.admin, queue.lease(queue.admin, "last"))

    put(queue, 2, nbytes=10)
    with pytest.raises(DeadlineExceeded, match="may take 400 bytes"):
        put(queue, 1, nbytes=10)


def test_a_put_that_waits_for_bytes_goes_when_they_are_free() -> None:
    queue = Queue(TaskSpec(name="end", needs=("prompt",)), capacity_bytes=100)
    put(queue, 1, nbytes=80)
    waiting = queue.ask(
        queue.admin, cmd.AddRows(groups=1, group_size=1, columns={"prompt": TEXT}, nbytes=60, timeout_s=9)
    )
    assert waiting not in queue.answers

    queue.complete(queue.admin, queue.lease(queue.admin, "end"))

    assert queue.answers[waiting].first == 1


def test_a_step_that_lacks_rows_gets_them_whatever_they_take() -> None:
    queue, replica, _, _ = running(capacity_bytes=100)
    put(queue, 1, 2, nbytes=90)
    put(queue, 1, 2, nbytes=90)  # without them step 0 never fills, and nothing would ever be freed
    assert len(ids(queue.lease(replica, "rollout"))) == 4
    with pytest.raises(DeadlineExceeded, match="bytes"):
        put(queue, 1, 2, nbytes=90)


def test_a_put_larger_than_the_queue_is_refused() -> None:
    queue = Queue(PLAIN, capacity_bytes=100)
    with pytest.raises(SchemaError, match="capacity_bytes=100"):
        put(queue, 1, nbytes=101)
    put(queue, 1, nbytes=100)


# ---- keys


def test_keys_are_forgotten_only_when_their_rows_have_ended() -> None:
    queue = Queue(TaskSpec(name="end", needs=("prompt",)), options={"kept_keys": 3})
    for at in range(6):
        put(queue, 1, key=f"k{at}")
    assert put(queue, 1, key="k0").again  # its row lives

    queue.complete(queue.admin, queue.lease(queue.admin, "end"))
    put(queue, 1, key="k6")

    assert all(put(queue, 1, key=f"k{at}").again for at in (4, 5, 6))
    assert not put(queue, 1, key="k0").again
