"""Rank barrier: ranks wait for each other, and each gets the payloads of all."""

from __future__ import annotations

from typing import Any

import pytest
from ledger_queue import Queue

from asyncflow_sdk.errors import DeadlineExceeded, LeaseLost, SchemaError
from asyncflow_sdk.ledger import commands as cmd

pytestmark = pytest.mark.fast


class Ranks:
    """So many ranks, each a session."""

    def __init__(self, size: int = 2) -> None:
        self.queue, self.size = Queue(), size
        self.sessions = [self.queue.join(f"rank-{rank}") for rank in range(size)]

    def come(self, rank: int, what: str, **more: Any) -> int:
        asked: dict[str, Any] = {"group": "t", "world_size": self.size, "payload": b"%d" % rank, "timeout_s": 60.0}
        session = more.pop("session", self.sessions[rank] if rank < self.size else 1)
        return self.queue.ask(session, cmd.AllGather(what=what, rank=rank, **(asked | more)))

    def answered(self, *tickets: int) -> list[Any]:
        return [self.queue.answers.get(ticket) for ticket in tickets]


def test_all_are_answered_with_the_words_of_all_when_the_last_has_come() -> None:
    ranks = Ranks(3)
    early = [ranks.come(2, "a"), ranks.come(0, "a")]
    assert ranks.answered(*early) == [None, None]

    last = ranks.come(1, "a")

    assert ranks.answered(*early, last) == [cmd.AllGathered(payloads=(b"0", b"1", b"2"))] * 3
    assert not ranks.queue.status().parked


def test_who_has_come_to_another_point_or_is_of_another_team_is_not_there() -> None:
    ranks = Ranks()
    tickets = [
        ranks.come(0, "a"),
        ranks.come(1, "b"),
        ranks.come(1, "a", group="other"),
        ranks.come(1, "a", world_size=3),
    ]

    assert ranks.answered(*tickets) == [None] * 4


def test_a_rank_that_dies_has_not_come_and_another_process_may_take_its_place() -> None:
    ranks = Ranks()
    ranks.come(0, "a", payload=b"dead")
    ranks.queue.die(ranks.sessions[0])
    one = ranks.come(1, "a")
    assert ranks.answered(one) == [None]

    other = ranks.come(0, "a", session=ranks.queue.join("rank-0"))

    assert ranks.answered(one, other) == [cmd.AllGathered(payloads=(b"0", b"1"))] * 2


def test_a_rank_is_who_joined_last_in_its_name() -> None:
    ranks = Ranks()
    hung = ranks.come(0, "a")
    new = ranks.queue.join("rank-0")
    ranks.come(0, "a", session=new)

    (answer,) = ranks.answered(hung)
    assert isinstance(answer, LeaseLost)
    (late,) = ranks.answered(ranks.come(0, "a"))
    assert isinstance(late, LeaseLost)


def test_the_deadline_says_who_has_not_come_and_where_that_rank_is() -> None:
    ranks = Ranks(3)
    ticket = ranks.come(0, "a step")
    ranks.come(2, "a checkpoint")

    ranks.queue.at(60.0)

    (error,) = ranks.answered(ticket)
    assert isinstance(error, DeadlineExceeded)
    assert "ranks 1, 2 of 3 of group 't' have not reached 'a step'; rank 2 (rank-2) waits at 'a checkpoint'" in str(
        error
    )


def test_a_rank_that_there_is_not_is_refused() -> None:
    ranks = Ranks()

    with pytest.raises(SchemaError, match="rank 2 of 2 of group 't': ranks are 0 to world_size - 1"):
        ranks.queue.do(ranks.sessions[0], cmd.AllGather(group="t", what="a", rank=2, world_size=2))
