"""What the transport ``dist`` refuses: places it cannot work at, publishers that lie, and words of those who have none."""

from __future__ import annotations

import contextlib
import gc
import socket
from typing import Any

import msgspec
import pytest
from dist_children import content, listening
from dist_ends import HERE, Gate, a_receiver, a_sender, fetching, sent_by, until

from asyncflow_sdk.errors import (
    AsyncFlowError,
    ConfigError,
    ProtocolError,
    WireError,
)
from asyncflow_sdk.interfaces import Host
from asyncflow_sdk.weights.service import Where as Reached
from asyncflow_torch import dist_board, dist_receiver, dist_words
from asyncflow_torch.transport_dist import DistTransport


def test_what_cannot_work_is_refused_with_what_to_use_instead() -> None:
    far = Host(directory=None, name="far", address="10.1.2.3")
    with pytest.raises(ConfigError, match=r"10\.1\.2\.3: .*not encrypted.*insecure=True.*tcp"):
        DistTransport().sender(far)
    with pytest.raises(ConfigError, match="no backend 'mpi'; it has gloo and nccl"):
        DistTransport("mpi")
    with pytest.raises(ConfigError, match="stall_s=0"):
        DistTransport(stall_s=0)
    with pytest.raises(ConfigError, match="nccl: there is no CUDA device.*gloo.*tcp"):
        DistTransport("nccl").sender(HERE)


def test_the_fetching_end_believes_no_publisher() -> None:
    with a_sender(gather_s=0.0) as sender:
        sent = sent_by(sender, 1)
        where = msgspec.msgpack.decode(sent.where, type=dist_words.Where)

        def fetch(**changes: Any) -> Any:
            receiver = DistTransport().receiver(HERE)
            raw = msgspec.msgpack.encode(msgspec.structs.replace(where, **changes))
            try:
                return receiver.fetch(sent.manifest, raw, timeout_s=30.0)
            finally:
                receiver.close()

        service = msgspec.msgpack.decode(where.service, type=Reached)
        for address in ("tcp://10.1.2.3:5", "tcp://[2001:db8::1]:5", "tcp://somewhere:5"):
            far = msgspec.structs.replace(service, address=address)
            with pytest.raises(ConfigError, match="dist at .* not encrypted"):
                fetch(service=msgspec.msgpack.encode(far))
        with pytest.raises(ConfigError, match="nccl: there is no CUDA device"):
            fetch(backend="nccl")
        with pytest.raises(ConfigError, match="no backend 'rm -rf'"):
            fetch(backend="rm -rf")
        for stall_s in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ProtocolError, match="lets others wait"):
                fetch(stall_s=stall_s)
        other = msgspec.structs.replace(sent.manifest, tensors=())
        receiver = DistTransport().receiver(HERE)
        with pytest.raises(ProtocolError, match="trainer has another manifest"):
            receiver.fetch(other, sent.where, timeout_s=30.0)
        receiver.close()
        assert fetch().moved == sent.manifest.nbytes


def test_who_speaks_nonsense_harms_nobody() -> None:
    gc.collect()  # errors of tests before may still refer to groups
    others = {port for _, port in listening()}
    with a_sender(gather_s=0.0) as sender, a_receiver() as receiver:
        sent = sent_by(sender, 1)
        receiver.fetch(sent.manifest, sent.where, timeout_s=30.0)
        # to the service
        link = receiver._link(sent.where)
        for body in (
            b"", b"\xc1", b"\x90", *map(msgspec.msgpack.encode, (["join", 1], ["look", 9, []], ["put", 1, "x", b""],
            ["over", 1, "for fun"], ["over", -1, ""], ["leave", 0], ["leave", -1])),
        ):  # fmt: skip
            with contextlib.suppress(AsyncFlowError):
                link._client.call(body, 30.0)
        # and to every port at which this process listens, those of the group too
        ports = {port for _, port in listening()} - others
        assert len(ports) == 3
        with contextlib.ExitStack() as stack:
            for port in ports:
                for junk in (b"", b"x", b"GET / HTTP/1.0\r\n\r\n", bytes(64), b"\xff" * 100_000):
                    caller = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                    with contextlib.suppress(OSError):
                        caller.sendall(junk)
            for _ in range(2):
                assert content(receiver.fetch(sent.manifest, sent.where, timeout_s=30.0).chunks) == sent.content
        assert sender._rounds._groups == 1


def test_only_members_of_a_round_write_and_read_on_its_board(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_sender(gather_s=0.0, stall_s=30.0) as sender, a_receiver() as receiver, a_receiver("stranger") as other:
        sent = sent_by(sender, 1)
        middle = Gate(monkeypatch, dist_receiver, "Group")
        fetch = fetching(receiver, sent)
        middle.wait()
        # given a group that is being made
        group, stranger, member = sender._rounds._groups, other._link(sent.where), receiver._link(sent.where)
        for word in (dist_words.Put(group, "0/1", bytes(64)), dist_words.Look(group, ("0/0",))):
            with pytest.raises(ProtocolError, match="no member of round 1"):
                stranger._client.call(dist_words.encode(word), 30.0)
        # nor do members write without end
        with pytest.raises(ProtocolError, match="a group is made with less"):
            member._client.call(dist_words.encode(dist_words.Put(group, "x", bytes(1 << 15))), 30.0)
        with pytest.raises(ProtocolError, match="a board has"):
            member._client.call(dist_words.encode(dist_words.Look(group, ("x",) * 5000)), 30.0)
        # then it is made, and when its round is over, nobody has a word in it
        middle.open()
        assert content(fetch().chunks) == sent.content
        until(sender, lambda: sender._rounds._round is None)
        for link in (stranger, member):
            with pytest.raises(WireError, match="that round is over"):
                link._client.call(dist_words.encode(dist_words.Put(group, "0/1", bytes(64))), 30.0)


def test_a_board_has_room_for_so_many_words() -> None:
    board = dist_board.Board()
    for number in range(dist_board.MAX_KEYS):
        board.put(str(number), b"x")
    board.put("0", b"y")
    with pytest.raises(ProtocolError, match="more than"):
        board.put("one more", b"x")
