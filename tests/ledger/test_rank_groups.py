"""Rank groups: the k-th lease of each rank is a shard of one; a step is all ranks' or nobody's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ledger_queue import LAST, PLAIN, TOKENS, Queue, ids, packed, produce, running

from asyncflow_sdk.errors import ConfigError, DeadlineExceeded, Ended, LeaseLost, SchemaError
from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.types.tasks import SamplerSpec

pytestmark = pytest.mark.fast

STEP = TaskSpec(name="train", needs=("prompt",), batch_rows=8, lease_s=50)


class Ranks:
    """The ranks of a team, each a session."""

    def __init__(self, queue: Queue, size: int, task: str = "train", shards: int = 0, count: int = 8) -> None:
        self.queue, self.size, self.task, self.shards, self.count = queue, size, task, shards, count
        self.sessions = [queue.join(f"rank-{r}") for r in range(size)]

    def command(self, rank: int, **more: Any) -> cmd.LeaseRows:
        asked: dict[str, Any] = {
            "task": self.task, "count": self.count, "timeout_s": 60.0, "group": "t", "rank": rank,
            "world_size": self.size, "shards": self.shards,
        }  # fmt: skip
        return cmd.LeaseRows(**(asked | more))

    def ask(self, rank: int, **more: Any) -> int:
        return self.queue.ask(self.sessions[rank], self.command(rank, **more))

    def complete(self, shard: cmd.Leased, *at: int, drop: tuple[int, ...] = (), **columns: Any) -> Any:
        gives = self.queue.tasks[shard.task].gives
        command = cmd.Complete(
            token=shard.token, rank=shard.rank, columns=columns or dict.fromkeys(gives, TOKENS),
            index=packed(*at) if at else None, filtered=packed(*drop) if drop else None,
        )  # fmt: skip
        return self.queue.do(self.sessions[shard.rank], command)

    def give_back(self, shard: cmd.Leased, *at: int) -> Any:
        back = cmd.GiveBack(token=shard.token, rank=shard.rank, index=packed(*at) if at else None)
        return self.queue.do(self.sessions[shard.rank], back)


def steps(rows: int = 16, size: int = 2, **more: Any) -> tuple[Queue, Ranks]:
    queue = Queue(STEP)
    queue.put(rows)
    return queue, Ranks(queue, size, **more)


# ---- one lease for all


def test_a_step_is_given_when_every_rank_has_asked_and_each_gets_its_shard() -> None:
    queue, ranks = steps(size=4)
    first = [ranks.ask(rank) for rank in (2, 0, 3)]
    assert not queue.answers.keys() & set(first)
    last = ranks.ask(1)
    shards = [queue.answers[ticket] for ticket in (first[1], last, first[0], first[2])]
    assert {(s.token, s.step, s.version, s.world_size, s.shards) for s in shards} == {(1, 0, 0, 4, 4)}
    assert [(s.rank, s.shard) for s in shards] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [ids(s) for s in shards] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert queue.status().lease_count == 1


def test_ranks_of_one_shard_get_the_very_same_rows_in_the_same_order() -> None:
    queue, ranks = steps(size=4, shards=2)
    answers = ask_all(queue, ranks)
    assert [s.shard for s in answers] == [0, 0, 1, 1]
    assert ids(answers[0]) == ids(answers[1]) == [0, 1, 2, 3]
    assert ids(answers[2]) == ids(answers[3]) == [4, 5, 6, 7]


def ask_all(queue: Queue, ranks: Ranks, **more: Any) -> list[Any]:
    """All ranks ask; what each got, in the order of the ranks."""
    tickets = [ranks.ask(rank, **more) for rank in range(ranks.size)]
    return [queue.answers.get(ticket) for ticket in tickets]


def test_a_step_is_acknowledged_when_every_rank_has() -> None:
    queue, ranks = steps()
    one, two = ask_all(queue, ranks)
    ranks.complete(one, drop=(1,))
    assert queue.audit().live == 16
    ranks.complete(one, drop=(0, 2))  # said again: without effect
    ranks.complete(two, drop=(1,))
    audit = queue.audit()
    assert (audit.consumed, audit.filtered, audit.live) == (6, 2, 8)
    assert 1 in queue.ended
    for shard in (one, two):
        with pytest.raises(LeaseLost):
            ranks.complete(shard)
    # then the next lease of each is of the next step
    assert [s.step for s in ask_all(queue, ranks)] == [1, 1]


def test_a_rank_acknowledges_its_whole_shard_and_nothing_but() -> None:
    queue, ranks = steps()
    one, two = ask_all(queue, ranks)
    with pytest.raises(SchemaError, match="rank 0 of group 't' has 4 rows of step 0 and acknowledges 2"):
        ranks.complete(one, 0, 1)
    with pytest.raises(SchemaError, match="positions must lie in 0..3"):
        ranks.complete(one, drop=(4,))
    with pytest.raises(SchemaError, match="without writing columns"):
        ranks.complete(one, extra=TOKENS)
    for thief in (
        cmd.Complete(token=1, columns={}, rank=0),
        cmd.Renew(token=1, rank=7),
        cmd.GiveBack(token=1, rank=-1),
    ):
        with pytest.raises(LeaseLost):
            queue.do(ranks.sessions[1], thief)
    ranks.complete(one, 3, 1, 2, 0, drop=(0,))
    ranks.complete(two)
    assert queue.audit().filtered == 1
    assert 3 in queue.ended


@pytest.mark.parametrize("how", ["dies", "gives back", "is too late", "is restarted"])
@pytest.mark.parametrize("acknowledged", [False, True])
def test_a_rank_that_is_lost_takes_the_step_from_all_and_it_is_leased_again_whole(
    how: str, acknowledged: bool
) -> None:
    queue, ranks = steps()
    one, two = ask_all(queue, ranks)
    if acknowledged:
        ranks.complete(one, drop=(0,))
    # when the rank that has not acknowledged is lost
    if how == "dies":
        queue.die(ranks.sessions[1])
        ranks.sessions[1] = queue.join("rank-1 again")
    elif how == "gives back":
        ranks.give_back(two)
    elif how == "is too late":
        queue.at(50.0)
    else:
        ranks.sessions[1] = queue.join("rank-1 again")
        ranks.ask(1)
    # then the other learns of it, and the next get of both is that step, whole, under a new token
    with pytest.raises(LeaseLost):
        ranks.complete(one)
    for rank in [0] if how == "is restarted" else [0, 1]:
        ranks.ask(rank)
    again = [s for s in queue.answers.values() if isinstance(s, cmd.Leased) and s.token == 2]
    assert [(s.rank, s.step) for s in sorted(again, key=lambda s: s.rank)] == [(0, 0), (1, 0)]
    assert sorted(i for s in again for i in ids(s)) == list(range(8))
    for shard in again:
        ranks.complete(shard)
    # what was filtered at the acknowledgement that had no effect is not
    assert (queue.audit().consumed, queue.audit().filtered) == (8, 0)


def test_a_rank_that_has_acknowledged_may_leave_before_the_others_have() -> None:
    queue, ranks = steps(rows=8)
    one, two = ask_all(queue, ranks)
    ranks.complete(one)
    queue.do(ranks.sessions[0], cmd.CloseSession())
    ranks.complete(two)
    assert queue.audit().consumed == 8


def test_a_rank_may_be_a_lease_ahead() -> None:
    queue, ranks = steps(rows=24)
    first, second = ask_all(queue, ranks), ask_all(queue, ranks)
    assert [s.step for s in (*first, *second)] == [0, 0, 1, 1]
    # when one is lost with both in hand, both come again in order
    queue.die(ranks.sessions[0])
    ranks.sessions[0] = queue.join("again")
    for step in (0, 1, 2):
        shards = ask_all(queue, ranks)
        assert [s.step for s in shards] == [step, step]
        for shard in shards:
            ranks.complete(shard)
    assert queue.audit().consumed == 24


def test_a_restarted_rank_voids_what_was_asked_in_its_name_before() -> None:
    queue, ranks = steps()
    old = ranks.ask(0)
    stale, ranks.sessions[0] = ranks.sessions[0], queue.join("rank-0 again")
    new = ranks.ask(0)
    assert isinstance(queue.answers[old], LeaseLost)
    with pytest.raises(LeaseLost, match="rank 0 of group 't' is rank-0 again now, which joined later than rank-0"):
        queue.do(stale, ranks.command(0))
    ranks.ask(1)
    assert ids(queue.answers[new]) == [0, 1, 2, 3]
    with pytest.raises(LeaseLost, match="is rank-0 again now"):
        queue.do(stale, ranks.command(0))


def test_any_rank_renews_for_all() -> None:
    queue, ranks = steps()
    one, two = ask_all(queue, ranks)
    queue.at(40.0)
    queue.do(ranks.sessions[1], cmd.Renew(token=two.token, rank=1))
    queue.at(80.0)
    ranks.complete(one)
    ranks.complete(two)
    assert queue.audit().consumed == 8


# ---- waiting


def test_a_deadline_says_which_ranks_have_not_asked() -> None:
    queue, ranks = steps(size=4)
    early = ranks.ask(2, timeout_s=3.0)
    ranks.ask(0)
    queue.at(3.0)
    with pytest.raises(
        DeadlineExceeded, match="task 'train' has nothing to give; ranks 1, 3 of 4 of group 't' have not"
    ):
        raise queue.answers[early]
    # the others wait on, and it can ask again
    for rank in (1, 2):
        ranks.ask(rank)
    assert isinstance(queue.answers[ranks.ask(3)], cmd.Leased)


def test_a_deadline_of_a_complete_team_says_what_is_missing() -> None:
    queue, ranks = steps(rows=5)
    ranks.ask(0)
    with pytest.raises(DeadlineExceeded, match="step 0 lacks 3 of 8 rows"):
        queue.do(ranks.sessions[1], ranks.command(1, timeout_s=0.0))


@pytest.mark.parametrize(
    ("wrong", "error", "why"),
    [
        ({"rank": 4}, SchemaError, "ranks are 0 to world_size - 1"),
        ({"rank": -1}, SchemaError, "ranks are 0 to world_size - 1"),
        ({"shards": 3}, SchemaError, "must divide world_size"),
        ({"shards": -1}, SchemaError, "must divide world_size"),
        ({"world_size": 16, "shards": 16}, SchemaError, "8 rows cannot be split into 16 shards"),
        ({"group": ""}, SchemaError, "name it"),
        (
            {"world_size": 2},
            ConfigError,
            r"asks with world_size=2, and rank 0 \(rank-0\) with 4; all ranks of a group",
        ),
        ({"shards": 2}, ConfigError, "asks with shards=2"),
        ({"count": 7}, ConfigError, "asks with count=7"),
        ({"partition": ""}, ConfigError, "asks with partition=''"),
    ],
)
def test_ranks_that_do_not_ask_alike_are_told(wrong: dict[str, Any], error: type[Exception], why: str) -> None:
    queue, ranks = steps(size=4)
    ranks.ask(0)
    with pytest.raises(error, match=why):
        queue.do(ranks.sessions[1], ranks.command(**({"rank": 1} | wrong)))


def test_some_tasks_have_no_teams() -> None:
    queue, replica, *_ = running()
    team = {"group": "t", "world_size": 2}
    with pytest.raises(SchemaError, match="to single replicas"):
        queue.do(replica, cmd.LeaseRows(task="rollout", count=4, **team))
    queue = Queue(TaskSpec(name="train", needs=("prompt",), gives=("loss",), batch_rows=4))
    with pytest.raises(SchemaError, match="without writing columns"):
        queue.do(queue.admin, cmd.LeaseRows(task="train", count=4, **team))


def test_a_team_of_one_is_like_no_team() -> None:
    queue, ranks = steps(size=1)
    (shard,) = ask_all(queue, ranks)
    assert len(ids(shard)) == 8
    ranks.complete(shard, 0, 1)
    ranks.complete(shard, 2, 3, 4, 5, 6, 7)
    assert queue.audit().consumed == 8


def test_every_rank_learns_of_the_end() -> None:
    queue, ranks = steps(rows=8)
    shards = ask_all(queue, ranks)
    early = ranks.ask(0)
    queue.do(queue.admin, cmd.End())
    for shard in shards:
        ranks.complete(shard)
    assert isinstance(queue.answers[early], Ended)
    with pytest.raises(Ended):
        queue.do(ranks.sessions[1], ranks.command(1))


# ---- rows of other tasks


def rows_of(size: int = 2, rows: int = 8, **more: Any) -> tuple[Queue, Ranks]:
    queue = Queue(PLAIN, LAST)
    queue.put(rows)
    return queue, Ranks(queue, size, task="plain", **more)


def test_rows_of_a_shard_are_completed_as_they_are_done() -> None:
    queue, ranks = rows_of()
    one, two = ask_all(queue, ranks)
    assert (ids(one), ids(two)) == ([0, 1, 2, 3], [4, 5, 6, 7])
    ranks.complete(two, 1, 3)
    last = queue.lease(queue.join("last"), "last", 10)
    assert ids(last) == [5, 7]
    ranks.give_back(one, 0)
    assert ids(queue.lease(queue.admin, "plain", 10)) == [0]
    with pytest.raises(SchemaError, match="0..3"):
        ranks.complete(two, 4)


def test_a_lost_rank_returns_what_is_left_of_all_shards() -> None:
    queue, ranks = rows_of()
    one, two = ask_all(queue, ranks)
    ranks.complete(one, 0, 1)
    queue.die(ranks.sessions[1])
    with pytest.raises(LeaseLost):
        ranks.complete(one, 2)
    for row in (2, 3, 4, 5, 6, 7):  # the death may be a row's fault
        assert ids(queue.lease(queue.join(f"alone {row}"), "plain", 10)) == [row]
    with pytest.raises(LeaseLost):
        ranks.complete(two)


def test_of_rows_that_lost_a_lease_each_rank_gets_one() -> None:
    queue, ranks = rows_of()
    ask_all(queue, ranks)
    queue.die(ranks.sessions[1])
    ranks.sessions[1] = queue.join("rank-1")
    assert [ids(shard) for shard in ask_all(queue, ranks)] == [[0], [1]]


def test_of_ranks_with_the_same_shard_the_first_completion_counts() -> None:
    queue, ranks = rows_of(size=4, shards=2)
    shards = ask_all(queue, ranks)
    assert unrevoked(ranks.complete(shards[1], 0, 1)) == ([], [])
    assert unrevoked(ranks.complete(shards[0])) == ([], [0, 1])
    assert unrevoked(ranks.complete(shards[1], 2, 3)) == ([], [2, 3])
    for rank in (2, 3):
        assert unrevoked(ranks.complete(shards[rank])) == ([], [] if rank == 2 else [4, 5, 6, 7])
    # all are through with it: the lease is over
    assert not queue.status().lease_count
    with pytest.raises(LeaseLost):
        ranks.complete(shards[0])
    assert queue.status().completed["plain"] == 8


def unrevoked(reply: cmd.Completed) -> tuple[list[int], list[int]]:
    return cmd.unpack_ids(reply.revoked).tolist(), cmd.unpack_ids(reply.again).tolist()


def test_a_rank_that_never_says_a_word_of_a_shared_shard_keeps_nothing() -> None:
    queue, ranks = rows_of(size=2, shards=1)
    one, _ = ask_all(queue, ranks)
    ranks.complete(one)
    queue.at(10.0)
    assert not queue.status().lease_count
    assert not [e for e in queue.events if isinstance(e, ev.LeaseReturned)]


def test_rows_whose_group_ended_are_revoked_in_every_shard() -> None:
    queue = Queue(PLAIN, LAST)
    queue.put(2, 4)
    ranks = Ranks(queue, 2, task="plain", shards=1)
    one, two = ask_all(queue, ranks)
    ranks.complete(one, 0, drop=(0,))
    assert unrevoked(ranks.complete(two)) == ([1, 2, 3], [0])


def test_the_last_rows_may_be_fewer_than_ranks() -> None:
    queue, ranks = rows_of(size=3, rows=2)
    tickets = [ranks.ask(rank) for rank in range(3)]
    assert not queue.answers.keys() & set(tickets)
    queue.do(queue.admin, cmd.End())
    shards = [queue.answers[t] for t in tickets]
    assert [ids(s) for s in shards] == [[0], [1], []]
    for shard in shards[:2]:
        ranks.complete(shard)
    assert not queue.status().lease_count


def test_at_least_is_of_the_whole_lease() -> None:
    queue, ranks = rows_of(rows=6)
    assert ask_all(queue, ranks, at_least=8) == [None, None]
    queue.put(2)
    got = [s for s in queue.answers.values() if isinstance(s, cmd.Leased)]
    assert [len(ids(s)) for s in got] == [4, 4]


def test_a_lease_may_be_smaller_than_its_ranks_if_they_say_so() -> None:
    queue, ranks = rows_of(size=3, rows=2)
    shards = ask_all(queue, ranks, at_least=1)
    assert [ids(s) for s in shards] == [[0], [1], []]
    for shard in shards[:2]:
        ranks.complete(shard)
    assert not queue.status().lease_count


# ---- balance


def weighted(task: TaskSpec, *weights: float, size: int = 1) -> Queue:
    queue = Queue(task)
    command = cmd.AddRows(
        groups=len(weights), group_size=size, columns={"prompt": TOKENS},
        measures={"prompt": np.array(weights, "<f8").tobytes()},
    )  # fmt: skip
    queue.do(queue.admin, command)
    return queue


def test_shards_of_a_step_are_balanced_by_the_measure_of_its_sampler() -> None:
    balanced = TaskSpec(
        name="train", needs=("prompt",), batch_rows=8, sampler=SamplerSpec("token_balanced", {"column": "prompt"})
    )
    queue = weighted(balanced, 100, 9, 8, 7, 6, 5, 4, 3)
    one, two = ask_all(queue, Ranks(queue, 2))
    assert (ids(one), ids(two)) == ([0, 5, 6, 7], [1, 2, 3, 4])
    assert one.imbalance == two.imbalance == pytest.approx(112 / 71 - 1)
    (event,) = [e for e in queue.events if isinstance(e, ev.Balanced)]
    assert (event.task, event.step, event.shards, event.rows) == ("train", 0, 2, 8)
    assert event.imbalance == one.imbalance


def test_whole_groups_stay_in_one_shard_if_asked_for() -> None:
    sampler = SamplerSpec("token_balanced", {"column": "prompt", "whole_groups": True})
    queue = weighted(TaskSpec(name="train", needs=("prompt",), batch_rows=8, sampler=sampler), 10, 1, 9, 2, size=2)
    one, two = ask_all(queue, Ranks(queue, 2))
    assert (ids(one), ids(two)) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert one.imbalance == 0


def test_without_a_measure_shards_have_equal_rows() -> None:
    queue = Queue(TaskSpec(name="plain", needs=("prompt",)))
    queue.put(10)
    shards = ask_all(queue, Ranks(queue, 4, task="plain", count=10))
    assert [len(ids(s)) for s in shards] == [3, 2, 3, 2]
    assert shards[0].imbalance == pytest.approx(0.2)


def test_a_team_trains_a_whole_run() -> None:
    queue, replica, judge, _ = running(batch=4, steps=3)
    ranks = Ranks(queue, 2)
    for step in range(3):
        queue.put(4)
        queue.load(replica, step)
        produce(queue, replica, judge, 4)
        shards = ask_all(queue, ranks)
        assert [s.version for s in shards] == [step, step]
        for shard in shards:
            ranks.complete(shard)
        if step < 2:
            queue.publish(step + 1)
    assert queue.audit().consumed == 12
    assert queue.audit().live == 0


def test_ranks_whose_shard_is_empty_owe_nothing() -> None:
    # given a step of one group, which stays whole, and two ranks
    sampler = SamplerSpec("token_balanced", {"column": "prompt", "whole_groups": True})
    queue = Queue(TaskSpec(name="train", needs=("prompt",), batch_rows=4, sampler=sampler, lease_s=50))
    queue.put(1, 4)
    ranks = Ranks(queue, 2, count=4)
    # when
    tickets = [ranks.ask(rank) for rank in range(2)]
    shards = [queue.answers[ticket] for ticket in tickets]
    (owing,) = [shard for shard in shards if ids(shard)]
    assert isinstance(ranks.complete(owing), cmd.Completed)
    # then the one that has the rows ends the step
    assert not queue.status().lease_count
    assert queue.audit().consumed == 4
