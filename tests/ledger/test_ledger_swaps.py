"""Replicas and versions: who may load what when, quorum, late joiners, and what is said of all that."""

from __future__ import annotations

from typing import Any

import pytest
from ledger_queue import ROLLOUT, TEXT, TRAIN, Queue, ids, part, running

from asyncflow_sdk.errors import ConfigError, DeadlineExceeded, VersionGone
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.types.reports import VersionStatus

pytestmark = pytest.mark.fast


def replicas(count: int, version: int = 7, **limits: Any) -> tuple[Queue, list[int]]:
    """A queue with ``version`` current, and replicas that have it staged."""
    queue = Queue(ROLLOUT, TRAIN, **limits)
    queue.publish(version)
    sessions = [queue.join(f"gen-{number}") for number in range(count)]
    for session in sessions:
        stage(queue, session, version)
    return queue, sessions


def stage(queue: Queue, session: int, version: int) -> None:
    assert queue.do(session, cmd.AwaitVersion(after=version - 1)).version == version
    queue.do(session, cmd.ReportStaged(version=version))


def swap(queue: Queue, session: int, version: int) -> int:
    """The ticket."""
    return queue.ask(session, cmd.Swap(version=version, timeout_s=60))


def why(queue: Queue, session: int, command: Any) -> str:
    with pytest.raises(DeadlineExceeded) as error:
        queue.do(session, command)
    return str(error.value)


# ---- permissions


def test_without_a_limit_all_load_at_once() -> None:
    queue, sessions = replicas(3)
    for session in sessions:
        assert queue.do(session, cmd.Swap(version=7)) == cmd.Permitted(version=7)


@pytest.mark.parametrize("end", ["loaded", "failed", "dies", "leaves"])
def test_permissions_go_to_whoever_asked_first_as_others_end(end: str) -> None:
    queue, sessions = replicas(4, max_swapping=2)
    tickets = [swap(queue, session, 7) for session in (sessions[2], sessions[0], sessions[3], sessions[1])]
    assert [ticket in queue.answers for ticket in tickets] == [True, True, False, False]
    if end == "dies":
        queue.die(sessions[0])
    else:
        ends: dict[str, Any] = {"loaded": cmd.ReportLoaded(version=7), "leaves": cmd.CloseSession()}
        queue.do(sessions[0], ends.get(end, cmd.ReportLoadFailed(version=7, reason="it would not")))
    assert [ticket in queue.answers for ticket in tickets] == [True, True, True, False]


def test_a_session_that_retires_keeps_no_permission_and_counts_for_nothing() -> None:
    queue, [first, second] = replicas(2, max_swapping=1, quorum=2)
    stage(queue, first, 7)
    stage(queue, second, 7)
    assert queue.do(first, cmd.Swap(version=7)) == cmd.Permitted(version=7)
    waiting = swap(queue, second, 7)
    assert waiting not in queue.answers
    assert queue.do(first, cmd.Retire()) == cmd.Done()
    assert isinstance(queue.answers[waiting], cmd.Permitted)
    queue.load(second, 7)
    queue.publish(8)
    stage(queue, second, 8)
    assert queue.status().committed == 7, "one replica is no quorum"
    (said,) = [each for each in queue.status().sessions if each.id == first]
    assert (said.replica, said.loaded, said.weights) == (False, None, "")


def test_what_a_session_that_retires_waits_for_is_refused_and_it_may_begin_anew() -> None:
    queue, [one] = replicas(1)
    waiting = queue.ask(one, cmd.AwaitVersion(after=7, timeout_s=60))
    queue.do(one, cmd.Retire())
    assert "retired while this request waited" in str(queue.answers[waiting])
    with pytest.raises(ConfigError, match="has not staged version 7"):
        queue.do(one, cmd.Swap(version=7))
    assert queue.do(one, cmd.AwaitVersion(after=-1)).version == 7
    stage(queue, one, 7)
    assert queue.do(one, cmd.Swap(version=7)) == cmd.Permitted(version=7)


def test_a_permission_that_nobody_heard_of_goes_to_the_next() -> None:
    queue, [one, other] = replicas(2, max_swapping=1)
    assert queue.do(one, cmd.Swap(version=7)) == cmd.Permitted(version=7)
    waiting = swap(queue, other, 7)
    queue.reply_undelivered(one, 7)
    assert queue.answers[waiting] == cmd.Permitted(version=7)
    (said,) = [each for each in queue.status().sessions if each.id == one]
    assert said.weights == "staged 7"
    assert not any(isinstance(event, ev.WeightState) and event.state == "failed" for event in queue.events)
    told = [(e.worker, e.state) for e in queue.events if isinstance(e, ev.WeightState)]
    assert told[-3:] == [("gen-0", "swapping"), ("gen-0", "released"), ("gen-1", "swapping")]


@pytest.mark.parametrize("how", ["retires", "leaves", "dies"])
def test_a_replica_that_goes_before_it_loads_says_so_before_the_next_one_may(how: str) -> None:
    queue, [one, other] = replicas(2, max_swapping=1)
    queue.do(one, cmd.Swap(version=7))
    swap(queue, other, 7)
    if how == "dies":
        for _ in range(2):  # seen by who started it and by who serves it
            queue.die(one)
    else:
        queue.do(one, cmd.Retire() if how == "retires" else cmd.CloseSession())
    told = [(e.worker, e.state) for e in queue.events if isinstance(e, ev.WeightState)]
    assert told[-3:] == [("gen-0", "swapping"), ("gen-0", "released"), ("gen-1", "swapping")]


def test_a_replica_that_has_permission_may_ask_again() -> None:
    queue, [one, other] = replicas(2, max_swapping=1)
    assert queue.do(one, cmd.Swap(version=7)) == queue.do(one, cmd.Swap(version=7)) == cmd.Permitted(version=7)
    waiting = swap(queue, other, 7)
    queue.do(one, cmd.ReportLoaded(version=7))
    assert isinstance(queue.answers[waiting], cmd.Permitted)


def test_a_request_that_waits_names_who_loads_since_when() -> None:
    queue, sessions = replicas(3, max_swapping=1)
    queue.do(sessions[0], cmd.Swap(version=7))
    queue.at(2.0)
    swap(queue, sessions[1], 7)
    queue.at(3.0)
    text = why(queue, sessions[2], cmd.Swap(version=7))
    assert (
        "version 7 may not be loaded yet; at most 1 at a time (max_swapping), now gen-0 for 3.0 s; 1 waited before it"
        in text
    )


def test_what_was_not_staged_cannot_be_loaded() -> None:
    queue, [one] = replicas(1)
    for version in (6, 8, -1, 1 << 40):
        with pytest.raises(ConfigError, match=f"gen-0 has not staged version {version}"):
            queue.do(one, cmd.Swap(version=version))
    with pytest.raises(ConfigError, match="has not staged"):
        queue.do(queue.join("new"), cmd.Swap(version=7))


def test_a_version_that_was_replaced_is_gone_also_for_those_that_wait() -> None:
    queue, [one, other] = replicas(2, max_swapping=1)
    queue.do(one, cmd.Swap(version=7))
    waiting = swap(queue, other, 7)
    queue.publish(8)
    assert isinstance(queue.answers[waiting], VersionGone)
    assert "version 7 was replaced by 8, current since 0.0 s: stage that" in str(queue.answers[waiting])
    queue.do(one, cmd.ReportLoaded(version=7))  # it was under way
    with pytest.raises(VersionGone, match="version 7 was replaced by 8"):
        queue.do(other, cmd.Swap(version=7))


def test_more_permissions_wake_those_that_wait() -> None:
    queue, sessions = replicas(2, max_swapping=1)
    swap(queue, sessions[0], 7)
    waiting = swap(queue, sessions[1], 7)
    assert waiting not in queue.answers
    queue.do(queue.admin, cmd.Configure(max_swapping=0))
    assert isinstance(queue.answers[waiting], cmd.Permitted)


def test_what_failed_has_to_be_staged_again() -> None:
    queue, [one] = replicas(1)
    queue.do(one, cmd.Swap(version=7))
    queue.do(one, cmd.ReportLoadFailed(version=7, reason="tensor 'a' is not known"))
    with pytest.raises(ConfigError, match="has not staged version 7"):
        queue.do(one, cmd.Swap(version=7))
    queue.do(one, cmd.ReportStaged(version=7))
    assert queue.do(one, cmd.Swap(version=7)) == cmd.Permitted(version=7)


@pytest.mark.parametrize("most", [0, 4])
def test_a_replica_that_gets_no_prompts_does_not_wait_for_its_turn(most: int) -> None:
    # given three replicas on version 0, which admits no more prompts, and version 1, which one of them loads
    queue, one, *_ = running(max_staleness=1, max_swapping=1)
    other, busy = queue.join("gen-1"), queue.join("gen-2")
    for session in (other, busy):
        queue.load(session, 0)
    queue.put(16)
    queue.lease(busy, "rollout", 8)
    queue.publish(1)
    for session in (one, other, busy):
        stage(queue, session, 1)
    assert queue.do(one, cmd.Swap(version=1)) == cmd.Permitted(version=1)
    waiting, waits_too = swap(queue, other, 1), swap(queue, busy, 1)
    assert not {waiting, waits_too} & queue.answers.keys()
    # when another one asks for prompts
    asked = queue.ask(other, cmd.LeaseRows(task="rollout", count=4, most=most, timeout_s=60))
    # then it may load, too, and the one that has prompts waits
    assert queue.answers[waiting] == cmd.Permitted(version=1)
    assert waits_too not in queue.answers
    # and it counts: the next one waits for both
    queue.do(one, cmd.ReportLoaded(version=1))
    assert waits_too not in queue.answers
    queue.do(other, cmd.ReportLoaded(version=1))
    assert queue.answers[waits_too] == cmd.Permitted(version=1)
    assert (asked in queue.answers) and (isinstance(queue.answers[asked], cmd.Leased) == bool(most))


def test_a_replica_that_gets_prompts_again_waits_for_its_turn_again() -> None:
    # given a replica that got none by version 0, loaded version 1, and gets some by it
    queue, one, *_ = running(max_staleness=1, max_swapping=1)
    other = queue.join("gen-1")
    queue.load(other, 0)
    queue.put(16)
    queue.lease(other, "rollout", 8)
    queue.publish(1)
    assert queue.lease(one, "rollout", 4) == cmd.LoadFirst(version=1)
    queue.load(one, 1)
    queue.lease(one, "rollout", 1)
    # when both want version 2
    queue.publish(2)
    for session in (one, other):
        stage(queue, session, 2)
    assert queue.do(other, cmd.Swap(version=2)) == cmd.Permitted(version=2)
    # then it waits, as its version admits more
    assert swap(queue, one, 2) not in queue.answers


# ---- quorum


def test_nobody_loads_before_enough_have_it_staged() -> None:
    queue, [one] = replicas(1, quorum=2)
    waiting = swap(queue, one, 7)
    other = queue.join("gen-1")
    queue.do(other, cmd.AwaitVersion(after=6))
    assert waiting not in queue.answers
    assert queue.status().committed == -1
    queue.do(other, cmd.ReportStaged(version=7))
    assert isinstance(queue.answers[waiting], cmd.Permitted)
    assert queue.status().committed == 7
    (said,) = [event for event in queue.events if isinstance(event, ev.Committed)]
    assert (said.version, said.staged) == (7, 2)


def test_a_replica_that_brought_the_version_counts() -> None:
    queue, [one] = replicas(1, version=0, quorum=2)
    waiting = swap(queue, one, 0)
    other = queue.join("gen-1")
    queue.ask(other, cmd.AwaitVersion(after=0, timeout_s=60))
    queue.do(other, cmd.ReportLoaded(version=0))
    assert isinstance(queue.answers[waiting], cmd.Permitted)


def test_a_replica_that_died_does_not_count() -> None:
    queue, [one, other] = replicas(2, quorum=3)
    queue.die(other)
    late = queue.join("late")
    stage(queue, late, 7)
    waiting = swap(queue, one, 7)
    assert waiting not in queue.answers
    stage(queue, queue.join("later"), 7)
    assert isinstance(queue.answers[waiting], cmd.Permitted)


def test_after_the_decision_those_below_it_are_granted_nothing_until_they_follow() -> None:
    queue, replica, *_ = running(max_staleness=4, quorum=1)
    queue.put(8)
    assert ids(queue.lease(replica, "rollout", 1)) == [0]
    queue.publish(1)
    assert ids(queue.lease(replica, "rollout", 1)) == [1]  # nothing is decided yet
    stage(queue, queue.join("gen-1"), 1)
    assert queue.lease(replica, "rollout", 1) == cmd.LoadFirst(version=1)
    stage(queue, replica, 1)
    assert queue.do(replica, cmd.Swap(version=1)) == cmd.Permitted(version=1)  # late ones may load at once
    queue.load(replica, 1)
    assert ids(queue.lease(replica, "rollout", 1)) == [2]


def test_a_decision_wakes_leases_that_wait() -> None:
    queue, replica, *_ = running(quorum=2)
    queue.put(4)
    queue.lease(replica, "rollout", 4)
    waiting = queue.ask(replica, cmd.LeaseRows(task="rollout", count=4, timeout_s=60))
    stage(queue, replica, 0)
    queue.publish(1)
    for name in ("gen-1", "gen-2"):
        assert waiting not in queue.answers
        stage(queue, queue.join(name), 1)
    assert queue.answers[waiting] == cmd.LoadFirst(version=1)


def test_what_is_decided_may_be_loaded_while_a_newer_version_is_not() -> None:
    queue, [one, other] = replicas(2, quorum=2)
    queue.publish(8)
    assert queue.do(one, cmd.Swap(version=7)) == cmd.Permitted(version=7)
    queue.load(one, 7)
    queue.load(other, 7)
    stage(queue, one, 8)
    waiting = swap(queue, one, 8)
    assert waiting not in queue.answers
    stage(queue, other, 8)
    assert isinstance(queue.answers[waiting], cmd.Permitted)
    assert queue.status().committed == 8


def test_a_late_joiner_is_given_what_is_decided_and_then_what_is_newer() -> None:
    queue, [one, other] = replicas(2, quorum=2, max_staleness=4, keep_versions=4)
    queue.load(one, 7)
    queue.die(other)
    queue.publish(8)
    late = queue.join("late")
    assert queue.do(late, cmd.AwaitVersion(after=-1)).version == 7, "it may load nothing else"
    queue.do(late, cmd.ReportStaged(version=7))
    waiting = queue.ask(late, cmd.AwaitVersion(after=7, timeout_s=60))
    with pytest.raises(
        DeadlineExceeded, match="version 8 is current but not committed; the committed version 7 must be loaded first"
    ):
        queue.do(late, cmd.AwaitVersion(after=7))
    assert waiting not in queue.answers, "8 would take the place of what it has staged"
    assert queue.do(late, cmd.Swap(version=7)) == cmd.Permitted(version=7)
    queue.load(late, 7)
    assert queue.answers[waiting].version == 8
    queue.put(4)
    assert ids(queue.lease(late, "rollout", 1)) == [0]
    for session in (late, one):
        stage(queue, session, 8)
    assert queue.status().committed == 8


def test_a_replica_that_cannot_load_what_is_decided_is_given_what_is_newer() -> None:
    queue, [one, other] = replicas(2, quorum=2, keep_versions=4)
    queue.load(one, 7)
    queue.publish(8)
    waiting = queue.ask(other, cmd.AwaitVersion(after=7, timeout_s=60))
    assert waiting not in queue.answers
    queue.do(other, cmd.ReportLoadFailed(version=7, reason="it would not"))
    assert queue.answers[waiting].version == 8


def test_what_was_never_decided_is_gone_when_it_is_replaced() -> None:
    queue, [one] = replicas(1, quorum=2)
    waiting = swap(queue, one, 7)
    queue.publish(8)
    assert isinstance(queue.answers[waiting], VersionGone)


def test_a_quorum_that_cannot_be_reached_says_how_many_are_missing_and_who_is_not_ready() -> None:
    queue, [one] = replicas(1, quorum=4)
    slow, bad = queue.join("slow"), queue.join("bad")
    queue.do(slow, cmd.AwaitVersion(after=6))
    queue.do(bad, cmd.ReportLoadFailed(version=7, reason="no room in /dev/shm"))
    queue.at(2.0)
    text = why(queue, one, cmd.Swap(version=7))
    assert "1 of the 4 required replicas (quorum) have it staged" in text
    assert "without it: slow (fetching 7, for 2.0 s), bad (failed 7: no room in /dev/shm, for 2.0 s)" in text
    assert "there are 3 replicas, 1 too few" in text


def test_without_a_quorum_nothing_is_decided_any_more() -> None:
    queue, replica, *_ = running(quorum=1)
    queue.put(4)
    queue.publish(1)
    stage(queue, queue.join("gen-1"), 1)
    assert queue.lease(replica, "rollout", 1) == cmd.LoadFirst(version=1)
    queue.do(queue.admin, cmd.Configure(quorum=0))
    assert queue.status().committed == -1
    assert ids(queue.lease(replica, "rollout", 1)) == [0]


def test_a_smaller_quorum_decides() -> None:
    queue, [one] = replicas(1, quorum=4)
    waiting = swap(queue, one, 7)
    queue.do(queue.admin, cmd.Configure(quorum=1))
    assert isinstance(queue.answers[waiting], cmd.Permitted)


# ---- late joiners


def test_a_replica_with_a_version_0_of_its_own_loads_the_newest_before_its_first_prompts() -> None:
    queue, replica, *_ = running(max_staleness=100)
    queue.put(8)
    queue.publish(1)
    late = queue.join("late")
    queue.load(late, 0, own=True)
    assert queue.lease(late, "rollout", 1) == cmd.LoadFirst(version=1)
    assert ids(queue.lease(replica, "rollout", 1)) == [0]  # who had version 0 when it was current goes on with it
    queue.load(late, 1)
    assert ids(queue.lease(late, "rollout", 1)) == [1]


def test_a_replica_that_begins_before_the_first_version_goes_on() -> None:
    queue = Queue(ROLLOUT, TRAIN, max_staleness=4)
    early, idle = queue.join("early"), queue.join("idle")
    queue.load(early, 0, own=True)
    queue.load(idle, 0, own=True)
    queue.put(8)
    queue.lease(early, "rollout", 1)
    with pytest.raises(ConfigError, match="rows were leased for the engines' own weights, which are version 0"):
        queue.publish(0)
    queue.publish(1)  # nobody ever published 0
    assert ids(queue.lease(early, "rollout", 1)) == [1]  # the staleness rule admits it
    assert queue.lease(idle, "rollout", 1) == cmd.LoadFirst(version=1)  # it has not begun


def test_version_0_is_loaded_where_engines_have_begun_with_weights_of_their_own() -> None:
    queue = Queue(ROLLOUT, TRAIN, max_staleness=4)
    early, between, late = queue.join("early"), queue.join("between"), queue.join("late")
    queue.load(early, 0, own=True)
    queue.do(queue.admin, cmd.OpenPublisher())
    queue.do(queue.admin, cmd.Announce(version=0))  # from here on, 0 is the name of what is being published
    queue.put(8)
    queue.load(between, 0, own=True)
    waiting = queue.ask(early, cmd.LeaseRows(task="rollout", count=1, most=1, timeout_s=60))
    queue.do(queue.admin, cmd.Publish(version=0, part=part(0)))
    queue.load(late, 0, own=True)
    assert waiting not in queue.answers
    for session in (early, between, late):
        assert queue.lease(session, "rollout", 1) == cmd.LoadFirst(version=0)
    queue.load(late, 0)
    assert ids(queue.lease(late, "rollout", 1)) == [0]


def test_a_replica_without_a_version_loads_the_newest() -> None:
    queue, *_ = running()
    queue.put(4)
    assert queue.lease(queue.join("late"), "rollout") == cmd.LoadFirst(version=0)


# ---- what is said


def test_a_session_tells_what_it_does_about_a_version() -> None:
    queue = Queue(ROLLOUT, TRAIN, max_swapping=1)
    one, other = queue.join("gen-0"), queue.join("gen-1")
    queue.publish(7)

    def said(session: int) -> tuple[bool, str, float]:
        (status,) = [each for each in queue.status().sessions if each.id == session]
        return status.replica, status.weights, status.weights_s

    assert said(one) == (False, "", 0.0)
    queue.do(one, cmd.AwaitVersion(after=6))
    queue.at(1.0)
    assert said(one) == (True, "fetching 7", 1.0)
    queue.do(one, cmd.ReportStaged(version=7))
    assert said(one) == (True, "staged 7", 0.0)
    queue.do(one, cmd.Swap(version=7))
    assert said(one) == (True, "loading 7", 0.0)
    stage(queue, other, 7)
    swap(queue, other, 7)
    queue.at(2.0)
    assert said(other) == (True, "waits to load 7", 1.0)
    assert [each.verb for each in queue.status().parked] == ["load 7"]
    queue.do(one, cmd.ReportLoaded(version=7))
    assert said(one) == (True, "", 0.0)
    queue.do(other, cmd.ReportLoadFailed(version=7, reason="unknown tensor"))
    assert said(other) == (True, "failed 7: unknown tensor", 0.0)


def test_the_status_lists_versions_with_the_replicas_on_them() -> None:
    queue = Queue(ROLLOUT, TRAIN, quorum=1)
    one, other = queue.join("gen-0"), queue.join("gen-1")
    queue.publish(6)
    stage(queue, one, 6)
    queue.load(one, 6)
    queue.at(3.0)
    queue.publish(7)
    stage(queue, one, 7)
    stage(queue, other, 7)
    queue.do(queue.admin, cmd.Announce(version=8))
    queue.at(5.0)
    status = queue.status()
    assert status.versions == (
        VersionStatus(version=6, source=6, age_s=5.0, nbytes=0, root="r6.0", transport="shm", on=1, staged=0),
        VersionStatus(version=7, source=7, age_s=2.0, nbytes=0, root="r7.0", transport="shm", on=0, staged=2),
    )
    assert (status.publisher, status.announced, status.announced_s, status.committed) == ("admin", 8, 2.0, 7)


def test_events_tell_a_version_s_life_on_a_replica() -> None:
    queue = Queue(ROLLOUT, TRAIN)
    one = queue.join("gen-0")
    queue.publish(7)
    queue.do(one, cmd.AwaitVersion(after=-1))
    queue.do(one, cmd.ReportStaged(version=7, skipped=2, moved=10, encoding="delta", seconds=0.5))
    queue.do(one, cmd.Swap(version=7))
    queue.do(one, cmd.ReportLoadFailed(version=7, reason="unknown tensor"))
    queue.publish(8)
    queue.do(one, cmd.ReportLoaded(version=7))
    told = [event for event in queue.events if isinstance(event, ev.WeightState)]
    assert [(e.worker, e.version, e.state) for e in told] == [
        ("gen-0", 7, state) for state in ("fetching", "staged", "swapping", "failed")
    ]
    assert (told[1].skipped, told[1].moved, told[1].encoding, told[1].seconds) == (2, 10, "delta", 0.5)
    assert told[3].detail == "unknown tensor"
    assert [(e.version, e.lag) for e in queue.events if isinstance(e, ev.Loaded)] == [(7, 1)]


def test_a_lease_that_waits_for_a_version_names_replicas_that_failed() -> None:
    queue, replica, *_ = running(max_staleness=0)
    queue.put(8)
    queue.lease(replica, "rollout", 4)
    later, bad = queue.join("gen-8"), queue.join("gen-9")
    queue.do(bad, cmd.ReportLoadFailed(version=0, reason="no such file"))
    queue.do(queue.admin, cmd.Announce(version=1))
    queue.at(4.0)
    queue.do(later, cmd.ReportLoadFailed(version=0, reason="torn"))
    text = why(queue, replica, cmd.LeaseRows(task="rollout", count=1))
    assert "version 0 is current since 4.0 s" in text
    assert "version 1 was announced 4.0 s ago by admin, not published yet" in text
    assert "gen-9 (failed 0: no such file, for 4.0 s), gen-8 (failed 0: torn, for 0.0 s)" in text


def test_a_version_is_an_event_for_each_replica_at_most() -> None:
    """Publishing to many replicas costs each of them once: no row is looked at."""
    queue, sessions = replicas(50, max_swapping=1)
    tickets = [swap(queue, session, 7) for session in sessions]
    for at, session in enumerate(sessions):
        assert [ticket in queue.answers for ticket in tickets] == [place <= at for place in range(50)]
        queue.do(session, cmd.ReportLoaded(version=7))
    assert part(7).outlives
    assert queue.put(1, prompt=TEXT).count == 1
