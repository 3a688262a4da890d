"""Of a session that has ended, or never began, a server keeps nothing."""

from collections.abc import Iterator

import pytest
from queue_runs import Run, running
from waiting import until

from asyncflow_sdk.errors import ProtocolError
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.queue import TransferQueue
from asyncflow_sdk.queue._once import drive
from asyncflow_sdk.queue.protocol import Call, Hello, decode_answer, encode
from asyncflow_sdk.wire import Client


@pytest.fixture
def run() -> Iterator[Run]:
    with running("ipc") as run:
        yield run


def send(queue: TransferQueue, command: cmd.AnyCommand) -> cmd.AnyReply:
    return drive(queue._port.send(command))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "body",
    [encode(Call(cmd.GetAudit())), encode(Call(None)), b"\xc0", encode(Call(Hello("old", 0, "", "0.0.1")))],
    ids=["command", "events", "garbage", "another version"],
)
def test_who_never_comes_in_is_answered_and_forgotten(run: Served, body: bytes) -> None:
    # given a client
    queue = run.queue()
    # when others ask something and never say hello, or say it wrongly
    for _ in range(5):
        stranger = Client(run.address)
        decode_answer(stranger.ask(body, 5))
        stranger.close()
    # then
    queue.audit()
    assert list(run.server._wire._sessions) == [queue._port.connection.wire.session]


def test_what_a_client_held_goes_when_somebody_says_that_it_has_ended(run: Served) -> None:
    # given a client whose process the server does not watch, with rows in memory of its own, and one that it leased
    queue, lost = run.queue(), run.queue("lost")
    queue.declare("work", needs=["x"])
    lost.put({"x": [b"1" * 5000, b"2" * 5000]})
    held = lost.get("work", 1)
    number = lost._port.connection.session
    segments = f"s{number}-*"
    # when
    told = send(queue, cmd.Dismiss(name="lost", ended="its host is gone"))
    # then its row is another's, and with the last of its rows its memory goes
    assert told == cmd.Dismissed(count=1)
    assert list(run.server.directory.path.glob(segments))
    with queue.get("work", 2, timeout_s=10) as batch:
        assert batch.rows == 2
        batch.ack()
    until(lambda: not list(run.server.directory.path.glob(segments)), "the end of its memory")
    # and nobody remembers it, also when it lives and speaks again
    with pytest.raises(ProtocolError, match="say hello first"):
        held.ack()
    assert list(run.server._sessions.values()) == [queue._port.connection.session]
    until(lambda: len(run.server._wire._sessions) == 1, "that it is forgotten again when it has been answered")
    assert not run.server._freed
    assert [each.name for each in queue.status().sessions] == ["test"]
