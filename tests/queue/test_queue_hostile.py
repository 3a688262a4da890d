"""A client that is broken or hostile gets errors; the server, its other clients and their memory are not touched."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from queue_runs import Run, blocks_in_use, running

from asyncflow_sdk import __version__
from asyncflow_sdk.errors import AsyncFlowError, PayloadLost, ProtocolError, SchemaError
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.ledger.commands import TaskSpec, pack_ids
from asyncflow_sdk.queue import Connection, QueueServer, TransferQueue, connection
from asyncflow_sdk.queue.blocks import Block, pack_columns, write
from asyncflow_sdk.queue.protocol import Call, Hello, decode_answer, encode
from asyncflow_sdk.types import ColumnSpec, Event
from asyncflow_sdk.types.events import Note
from asyncflow_sdk.wire import Client

X = {"x": ColumnSpec("fixed", "float64")}


@pytest.fixture
def run() -> Iterator[Run]:
    with running("tcp", insecure=True) as run:
        yield run


@pytest.fixture
def victim(run: Served) -> TransferQueue:
    """Somebody else's queue, with a row in it."""
    queue = run.queue("victim")
    queue.declare("work", needs=["x"], gives=["y"])
    queue.put({"x": [1.0]})
    return queue


def ask(client: Client, command: Any, block: Block | None = None) -> Any:
    answer = decode_answer(client.ask(encode(Call(command, block)), 5))
    answer.raise_error()
    return answer.reply


@pytest.fixture
def hostile(run: Served, victim: TransferQueue) -> Iterator[Client]:
    client = Client(run.address, insecure=True)
    ask(client, Hello("hostile", 0, "", __version__))
    yield client
    client.close()


def unharmed(victim: TransferQueue) -> None:
    batch = victim.get("work", 5)
    assert batch.array("x").tolist() == [1.0]
    batch.give_back()
    assert victim.audit().put == 1
    assert blocks_in_use(victim) == 1


@pytest.mark.parametrize(
    "block",
    [
        Block("s1-1", 0, 1, 1, 128, ("x",)),  # somebody else's segment
        Block("s2-1", 0, 1, 1, 128, ("x",)),  # one's own, which is not there
        Block("owner", 0, 1, 1, 0, ("x",)),
        Block("queue", 0, 1, 1, 0, ("x",)),
        Block("../../etc/passwd", 0, 1, 1, 128, ("x",)),
        Block("s2-/../s1-1", 0, 1, 1, 128, ("x",)),
        Block("s2-\0", 0, 1, 1, 128, ("x",)),
        Block("s2-2", 0, 1, 1, 0, ("x",)),  # fewer bytes than rows
        Block("s2-2", 0, 1, 1, 1 << 60, ("x",)),  # more than there are
        Block("s2-2", 1 << 62, 1, 1, 128, ("x",)),
        Block("s2-2", 2**63 - 64, 1, 1, 2**63 - 64, ("x",)),
        Block("s2-2", -64, 1, 1, 128, ("x",)),
        Block("s2-2", 8, 1, 1, 128, ("x",)),
        Block("s2-2", 0, 1, 1, 100, ("x",)),
        Block("s2-2", 0, 0, 1, 128, ("x",)),
        Block("s2-2", 0, 2**64 - 1, 1, 128, ("x",)),
        Block("s2-2", 0, 1, -1, 128, ("x",)),
        Block("s2-2", 0, 1, 0, 128, ("x",)),
        Block("s2-2", 0, 1, 1 << 31, 1 << 20, ("x",)),
        Block("s2-2", 0, 1, 2, 128, ("x",)),  # more rows than are put
        Block("s2-2", 0, 1, 1, 128, ("y",)),
        Block("s2-2", 0, 1, 1, 128, ("x", "x")),
        Block("s2-2", 0, 1, 1, 128, ()),
        None,
    ],
)
def test_payload_that_is_not_there_or_not_ones_own(
    run: Served, hostile: Client, victim: TransferQueue, block: Block | None
) -> None:
    (run.server.directory.path / "s2-2").write_bytes(bytes(1 << 20))
    with pytest.raises(PayloadLost if block is not None and block.segment == "s2-1" else SchemaError):
        ask(hostile, cmd.Put(groups=1, group_size=1, columns=X), block)
    unharmed(victim)


@pytest.mark.parametrize(
    "command",
    [
        cmd.Join(name="again"),
        Hello("again", 0, "", "0.0.0"),
        cmd.Lease(task="work", count=-1),
        cmd.Lease(task="no such", count=1),
        cmd.Lease(task="other", count=1, timeout_s=float("nan")),
        cmd.Complete(token=1, columns={}),
        cmd.Complete(token=-(2**63), columns={}, index=b"abc"),
        cmd.GiveBack(token=2**62, index=b"\xff" * 4),
        cmd.Put(groups=2**61, group_size=2**61, columns={}),
        cmd.Configure(capacity_rows=-1),
        cmd.OpenPublisher(rank=-1),
        cmd.OpenPublisher(rank=2, world_size=2),
        cmd.OpenPublisher(rank=0, world_size=-(2**63)),
        cmd.Announce(version=0),
        cmd.Publish(version=-5, part=cmd.Part(manifest=b"", transport="", where=b"")),
        cmd.Publish(version=2**62, part=cmd.Part(manifest=b"", transport="", where=b"")),
        cmd.Withdraw(version=0),
        cmd.Rollback(version=0),
        cmd.Rollback(version=-(2**63)),
        cmd.Staged(version=7),
        cmd.Swap(version=7),
        cmd.Loaded(version=7),
        cmd.NotLoaded(version=7, reason=""),
        cmd.Configure(keep_versions=0),
        cmd.Configure(quorum=-1),
        cmd.Configure(max_swapping=-1),
        cmd.Declare(task=TaskSpec(name="work", needs=("y",))),
        cmd.Declare(task=TaskSpec(name="nan", needs=("x",), lease_s=float("nan"))),
        cmd.Declare(task=TaskSpec(name="many", needs=tuple(f"c{i}" for i in range(70)))),
        cmd.AwaitVersion(after=5, timeout_s=-1.0),
    ],
)
def test_commands_that_make_no_sense_are_refused(
    hostile: Client, victim: TransferQueue, command: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ask(hostile, cmd.Declare(task=TaskSpec(name="other", needs=("never",))))
    with pytest.raises(AsyncFlowError):
        ask(hostile, command)
    unharmed(victim)
    assert caplog.records == []  # each by a check, none by an accident


def test_another_session_cannot_use_a_lease(run: Served, hostile: Client, victim: TransferQueue) -> None:
    batch = victim.get("work", 1)
    for command in (
        cmd.GiveBack(token=batch.token), cmd.Renew(token=batch.token), cmd.Complete(token=batch.token, columns={}),
    ):  # fmt: skip
        with pytest.raises(AsyncFlowError, match="is not held by hostile"):
            ask(hostile, command)
    batch.complete({"y": [2.0]})


@pytest.mark.parametrize("body", [b"x", b"\xc0", msgspec.msgpack.encode([1, 2, 3]), pack_ids(np.arange(9))])
def test_bodies_that_no_server_can_read(hostile: Client, victim: TransferQueue, body: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot read this call"):
        decode_answer(hostile.ask(body, 5)).raise_error()
    unharmed(victim)


def test_nothing_is_done_before_hello_or_for_another_version(run: Served, victim: TransferQueue) -> None:
    client = Client(run.address, insecure=True)
    with pytest.raises(ProtocolError, match="say hello first"):
        ask(client, cmd.GetAudit())
    with pytest.raises(ProtocolError, match="say hello first"):
        ask(client, cmd.Put(groups=1, group_size=1, columns=X), Block("s1-1", 0, 1, 1, 128, ("x",)))
    with pytest.raises(ProtocolError, match=r"served by asyncflow-sdk .*; old has 0\.0\.1"):
        ask(client, Hello("old", 0, "", "0.0.1"))
    client.close()
    unharmed(victim)


@pytest.mark.parametrize("command", [None, cmd.GetAudit(), Hello("stranger", 0, "", "0.0.1")])
def test_events_are_taken_only_after_hello(command: Any) -> None:
    # given
    seen: list[Event] = []
    with running("tcp", on_event=seen.append) as run:
        client = Client(run.address, run.key)
        forged = encode(Call(command, None, (Note(time_s=0.0, text="forged"),)))
        # when a session that has not said hello sends an event
        answer = decode_answer(client.ask(forged, 5))
        # then its call is refused, and the event with it
        with pytest.raises(ProtocolError, match=r"say hello first|served by asyncflow-sdk"):
            answer.raise_error()
        # and after hello the same event is taken
        ask(client, Hello("known", 0, "", __version__))
        decode_answer(client.ask(encode(Call(None, None, (Note(time_s=0.0, text="reported"),))), 5)).raise_error()
        assert [event.text for event in seen if isinstance(event, Note)] == ["reported"]
        client.close()


def test_a_client_of_another_version_is_refused_by_name(run: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "__version__", "0.0.1")
    with pytest.raises(ProtocolError, match="asyncflow-sdk"):
        Connection(run.address, "old", insecure=True)


def test_listeners_that_raise_are_logged_and_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    # given
    def fail(*what: object) -> None:
        raise RuntimeError("no disk")

    with caplog.at_level(logging.CRITICAL), running("ipc", on_event=fail, on_step=fail) as run:
        queue = run.queue()
        queue.declare("train", needs=["x"], batch_rows=2)
        queue.put({"x": [1.0, 2.0]})
        # when / then
        queue.get("train").ack()
        assert queue.audit().consumed == 2


def test_a_bad_address_leaves_nothing() -> None:
    mine = f"asyncflow-*-{os.getpid()}-*"
    before = set(Path("/dev/shm").glob(mine))
    with pytest.raises(AsyncFlowError, match="is served with keys only"):
        QueueServer(["tcp://0.0.0.0:0"])
    assert set(Path("/dev/shm").glob(mine)) == before


def test_the_same_frame_of_a_put_adds_its_rows_once(run: Served, victim: TransferQueue) -> None:
    # given a put, as it lies on the wire
    sender = Connection(run.address, "sender", insecure=True)
    numbering = sender.wire._numbering
    block, _ = write(sender.arena, pack_columns({"x": np.array([3.0])}))
    put = numbering.frame(numbering.begin(), encode(Call(cmd.Put(groups=1, group_size=1, columns=X), block)))
    # when it is sent over several sockets, several times
    for _ in range(3):
        raw = zmq.Context.instance().socket(zmq.DEALER)
        raw.connect(run.address)
        for _ in range(3):
            raw.send(put)
        for _ in range(3):
            assert raw.poll(30_000)
            raw.recv()
        raw.close(linger=0)
    # then
    assert victim.audit().put == 2
    sender.close()
