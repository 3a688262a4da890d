"""A member of a run that fills its server, or speaks for another: it is refused or ended, and the others go on."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from children import Child
from queue_runs import Served, running, serve

import asyncflow_sdk as af
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.queue.protocol import Call, CallResult, ClientHello, decode_result, encode
from asyncflow_sdk.wire import RunKey, own_key
from asyncflow_sdk.wire.client_sockets import connect
from asyncflow_sdk.wire.envelope import (
    PROTOCOL,
    Offer,
    Piece,
    Read,
    RequestEnvelope,
    ResponseEnvelope,
    decode_response,
)


class Member:
    """A connection with a real key that sends whatever it is told to."""

    def __init__(self, address: str, key: RunKey, session: str = "attacker") -> None:
        self.socket, self.session = zmq.Context.instance().socket(zmq.DEALER), session
        connect(self.socket, address, key)

    def send(self, seq: int, command: Any, session: str = "") -> None:
        self.send_body(seq, encode(Call(command)), session)

    def send_body(
        self, seq: int, body: bytes, session: str = "", part: Any = None, data: bytes | None = None
    ) -> None:
        envelope = encode(RequestEnvelope(PROTOCOL, session or self.session, seq, 1, (), (), body, part))
        self.socket.send_multipart([envelope] if data is None else [envelope, data])

    def hello(self, session: str = "") -> None:
        self.send(1, ClientHello("attacker", 0, "", af.__version__, "", own_key().public), session)

    def hear_message(self) -> ResponseEnvelope:
        assert self.socket.poll(200_000), "the server said nothing"
        return decode_response(self.socket.recv_multipart()[0])

    def hear(self) -> CallResult:
        return decode_result(self.hear_message().body)

    def heard(self) -> Iterator[CallResult]:
        """What it is told from now on, up to a silence."""
        while self.socket.poll(2000):
            yield self.hear()

    def __enter__(self) -> "Member":
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close(linger=0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Served]:
    with running("tcp", tmp_path / "run") as run:
        yield run


def run_key(directory: Path) -> RunKey:
    return RunKey.load(directory / "run" / "run.key")


def test_hellos_of_one_connection_leave_room_for_others(run: Served, tmp_path: Path) -> None:
    # when one connection opens as many sessions as it can
    errors = []
    with Member(run.address, run_key(tmp_path)) as member:
        for number in range(4200):
            member.hello(f"session-{number}")
            errors.append(str(member.hear().error))
        # then others come
        assert len(run.queue("another").status().sessions) == 1 + errors.count("None") + 1
    assert "this connection has 16 sessions, the most it can have" in errors[16]


@pytest.mark.parametrize("shown", ["own key", "run key"])
def test_no_member_speaks_in_the_session_of_another(run: Served, tmp_path: Path, shown: str) -> None:
    # given a member with a row, and another that knows the name of its session
    victim, attacker = run.client("victim"), run.client("attacker")
    victim.queue.declare("work", needs=["x"])
    victim.queue.put({"x": [1.0]})
    connection = attacker.queue.connection
    key = connection.key if shown == "own key" else run_key(tmp_path)
    # when this one closes the session
    with Member(run.address, key, victim.queue.connection.wire.session) as member:
        member.send(1000, cmd.CloseSession())
        member.hello("its own")
        member.hear()
    # then it has no effect
    assert victim.queue.get("work", 1).array("x").tolist() == [1.0]
    assert attacker.queue.status().garbage == 1


def resident(pid: int) -> int:
    """Bytes of memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def served_elsewhere(directory: Path) -> Iterator[tuple[Child, af.Run, str]]:
    """A server in a process of its own, with a status of 40 KB; and a member."""
    with Child(serve, str(directory / "run"), {"address": "tcp://127.0.0.1:0"}) as server:
        address = server.hear()["addresses"][-1]
        with af.connect(address, name="another") as another:
            for number in range(130):
                another.queue.declare(f"{number:03}" * 30, needs=["x"])
            yield server, another, address


def test_unconfirmed_answers_of_a_member_are_bounded(tmp_path: Path) -> None:
    with served_elsewhere(tmp_path) as (server, another, address), Member(address, run_key(tmp_path)) as member:
        member.hello()
        member.hear()
        member.send(2, cmd.GetStatus())
        size = len(encode(member.hear().reply))
        before = resident(server.pid)
        # when a member asks for 400 MB, and confirms no answer
        for seq in range(3, (400 << 20) // size):
            member.send(seq, cmd.GetStatus())
        # then its session ends, with the reason
        errors = [str(answer.error) for answer in member.heard() if answer.error]
        assert "it was ended: it left too many answers unconfirmed" in errors[0]
        # and the server has little of it, and the others go on
        assert resident(server.pid) - before < 200 << 20
        assert len(another.queue.status().sessions) == 2


def test_uploads_that_never_end_are_bounded(tmp_path: Path) -> None:
    with served_elsewhere(tmp_path) as (server, _, address), Member(address, run_key(tmp_path)) as member:
        member.hello()
        member.hear()
        before = resident(server.pid)
        # when a member begins uploads with bodies of 63 MB, and leaves out the last piece of each
        sizes = (63 << 20, 0)
        for seq in range(2, 8):
            member.send_body(seq, b"", part=Offer(sizes))
            for start in range(0, 62 << 20, 1 << 20):
                member.send_body(seq, b"", part=Piece(start, sizes), data=bytes(1 << 20))
        member.send(8, None)
        while not member.hear_message().body:
            pass
        # then one of them lies in the server's memory, and others are not held up
        with af.connect(address, shared_memory=False) as remote:
            remote.queue.put({"x": np.zeros((3, 1 << 20), np.uint8)})
        assert resident(server.pid) - before < 100 << 20


def test_payload_that_never_ends_is_bounded(tmp_path: Path) -> None:
    with served_elsewhere(tmp_path) as (server, _, address), Member(address, run_key(tmp_path)) as member:
        member.hello()
        member.hear()
        before = resident(server.pid)
        # when a member begins puts with payload of 40 MB, and leaves out the last piece of each
        body = encode(Call(cmd.AddRows(1, 1, {}), payload=1))
        sizes = (len(body), 40 << 20)
        last = sum(sizes) - (1 << 20)
        for seq in range(2, 26):
            member.send_body(seq, b"", part=Offer(sizes))
        seq, asked = 26, True
        while asked:  # for a piece before the last answer of the server
            asked = False
            member.send(seq, None)
            while not (message := member.hear_message()).body:
                assert isinstance(message.part, Read)
                for start in message.part.starts:
                    asked = True
                    data = body if start == 0 else bytes(1 << 20)
                    if start < last:
                        member.send_body(message.seq, b"", part=Piece(start, sizes), data=data)
            seq += 1
        # then few of them lie in the server's memory, and others are not held up
        with af.connect(address, shared_memory=False) as remote:
            remote.queue.put({"x": np.zeros((3, 1 << 20), np.uint8)})
        assert resident(server.pid) - before < 250 << 20
