"""Steps leased in parts: the same parts again, and void without a delivered row, whatever ends the lease."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from ledger_queue import TOKENS, Queue, ids, packed

from asyncflow_sdk.errors import ConfigError, DeadlineExceeded, Ended, LeaseLost, SchemaError
from asyncflow_sdk.ledger import TaskSpec, pack_ids, unpack_ids
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types.tasks import SamplerSpec

pytestmark = pytest.mark.fast
TRAIN = TaskSpec(name="train", needs=("prompt",), batch_rows=6, lease_s=100)


def begun(queue: Queue, session: int, wait: float = 0.0, **more: object) -> cmd.LeasedPart:
    """The first part of a step."""
    part = queue.lease(session, "train", 1, wait, parts=True, **more)
    assert isinstance(part, cmd.LeasedPart)
    return part


def following(queue: Queue, session: int, part: cmd.LeasedPart, wait: float = 0.0, **more: object) -> cmd.LeasedPart:
    return begun(queue, session, wait, token=part.token, **more)


def team(queue: Queue, *sessions: int, token: int = 0, **more: object) -> list[cmd.LeasedPart]:
    """A part for each rank."""
    asked = {"task": "train", "count": 1, "timeout_s": 9.0, "parts": True, "group": "dp", "world_size": len(sessions)}
    tickets = [
        queue.ask(session, cmd.LeaseRows(**asked, token=token, rank=rank, **more))
        for rank, session in enumerate(sessions)
    ]
    return [queue.answers.pop(ticket) for ticket in tickets]


def test_a_part_has_the_groups_that_are_selected_and_at_least_so_many_rows() -> None:
    # given a step that lacks a group
    queue = Queue(TRAIN)
    trainer = queue.join("t")
    queue.put(1, 2)
    part = begun(queue, trainer)
    assert (ids(part), part.part, part.last) == ([0, 1], 0, False)

    # when a part of four rows is asked for
    with pytest.raises(DeadlineExceeded, match=r"task 'train' has 0 of 4 rows for the next part of step 0"):
        following(queue, trainer, part, at_least=4)
    ticket = queue.ask(
        trainer, cmd.LeaseRows(task="train", count=1, timeout_s=9, parts=True, token=part.token, at_least=4)
    )
    queue.put(1, 2)
    assert ticket not in queue.answers
    queue.put(1, 2)

    # then it comes with the last group
    last = queue.answers.pop(ticket)
    assert (ids(last), last.part, last.last) == ([2, 3, 4, 5], 1, True)
    queue.complete(trainer, last, drop=(0, 5))
    assert (queue.audit().consumed, queue.audit().filtered) == (4, 2)
    queue.check()


def test_the_oldest_step_comes_first_and_the_open_one_has_one_trainer() -> None:
    queue = Queue(TRAIN)
    one, two, three = (queue.join(name) for name in ("one", "two", "three"))
    queue.put(4, 2)
    full, opened = begun(queue, one), begun(queue, two)
    assert (full.step, full.last, ids(full)) == (0, True, [0, 1, 2, 3, 4, 5])
    assert (opened.step, opened.last, ids(opened)) == (1, False, [6, 7])
    with pytest.raises(DeadlineExceeded, match="nothing to give: two has step 1, the one being filled, in parts"):
        begun(queue, three)
    assert queue.status().in_parts == ((0, 6), (1, 2))
    queue.do(two, cmd.GiveBack(token=opened.token))
    assert begun(queue, three).step == 1


def test_a_whole_lease_and_a_lease_in_parts_take_the_same_step_one_after_the_other() -> None:
    # given a step with a known part, which closes while nobody has it
    queue = Queue(TRAIN)
    trainer = queue.join("t")
    queue.put(2, 2)
    queue.do(trainer, cmd.GiveBack(token=begun(queue, trainer).token))
    queue.put(1, 2)

    # when it is leased whole, and comes back
    whole = queue.lease(trainer, "train")
    assert ids(whole) == list(range(6))
    queue.do(trainer, cmd.GiveBack(token=whole.token))

    # then its parts are as they were
    first = begun(queue, trainer)
    last = following(queue, trainer, first)
    assert [ids(first), ids(last), first.last, last.last] == [[0, 1, 2, 3], [4, 5], False, True]


def test_a_step_acknowledged_in_part_under_a_whole_lease_is_dealt_anew() -> None:
    queue = Queue(TRAIN)
    trainer = queue.join("t")
    queue.put(1, 2)
    queue.do(trainer, cmd.GiveBack(token=begun(queue, trainer).token))
    queue.put(2, 2)
    whole = queue.lease(trainer, "train")
    queue.complete(trainer, whole, 1, 2)
    queue.do(trainer, cmd.GiveBack(token=whole.token))
    part = begun(queue, trainer)
    assert (sorted(ids(part)), part.last) == ([0, 3, 4, 5], True)
    queue.complete(trainer, part)
    assert queue.audit().consumed == 6


def test_a_removed_row_leaves_its_part_and_voids_only_a_lease_that_has_it() -> None:
    # given three known parts, of which the first was delivered again
    queue = Queue(msgspec.structs.replace(TRAIN, batch_rows=8))
    trainer = queue.join("t")
    queue.put(1, 2)
    part = begun(queue, trainer)
    for _ in range(2):
        queue.put(1, 2)
        part = following(queue, trainer, part)
    queue.do(trainer, cmd.GiveBack(token=part.token))
    part = begun(queue, trainer)

    # when a row of the second ends, its part vanishes
    queue.do(trainer, cmd.Cancel(ids=pack_ids(np.array([2]))))
    part = following(queue, trainer, part)
    assert (ids(part), part.part) == ([4, 5], 1)

    # when a row of the first ends, the lease is void, and its holder is woken
    queue.send(trainer, cmd.AwaitLost())
    lost = queue.ask(trainer, cmd.AwaitLost(timeout_s=9))
    waits = queue.ask(trainer, cmd.LeaseRows(task="train", count=1, timeout_s=9, parts=True, token=part.token))
    queue.do(trainer, cmd.Cancel(ids=pack_ids(np.array([1])), reason="it is wrong"))
    assert unpack_ids(queue.answers.pop(lost).ids).tolist() == [0, 1]
    assert "rows 0, 1 of its step ended (cancelled): it is wrong" in str(queue.answers.pop(waits))
    for command in (
        cmd.Renew(token=part.token),
        cmd.GiveBack(token=part.token),
        cmd.Complete(token=part.token, columns={}),
    ):
        with pytest.raises(LeaseLost, match="rows 0, 1 of its step ended"):
            queue.do(trainer, command)
    assert ids(begun(queue, trainer)) == [4, 5]


def test_a_group_that_a_stage_filters_or_fails_voids_the_step() -> None:
    side = TaskSpec(name="side", needs=("prompt",), gives=("score",), max_attempts=1)
    queue = Queue(side, TRAIN)
    worker, trainer = queue.join("w"), queue.join("t")
    for ends in (
        lambda lease: queue.complete(worker, lease, drop=(0,)),
        lambda lease: queue.do(
            worker, cmd.GiveBack(token=lease.token, index=bytes(4), reason="no judge", blame=True)
        ),
    ):
        queue.put(1, 2)
        lease, part = queue.lease(worker, "side"), begun(queue, trainer)
        ends(lease)
        with pytest.raises(LeaseLost, match=r"of its step ended \((filtered|failed)\)"):
            queue.do(trainer, cmd.Renew(token=part.token))
    assert queue.audit().live == 0


def test_lost_payload_of_a_row_in_no_part_yet_opens_the_step_again() -> None:
    # given a full step, of which a trainer has the first part
    queue = Queue(TRAIN)
    trainer = queue.join("t")
    queue.put(1, 2)
    part = begun(queue, trainer)
    queue.put(3, 2)
    assert queue.status().step == 1

    # when a row of the rest is lost
    queue.lose(5)

    # then nothing of the step is as it was
    with pytest.raises(LeaseLost, match="payload of step 0 is lost"):
        following(queue, trainer, part)
    part = begun(queue, trainer)
    assert (part.step, sorted(ids(part)), part.last) == (0, [0, 1, 2, 3, 6, 7], True)
    queue.complete(trainer, part)
    assert (queue.audit().consumed, queue.audit().failed, queue.audit().live) == (6, 2, 0)


def test_lost_payload_of_a_step_that_was_overtaken_fails_it() -> None:
    queue = Queue(TRAIN)
    one, two = queue.join("one"), queue.join("two")
    queue.put(1, 2)
    part = begun(queue, one)
    queue.put(5, 2)
    queue.complete(two, queue.lease(two, "train"))
    queue.lose(0)
    with pytest.raises(LeaseLost, match="payload of step 0 is lost"):
        following(queue, one, part)
    assert (queue.audit().consumed, queue.audit().failed, queue.audit().live) == (6, 6, 0)
    queue.check()


@pytest.mark.parametrize("covered", [True, False])
def test_a_step_that_is_trained_again_has_its_parts_until_a_checkpoint_covers_it(covered: bool) -> None:
    queue = Queue(TRAIN, checkpoints=True)
    trainer = queue.join("t")
    queue.put(2, 2)
    first = begun(queue, trainer)
    queue.put(1, 2)
    last = following(queue, trainer, first)
    queue.complete(trainer, last, drop=(1,))
    if covered:
        queue.do(trainer, cmd.AddCheckpoint(step=1, covers=1))
        assert (queue.audit().consumed, queue.audit().filtered) == (5, 1)
        return
    assert queue.do(trainer, cmd.Resume(step=0)).again == 6
    again = begun(queue, trainer)
    assert [ids(again), ids(following(queue, trainer, again))] == [ids(first), ids(last)]


def test_resuming_takes_an_open_step_from_its_holder_with_its_parts() -> None:
    queue = Queue(TRAIN, checkpoints=True)
    one, two = queue.join("one"), queue.join("two")
    queue.put(1, 2)
    part = begun(queue, one)
    queue.do(two, cmd.Resume(step=0))
    with pytest.raises(LeaseLost, match="two resumes with step 0"):
        following(queue, one, part)
    queue.put(2, 2)
    again = begun(queue, two)
    assert [ids(again), ids(following(queue, two, again))] == [[0, 1], [2, 3, 4, 5]]


# ---- ranks


def test_ranks_get_whole_groups_of_each_part_about_equally_heavy_and_the_same_again() -> None:
    # given parts of which the groups weigh 9, 1, 1 and 9
    balanced = SamplerSpec("token_balanced", {"column": "prompt"})
    queue = Queue(msgspec.structs.replace(TRAIN, batch_rows=10, sampler=balanced))
    sessions = [queue.join(f"rank-{rank}") for rank in range(2)]

    def put(*weights: float) -> None:
        measures = {"prompt": np.array(weights, "<f8").tobytes()}
        queue.do(
            queue.admin, cmd.AddRows(groups=len(weights), group_size=2, columns={"prompt": TOKENS}, measures=measures)
        )

    put(9, 1, 1, 9)
    parts = team(queue, *sessions)
    assert sorted(sorted(ids(part)) for part in parts) == [[0, 1, 2, 3], [4, 5, 6, 7]] or parts[0].imbalance == 0
    put(5)
    rest = team(queue, *sessions, token=parts[0].token)
    assert sorted(len(ids(part)) for part in rest) == [0, 2]
    assert [part.last for part in rest] == [True, True]

    # when a rank dies after one of them has acknowledged
    queue.complete(sessions[0], rest[0])
    queue.die(sessions[1])
    with pytest.raises(LeaseLost, match=r"rank 1 of group 'dp' \(rank-1\): killed"):
        queue.do(sessions[0], cmd.Renew(token=parts[0].token))
    sessions[1] = queue.join("rank-1")

    # then all get the same again
    again = team(queue, *sessions)
    assert [ids(part) for part in again] == [ids(part) for part in parts]
    rest_again = team(queue, *sessions, token=again[0].token)
    assert [ids(part) for part in rest_again] == [ids(part) for part in rest]
    dropped = ids(again[1])[0]
    queue.complete(sessions[1], rest_again[1], drop=(0,))
    queue.complete(sessions[0], rest_again[0])
    assert (queue.audit().consumed, queue.audit().filtered) == (9, 1)
    assert dropped in queue.ended


def test_another_number_of_ranks_gets_the_same_parts_dealt_anew() -> None:
    queue = Queue(TRAIN)
    sessions = [queue.join(f"rank-{rank}") for rank in range(3)]
    queue.put(2, 2)
    two = team(queue, *sessions[:2])
    queue.do(sessions[0], cmd.GiveBack(token=two[0].token))
    three = team(queue, *sessions)
    assert (
        sorted(i for part in three for i in ids(part)) == sorted(i for part in two for i in ids(part)) == [0, 1, 2, 3]
    )
    assert sorted(len(ids(part)) for part in three) == [0, 2, 2]
    queue.do(sessions[0], cmd.GiveBack(token=three[0].token, rank=0))
    alone = begun(queue, sessions[0])
    assert sorted(ids(alone)) == [0, 1, 2, 3]


def test_a_restarted_rank_takes_the_step_from_the_old_one() -> None:
    # given a rank that waits for a part while the other hangs
    queue = Queue(TRAIN)
    first, second = queue.join("rank-0"), queue.join("rank-1")
    queue.put(1, 2)
    parts = team(queue, first, second)
    ask = cmd.LeaseRows(
        task="train", count=1, timeout_s=9, parts=True, token=parts[0].token, group="dp", rank=0, world_size=2
    )
    waits = queue.ask(first, ask)

    # when another process is that rank
    newer = queue.join("rank-1b")
    begins = queue.ask(newer, msgspec.structs.replace(ask, token=0, rank=1))

    # then the waiting one loses the step, and both get it again
    assert "rank 1 of group 'dp' is rank-1b now" in str(queue.answers.pop(waits))
    again = queue.do(first, msgspec.structs.replace(ask, token=0))
    assert [ids(again), ids(queue.answers.pop(begins))] == [ids(part) for part in parts]


def test_ranks_must_ask_alike() -> None:
    queue = Queue(TRAIN)
    one, two = queue.join("one"), queue.join("two")
    queue.put(1, 2)
    queue.ask(one, cmd.LeaseRows(task="train", count=1, timeout_s=9, parts=True, group="dp", rank=0, world_size=2))
    with pytest.raises(ConfigError, match="all ranks of a group must ask alike"):
        queue.lease(two, "train", 1, group="dp", rank=1, world_size=2)


def test_every_rank_acknowledges_a_step_also_one_without_rows() -> None:
    queue = Queue(TRAIN)
    sessions = [queue.join(f"rank-{rank}") for rank in range(2)]
    queue.put(1, 2)
    first = team(queue, *sessions)
    with pytest.raises(SchemaError, match="step 0 is not delivered whole"):
        queue.complete(sessions[0], first[0])
    queue.put(2, 2)
    last = team(queue, *sessions, token=first[0].token)
    queue.complete(sessions[0], last[0])
    assert queue.audit().consumed == 0
    queue.complete(sessions[1], last[1])
    assert queue.audit().consumed == 6


# ---- time and the end


def test_a_lease_expires_unless_all_its_holders_wait_for_a_part() -> None:
    queue = Queue(msgspec.structs.replace(TRAIN, lease_s=10.0))
    first, second = queue.join("rank-0"), queue.join("rank-1")
    queue.put(1, 2)
    part = begun(queue, first)
    waits = queue.ask(first, cmd.LeaseRows(task="train", count=1, timeout_s=1000, parts=True, token=part.token))
    queue.at(500.0)
    queue.put(1, 2)
    assert ids(queue.answers.pop(waits)) == [2, 3]
    queue.at(511.0)
    with pytest.raises(LeaseLost, match="the lease expired after 10 s"):
        following(queue, first, part)

    # given a group, of which only one rank waits
    parts = team(queue, first, second)
    ask = cmd.LeaseRows(
        task="train", count=1, timeout_s=1000, parts=True, token=parts[0].token, group="dp", rank=0, world_size=2
    )
    waits = queue.ask(first, ask)
    queue.at(522.0)
    assert "the lease expired after 10 s" in str(queue.answers.pop(waits))


def test_a_dismissed_trainer_gets_the_rest_of_its_step_and_no_other() -> None:
    queue = Queue(TRAIN)
    trainer = queue.join("t")
    queue.put(1, 2)
    part = begun(queue, trainer)
    queue.do(queue.admin, cmd.Dismiss(name="t"))
    queue.put(3, 2)
    queue.complete(trainer, following(queue, trainer, part))
    with pytest.raises(Ended, match="was dismissed"):
        begun(queue, trainer)
    assert queue.audit().consumed == 6


def test_a_step_that_cannot_fill_any_more_is_void_before_the_stream_ends() -> None:
    queue = Queue(TRAIN)
    trainer = queue.join("t")
    queue.put(1, 2)
    part = begun(queue, trainer)
    waits = queue.ask(trainer, cmd.LeaseRows(task="train", count=1, timeout_s=9, parts=True, token=part.token))
    queue.do(queue.admin, cmd.End())
    assert "ended (cancelled): too few to fill a step" in str(queue.answers.pop(waits))
    with pytest.raises(Ended):
        begun(queue, trainer)
    with pytest.raises(LeaseLost):
        queue.do(trainer, cmd.Complete(token=part.token, columns={}, filtered=packed(0)))
