"""A client that is broken or hostile gets errors; the server, its other clients and their memory are not touched."""

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from queue_runs import RawClient, Served, running
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import AsyncFlowError, LeaseLost, PayloadLost, ProtocolError, SchemaError
from asyncflow_sdk.interfaces import TransferQueue
from asyncflow_sdk.interfaces.store import HomeOffer
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.queue.protocol import ClientHello
from asyncflow_sdk.types import ColumnSpec
from asyncflow_sdk.types.events import Note

pytestmark = pytest.mark.fast
X = {"x": ColumnSpec("fixed", "float64")}


@pytest.fixture(scope="module")
def run() -> Iterator[Served]:
    with running() as run:
        yield run


@pytest.fixture(scope="module")
def victim(run: Served) -> TransferQueue:
    """Somebody else's queue, with a row in it."""
    queue = run.queue("victim")
    queue.declare("work", needs=["x"], gives=["y"])
    queue.put({"x": [1.0]})
    return queue


@pytest.fixture(scope="module")
def hostile(run: Served, victim: TransferQueue) -> Iterator[RawClient]:
    client = RawClient(run.address, "hostile")
    client.send(cmd.Declare(task=cmd.TaskSpec(name="other", needs=("never",))))
    (own,) = (session.id for session in victim.status().sessions if session.name == "hostile")
    assert own == 3
    (run.memory / "s3-2").write_bytes(bytes(1 << 20))
    yield client
    client.close()


def unharmed(victim: TransferQueue) -> None:
    batch = victim.get("work", 5)
    assert batch.array("x").tolist() == [1.0]
    batch.give_back()
    assert victim.audit().put == 1


@pytest.mark.parametrize(
    "block",
    [
        ("s2-1", 0, 1, 1, 128, ("x",)),  # somebody else's segment
        ("s3-1", 0, 1, 1, 128, ("x",)),  # one's own, which is not there
        ("owner", 0, 1, 1, 0, ("x",)),
        ("queue", 0, 1, 1, 0, ("x",)),
        ("../../etc/passwd", 0, 1, 1, 128, ("x",)),
        ("s3-/../s2-1", 0, 1, 1, 128, ("x",)),
        ("s3-\0", 0, 1, 1, 128, ("x",)),
        ("s03-2", 0, 1, 1, 128, ("x",)),  # a name that is not removed with the session
        ("h0.1!s3-2", 0, 1, 1, 128, ("x",)),
        ("s3-2", 0, 1, 1, 0, ("x",)),  # fewer bytes than rows
        ("s3-2", 0, 1, 1, 1 << 60, ("x",)),  # more than there are
        ("s3-2", 1 << 62, 1, 1, 128, ("x",)),
        ("s3-2", 2**63 - 64, 1, 1, 2**63 - 64, ("x",)),
        ("s3-2", -64, 1, 1, 128, ("x",)),
        ("s3-2", 8, 1, 1, 128, ("x",)),
        ("s3-2", 0, 1, 1, 100, ("x",)),
        ("s3-2", 0, 0, 1, 128, ("x",)),
        ("s3-2", 0, 2**64 - 1, 1, 128, ("x",)),
        ("s3-2", 0, 1, -1, 128, ("x",)),
        ("s3-2", 0, 1, 0, 128, ("x",)),
        ("s3-2", 0, 1, 1 << 31, 1 << 20, ("x",)),
        ("s3-2", 0, 1, 2, 128, ("x",)),  # more rows than are put
        ("s3-2", 0, 1, 1, 128, ("y",)),
        ("s3-2", 0, 1, 1, 128, ("x", "x")),
        ("s3-2", 0, 1, 1, 128, ()),
        (),
    ],
)
def test_payload_that_is_not_there_or_not_ones_own(
    hostile: RawClient, victim: TransferQueue, block: tuple[Any, ...]
) -> None:
    with pytest.raises(PayloadLost if "s3-1" in block else SchemaError):
        hostile.send(cmd.AddRows(groups=1, group_size=1, columns=X), *block)
    unharmed(victim)


@pytest.mark.parametrize(
    "command",
    [
        cmd.OpenSession(name="again"),
        cmd.LeaseRows(task="work", count=-1),
        cmd.LeaseRows(task="no such", count=1),
        cmd.LeaseRows(task="other", count=1, timeout_s=float("nan")),
        cmd.Complete(token=10**6, columns={}),
        cmd.Complete(token=-(2**63), columns={}, index=b"abc"),
        cmd.GiveBack(token=2**62, index=b"\xff" * 4),
        cmd.AddRows(groups=2**61, group_size=2**61, columns={}),
        cmd.AddRows(groups=2**61, group_size=0, columns={}),
        cmd.Configure(capacity_rows=-1),
        cmd.OpenPublisher(rank=-1),
        cmd.OpenPublisher(rank=2, world_size=2),
        cmd.OpenPublisher(rank=0, world_size=-(2**63)),
        cmd.Announce(version=0),
        cmd.Publish(version=-5, part=cmd.VersionPart(manifest=b"", transport="", where=b"")),
        cmd.Publish(version=2**62, part=cmd.VersionPart(manifest=b"", transport="", where=b"")),
        cmd.Withdraw(version=0),
        cmd.Rollback(version=0),
        cmd.Rollback(version=-(2**63)),
        cmd.ReportStaged(version=7),
        cmd.Swap(version=7),
        cmd.ReportLoaded(version=7),
        cmd.ReportLoadFailed(version=7, reason=""),
        cmd.Configure(keep_versions=0),
        cmd.Configure(quorum=-1),
        cmd.Configure(max_swapping=-1),
        cmd.Declare(task=cmd.TaskSpec(name="work", needs=("y",))),
        cmd.Declare(task=cmd.TaskSpec(name="nan", needs=("x",), lease_s=float("nan"))),
        cmd.Declare(task=cmd.TaskSpec(name="many", needs=tuple(f"c{i}" for i in range(70)))),
        cmd.AwaitVersion(after=5, timeout_s=-1.0),
    ],
)
def test_commands_that_make_no_sense_are_refused(
    hostile: RawClient, victim: TransferQueue, command: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(AsyncFlowError):
        hostile.send(command)
    unharmed(victim)
    assert caplog.records == []  # each by a check, none by an accident


@pytest.mark.parametrize("place", [(1 << 63, 64), (0, 1 << 63), (1 << 62, 1 << 62)])
def test_rows_of_another_home_have_a_place(place: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    with running(store="hosts") as run:
        queue = run.queue("good")
        queue.declare("work", needs=["x"])
        hostile = RawClient(run.address)
        hostile.send(cmd.OpenHome(offer=HomeOffer(store="hosts", name="x", identity="x")))
        (own,) = (session.id for session in queue.status().sessions if session.name == "raw")
        start, nbytes = place
        # when a member puts rows of its home at a place that no memory has
        with pytest.raises(SchemaError, match="the payload's location is invalid"):
            hostile.send(
                cmd.AddRows(groups=1, group_size=1, columns=X), f"h1.1!s{own}-a", start, 1, 1, nbytes, ("x",)
            )
        # then none was added, and others get theirs
        queue.put({"x": [2.0]})
        assert queue.get("work", 5, at_least=1).array("x").tolist() == [2.0]
        assert caplog.records == []
        hostile.close()


def test_a_name_that_no_segment_has_is_not_even_read(hostile: RawClient, victim: TransferQueue) -> None:
    with pytest.raises(ProtocolError, match="cannot read this call"):
        hostile.send(cmd.AddRows(groups=1, group_size=1, columns=X), "s3-" + 200 * "a", 0, 1, 1, 128, ("x",))
    unharmed(victim)


def test_a_second_hello_changes_nothing(run: Served, hostile: RawClient, victim: TransferQueue) -> None:
    sessions = vars(vars(vars(run.run)["_server"])["_wire"])["requests"].sessions.values()
    before = [len(each.keys) for each in sessions]
    with pytest.raises(ProtocolError, match="is open already"):
        hostile.send(ClientHello("raw", 0, "", af.__version__))
    assert [len(each.keys) for each in sessions] == before
    unharmed(victim)


def test_a_checkpoint_that_waits_goes_with_its_session(caplog: pytest.LogCaptureFixture) -> None:
    # given a checkpoint that a listener holds
    go, covered = threading.Event(), list[int]()
    with running(on_final=lambda step: (covered.append(step), go.wait(200)), checkpoints=True) as run:
        queue, trainer = run.queue(), RawClient(run.address, "trainer")
        in_thread(trainer.send, cmd.AddCheckpoint(step=0, covers=0, version=0, timeout_s=100.0))
        until(lambda: queue.status().parked_count == 1 and covered, "a checkpoint that waits")
        # when the driver dismisses its trainer, which has died elsewhere
        queue.send(cmd.Dismiss(name="trainer", ended="its host is gone"))
        # then it waits no more, and others are answered
        assert queue.status().parked_count == 0
        go.set()
        assert "trainer" not in {session.name for session in queue.status().sessions}
        assert caplog.records == []
        trainer.close()


def test_another_session_cannot_use_a_lease(hostile: RawClient, victim: TransferQueue) -> None:
    batch = victim.get("work", 1)
    for command in (
        cmd.GiveBack(token=batch.token), cmd.Renew(token=batch.token), cmd.Complete(token=batch.token, columns={}),
    ):  # fmt: skip
        with pytest.raises(AsyncFlowError, match="is not held by hostile"):
            hostile.send(command)
    batch.give_back()


def test_rows_said_to_be_unread_that_can_be_read_are_given_to_others(
    hostile: RawClient, victim: TransferQueue
) -> None:
    for _ in range(5):  # no attempt is counted
        lease = hostile.send(cmd.LeaseRows(task="work", count=1))
        hostile.send(cmd.GiveBack(token=lease.token, unread=True))
    unharmed(victim)


def test_a_lease_rides_with_a_completion_only(hostile: RawClient, victim: TransferQueue) -> None:
    lease = cmd.LeaseRows(task="work", count=1)
    for command in (cmd.GetAudit(), lease, cmd.End(), cmd.CloseSession()):
        with pytest.raises(ProtocolError, match="needs a completion or a return of rows"):
            hostile.send(command, then=lease)
    unharmed(victim)


@pytest.mark.parametrize("body", [b"x", b"\xc0", msgspec.msgpack.encode([1, 2, 3]), np.arange(9).tobytes()])
def test_bodies_that_no_server_can_read(hostile: RawClient, victim: TransferQueue, body: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot read this call"):
        hostile.send_bytes(body)
    unharmed(victim)


def test_nothing_is_done_before_hello_or_for_another_version(run: Served, victim: TransferQueue) -> None:
    client = RawClient(run.address, sdk=None)
    for command, block in (
        (cmd.GetAudit(), ()),
        (cmd.AddRows(groups=1, group_size=1, columns=X), ("s2-1", 0, 1, 1, 128, ("x",))),
    ):
        with pytest.raises(ProtocolError, match="send hello first"):
            client.send(command, *block)
    client.close()
    with pytest.raises(ProtocolError, match=r"served by asyncflow-sdk .*; old has 0\.0\.1"):
        RawClient(run.address, "old", sdk="0.0.1")
    unharmed(victim)


def test_events_are_taken_only_after_hello() -> None:
    seen: list[af.Event] = []
    with running(on_event=seen.append) as run:
        # when a session that has not said hello sends an event
        stranger = RawClient(run.address, sdk=None)
        for command in (None, cmd.GetAudit()):
            with pytest.raises(ProtocolError, match=r"send hello first|served by asyncflow-sdk"):
                stranger.send(command, events=(Note(time_s=0.0, text="forged"),))
        stranger.close()
        # and after hello the same
        known = RawClient(run.address)
        known.send(None, events=(Note(time_s=0.0, text="reported"),))
        # then only that is taken
        assert [event.text for event in seen if isinstance(event, Note)] == ["reported"]
        known.close()


def test_listeners_that_raise_are_logged_and_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*what: object) -> None:
        raise RuntimeError("no disk")

    with caplog.at_level(logging.CRITICAL), running(on_event=fail, on_step=fail) as run:
        queue = run.queue()
        queue.declare("train", needs=["x"], batch_rows=2)
        queue.put({"x": [1.0, 2.0]})
        queue.get("train").ack()
        assert queue.audit().consumed == 2


def test_a_bad_address_leaves_nothing() -> None:
    mine = f"asyncflow-*-{os.getpid()}-*"
    before = set(Path("/dev/shm").glob(mine))
    with pytest.raises(AsyncFlowError, match="is served with keys only"):
        af.serve(address="tcp://0.0.0.0:0")
    assert set(Path("/dev/shm").glob(mine)) == before


def test_requests_that_arrive_several_times_have_their_effect_once() -> None:
    with running() as run:
        # given a client each of whose messages arrives three times
        proxy, queue = run.proxied()
        proxy.changed = lambda message: [message] * 3
        queue.declare("work", needs=["x"], max_attempts=1)
        queue.put({"x": [1.0]})
        queue.put({"x": [2.0]})
        batch = queue.get("work", 2)
        batch.ack()
        with pytest.raises(LeaseLost):
            batch.renew()
        audit = run.run.audit()
        assert (audit.put, audit.consumed, audit.failed) == (2, 2, 0)
