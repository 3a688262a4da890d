"""Who publishes, what is announced, and what becomes of it: given a ledger, when its publisher says something, then ..."""

from __future__ import annotations

from typing import Any

import pytest
from ledger_queue import PLAIN, Queue, part

from asyncflow_sdk.errors import AsyncFlowError, ConfigError, DeadlineExceeded, VersionGone
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types import events as ev

pytestmark = pytest.mark.fast


def publisher(ranks: int = 1, **limits: Any) -> tuple[Queue, list[int]]:
    """A queue, and the sessions of its publisher's ranks."""
    queue = Queue(PLAIN, **limits)
    sessions = [queue.join(f"trainer-{rank}") for rank in range(ranks)]
    for rank, session in enumerate(sessions):
        queue.do(session, cmd.OpenPublisher(rank=rank, world_size=ranks))
    return queue, sessions


def publish(queue: Queue, sessions: list[int], version: int, *, outlives: bool = True) -> tuple[int, ...]:
    """By all ranks; returns what the last of them is to keep."""
    for session in sessions:
        queue.do(session, cmd.Announce(version=version))
    for rank, session in enumerate(sessions):
        share = part(version, rank, outlives=outlives, nbytes=10)
        reply = queue.do(session, cmd.Publish(version=version, part=share, probe=b"probe" if not rank else b""))
    assert isinstance(reply, cmd.PublishReply)
    return reply.keep


def newest(queue: Queue, after: int = -1) -> Any:
    return queue.do(queue.join("gen"), cmd.AwaitVersion(after=after))


# ---- the role


def test_a_second_publisher_is_refused_with_the_name_of_the_first() -> None:
    queue, [trainer] = publisher()
    with pytest.raises(ConfigError, match=rf"is trainer-0 \(session {trainer}\).*close it, or end its process"):
        queue.do(queue.join("other"), cmd.OpenPublisher())


def test_a_rank_of_another_world_size_is_refused() -> None:
    queue, _ = publisher()
    with pytest.raises(
        ConfigError, match=r"trainer-0 \(session 2\) is rank 0 of 1; open all ranks with one world_size"
    ):
        queue.do(queue.join("other"), cmd.OpenPublisher(rank=1, world_size=2))


def test_a_session_is_one_rank() -> None:
    queue, [trainer] = publisher()
    with pytest.raises(
        ConfigError, match="trainer-0 is rank 0 of this run's publisher already; close that one first"
    ):
        queue.do(trainer, cmd.OpenPublisher())


@pytest.mark.parametrize(("rank", "size"), [(-1, 1), (1, 1), (0, 0), (0, -3)])
def test_ranks_are_from_nought_to_the_world_size(rank: int, size: int) -> None:
    queue, _ = publisher(0)
    with pytest.raises(ConfigError, match="ranks are 0 to world_size - 1"):
        queue.do(queue.admin, cmd.OpenPublisher(rank=rank, world_size=size))


@pytest.mark.parametrize("how", ["dies", "leaves", "closes"])
def test_the_role_ends_with_its_session_or_when_it_is_given_up(how: str) -> None:
    queue, [trainer] = publisher()
    publish(queue, [trainer], 3)
    if how == "dies":
        queue.die(trainer)
    else:
        queue.do(trainer, cmd.CloseSession() if how == "leaves" else cmd.ClosePublisher())
    other = queue.join("other")
    assert queue.do(other, cmd.OpenPublisher()) == cmd.Publisher(version=3, kept=((3, part(3, nbytes=10)),))
    assert queue.status().publisher == "other"


@pytest.mark.parametrize(
    "command", [cmd.Announce(version=0), cmd.Publish(version=0, part=part(0)), cmd.Withdraw(version=0)]
)
def test_only_the_publisher_publishes(command: Any) -> None:
    queue, _ = publisher()
    with pytest.raises(ConfigError, match="gen is not this run's publisher"):
        queue.do(queue.join("gen"), command)


# ---- one version after another


def test_a_version_is_announced_and_published_and_current() -> None:
    queue, [trainer] = publisher()
    assert publish(queue, [trainer], 0) == (0,)
    assert newest(queue) == cmd.Version(version=0, parts=(part(0, nbytes=10),), source=0, probe=b"probe")
    (said,) = [event for event in queue.events if isinstance(event, ev.Published)]
    assert (said.version, said.worker, said.nbytes, said.root, said.source) == (0, "trainer-0", 10, "r0.0", -1)


def test_what_was_not_announced_cannot_be_published() -> None:
    queue, [trainer] = publisher()
    with pytest.raises(ConfigError, match="version 0 is not announced"):
        queue.do(trainer, cmd.Publish(version=0, part=part(0)))
    queue.do(trainer, cmd.Announce(version=1))
    with pytest.raises(ConfigError, match="version 0 is not announced"):
        queue.do(trainer, cmd.Publish(version=0, part=part(0)))


@pytest.mark.parametrize("number", [-1, 0, 4, 5, 1 << 62])
def test_numbers_rise_for_ever(number: int) -> None:
    queue, [trainer] = publisher()
    publish(queue, [trainer], 5)
    with pytest.raises(ConfigError, match="a number is never used again|past the largest number"):
        queue.do(trainer, cmd.Announce(version=number))


def test_a_number_that_was_withdrawn_may_be_announced_again() -> None:
    queue, [trainer] = publisher()
    queue.do(trainer, cmd.Announce(version=5))
    queue.do(trainer, cmd.Withdraw(version=5, reason="the disk is full"))
    with pytest.raises(
        VersionGone, match="version 5 was withdrawn by trainer-0: the disk is full; announce it again"
    ):
        queue.do(trainer, cmd.Publish(version=5, part=part(5)))
    assert publish(queue, [trainer], 5) == (5,)


@pytest.mark.parametrize("number", [4, 5, 6])
def test_what_a_rank_announces_takes_the_place_of_what_it_announced_and_did_not_publish(number: int) -> None:
    queue, [trainer] = publisher()
    queue.do(trainer, cmd.Announce(version=5))
    assert publish(queue, [trainer], number) == (number,)
    if number != 5:
        (note,) = [event for event in queue.events if isinstance(event, ev.Note)]
        assert note.text == f"version 5 was withdrawn: rank 0 (trainer-0) announced {number} in its place"


def test_the_newest_are_kept_and_the_publisher_is_told_which() -> None:
    queue, [trainer] = publisher(keep_versions=3)
    assert [publish(queue, [trainer], version) for version in (0, 1, 4, 5)] == [(0,), (0, 1), (0, 1, 4), (1, 4, 5)]
    assert queue.do(trainer, cmd.Announce(version=6)) == cmd.PublishReply(keep=(1, 4, 5))
    assert [v.version for v in queue.status().versions] == [1, 4, 5]


def test_two_versions_are_kept_unless_it_is_said_otherwise() -> None:
    queue, [trainer] = publisher()
    assert [publish(queue, [trainer], version) for version in range(3)][-1] == (1, 2)
    queue.do(queue.admin, cmd.Configure(keep_versions=1))
    assert publish(queue, [trainer], 3) == (3,)
    with pytest.raises(ConfigError, match="keep_versions cannot be 0; it is 1 or more"):
        queue.do(queue.admin, cmd.Configure(keep_versions=0))


# ---- several ranks


def test_a_version_is_current_when_every_rank_has_published_its_part() -> None:
    queue, ranks = publisher(2)
    waiting = queue.ask(queue.join("gen"), cmd.AwaitVersion(after=-1, timeout_s=60))
    queue.do(ranks[1], cmd.Announce(version=0))
    assert queue.do(ranks[1], cmd.Publish(version=0, part=part(0, 1))) == cmd.PublishReply(keep=(0,))
    assert waiting not in queue.answers
    queue.do(ranks[0], cmd.Announce(version=0))
    queue.do(ranks[0], cmd.Publish(version=0, part=part(0, 0), probe=b"p"))
    assert queue.answers[waiting] == cmd.Version(version=0, parts=(part(0, 0), part(0, 1)), source=0, probe=b"p")


def test_all_ranks_publish_under_one_number() -> None:
    queue, ranks = publisher(2)
    queue.do(ranks[0], cmd.Announce(version=4))
    with pytest.raises(ConfigError, match=r"rank 1 cannot announce version 3: rank 0 \(trainer-0\) announced 4"):
        queue.do(ranks[1], cmd.Announce(version=3))


def test_a_rank_publishes_a_version_once() -> None:
    queue, ranks = publisher(2)
    queue.do(ranks[0], cmd.Announce(version=0))
    queue.do(ranks[0], cmd.Publish(version=0, part=part(0)))
    for again in (cmd.Announce(version=0), cmd.Publish(version=0, part=part(0))):
        with pytest.raises(ConfigError, match="rank 0 has published its part of version 0 already"):
            queue.do(ranks[0], again)


def test_a_rank_that_is_ahead_waits_for_the_others() -> None:
    queue, ranks = publisher(2)
    for session in ranks:
        queue.do(session, cmd.Announce(version=0))
    queue.do(ranks[0], cmd.Publish(version=0, part=part(0)))
    queue.at(2.0)
    with pytest.raises(
        DeadlineExceeded, match=r"version 0 was announced 2.0 s ago by trainer-0 and lacks rank 1 \(trainer-1\)"
    ):
        queue.do(ranks[0], cmd.Announce(version=1))
    waiting = queue.ask(ranks[0], cmd.Announce(version=1, timeout_s=60))
    assert waiting not in queue.answers
    queue.do(ranks[1], cmd.Publish(version=0, part=part(0, 1)))
    assert queue.answers[waiting] == cmd.PublishReply(keep=(0,))
    assert queue.status().announced == 1


def test_a_rank_that_nobody_is_is_named() -> None:
    queue, [first] = publisher(0)[0], [0]
    first = queue.join("trainer-0")
    queue.do(first, cmd.OpenPublisher(rank=0, world_size=2))
    queue.do(first, cmd.Announce(version=0))
    queue.do(first, cmd.Publish(version=0, part=part(0)))
    with pytest.raises(DeadlineExceeded, match=r"lacks rank 1 \(no session\)"):
        queue.do(first, cmd.Announce(version=1))


@pytest.mark.parametrize("published", [True, False])
def test_a_version_with_a_dead_rank_never_becomes_current(published: bool) -> None:
    queue, ranks = publisher(2)
    for session in ranks:
        queue.do(session, cmd.Announce(version=5))
    if published:
        queue.do(ranks[1], cmd.Publish(version=5, part=part(5, 1)))
    queue.die(ranks[1])
    text = r"version 5 was announced by trainer-0, and rank 1 \(trainer-1\) died: killed"
    with pytest.raises(VersionGone, match=f"{text}; announce it again"):
        queue.do(ranks[0], cmd.Publish(version=5, part=part(5, 0)))
    with pytest.raises(DeadlineExceeded, match=text):
        newest(queue)
    again = queue.join("trainer-1b")
    queue.do(again, cmd.OpenPublisher(rank=1, world_size=2))
    assert publish(queue, [ranks[0], again], 5) == (5,)


def test_a_version_that_one_rank_withdraws_is_withdrawn_for_all() -> None:
    queue, ranks = publisher(2)
    for session in ranks:
        queue.do(session, cmd.Announce(version=5))
    queue.do(ranks[0], cmd.Publish(version=5, part=part(5, 0)))
    queue.do(ranks[1], cmd.Withdraw(version=5, reason="out of memory"))
    assert queue.do(ranks[0], cmd.Withdraw(version=5)) == cmd.Done()  # it need not be the first to say so
    assert queue.status().announced == -1
    again = queue.do(ranks[0], cmd.Announce(version=5))
    assert again == cmd.PublishReply(keep=(), lost="version 5 was withdrawn by trainer-1: out of memory")  # it may go
    assert queue.do(ranks[0], cmd.Announce(version=5)) == cmd.PublishReply(keep=()), "it is told once"


def test_ranks_go_on_with_the_next_number_when_one_failed_before_the_others_began() -> None:
    queue, ranks = publisher(2)
    queue.do(ranks[0], cmd.Announce(version=1))
    queue.do(ranks[0], cmd.Withdraw(version=1, reason="all-gather failed"))
    queue.do(ranks[1], cmd.Announce(version=1))  # it knows of nothing
    queue.do(ranks[1], cmd.Publish(version=1, part=part(1, 1)))
    waiting = queue.ask(ranks[1], cmd.Announce(version=2, timeout_s=60))
    assert waiting not in queue.answers
    assert queue.do(ranks[0], cmd.Announce(version=2)) == cmd.PublishReply(keep=())
    told = queue.answers[waiting]
    assert told.keep == ()
    assert told.lost.startswith("version 1 was withdrawn: rank 0 (trainer-0) announced 2 in its place")
    for rank, session in enumerate(ranks):
        queue.do(session, cmd.Publish(version=2, part=part(2, rank)))
    assert newest(queue).version == 2


def test_a_rank_that_is_overtaken_while_it_writes_hears_by_whom() -> None:
    queue, ranks = publisher(2)
    queue.do(ranks[1], cmd.Announce(version=1))
    queue.do(ranks[0], cmd.Announce(version=2))
    with pytest.raises(VersionGone, match=r"version 1 was withdrawn: rank 0 \(trainer-0\) announced 2 in its place"):
        queue.do(ranks[1], cmd.Publish(version=1, part=part(1, 1)))
    assert publish(queue, ranks, 2) == (2,)


# ---- publishers that die


def test_a_version_announced_by_a_publisher_that_died_is_forgotten_with_a_reason() -> None:
    queue, [trainer] = publisher()
    publish(queue, [trainer], 4)
    queue.do(trainer, cmd.Announce(version=5))
    queue.at(3.0)
    with pytest.raises(DeadlineExceeded, match="version 5 was announced 3.0 s ago by trainer-0, not published"):
        newest(queue, after=4)
    queue.die(trainer)
    with pytest.raises(DeadlineExceeded, match="version 5 was announced by trainer-0, which died: killed"):
        newest(queue, after=4)
    assert any(isinstance(event, ev.Note) and "which died: killed" in event.text for event in queue.events)
    assert newest(queue).version == 4


def test_a_publisher_that_restarts_learns_what_is_kept_of_its_rank() -> None:
    queue, ranks = publisher(2, keep_versions=2)
    for version in (0, 1, 2):
        publish(queue, ranks, version)
    queue.die(ranks[1])
    again = queue.do(queue.join("again"), cmd.OpenPublisher(rank=1, world_size=2))
    assert again == cmd.Publisher(version=2, kept=((1, part(1, 1, nbytes=10)), (2, part(2, 1, nbytes=10))))


@pytest.mark.parametrize("how", ["dies", "leaves", "closes"])
def test_what_a_dead_publisher_had_alone_is_never_handed_out(how: str) -> None:
    queue, [trainer] = publisher()
    publish(queue, [trainer], 5, outlives=False)
    waiting = queue.ask(queue.join("gen"), cmd.AwaitVersion(after=5, timeout_s=60))
    if how == "dies":
        queue.die(trainer)
    else:
        queue.do(trainer, cmd.CloseSession() if how == "leaves" else cmd.ClosePublisher())
    why = {"dies": "died: killed", "leaves": "left", "closes": "closed its publisher"}[how]
    with pytest.raises(DeadlineExceeded, match=f"version 5 is current .* its bytes were with trainer-0, which {why}"):
        newest(queue)
    assert queue.status().version == 5
    assert queue.status().versions == ()
    again = queue.join("again")
    assert queue.do(again, cmd.OpenPublisher()) == cmd.Publisher(version=5)
    with pytest.raises(ConfigError, match="a number is never used again"):
        queue.do(again, cmd.Announce(version=5))
    publish(queue, [again], 6)
    assert queue.answers[waiting].version == 6
    assert newest(queue).version == 6


def test_one_part_that_is_gone_makes_a_version_unfetchable() -> None:
    queue, ranks = publisher(2)
    publish(queue, ranks, 0)
    for session in ranks:
        queue.do(session, cmd.Announce(version=1))
    queue.do(ranks[0], cmd.Publish(version=1, part=part(1, 0)))
    queue.do(ranks[1], cmd.Publish(version=1, part=part(1, 1, outlives=False)))
    queue.die(ranks[0])
    assert newest(queue).version == 1
    queue.die(ranks[1])
    with pytest.raises(AsyncFlowError, match="it can no longer be fetched"):
        newest(queue)
    assert [v.version for v in queue.status().versions] == [0]
