"""What the transport ``dist`` refuses: places it cannot work at, publishers that lie, and strangers at its ports."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from dist_parts import a_receiver, a_sender, fetching, own_sockets, sent_by, transport

from asyncflow_sdk.errors import AsyncFlowError, ConfigError, ProtocolError, WireError
from asyncflow_sdk.interfaces import Host
from asyncflow_sdk.weights.transports import ServiceClient


def test_what_cannot_work_is_refused_with_what_to_use_instead() -> None:
    far = Host(directory=None, name="far", address="10.1.2.3")
    with pytest.raises(ConfigError, match=r"10\.1\.2\.3: .*not encrypted.*insecure=True.*tcp"):
        transport().sender(far)
    with pytest.raises(ConfigError, match="no backend 'mpi'; it has gloo and nccl"):
        transport(backend="mpi")
    with pytest.raises(ConfigError, match="stall_s=0"):
        transport(stall_s=0)
    with pytest.raises(ConfigError, match="nccl: there is no CUDA device.*gloo.*tcp"):
        transport(backend="nccl").sender(Host(directory=None, name="here"))


def test_the_fetching_end_believes_no_publisher() -> None:
    with a_sender() as sender:
        sent = sent_by(sender, 1)
        service, backend, insecure, stall_s, *rest = msgspec.msgpack.decode(sent.where)

        def fetch(where: list[Any]) -> Any:
            with a_receiver() as receiver:
                return receiver.fetch(sent.manifest, msgspec.msgpack.encode(where), timeout_s=30.0)

        for address in ("tcp://10.1.2.3:5", "tcp://[2001:db8::1]:5", "tcp://somewhere:5"):
            fields = [
                address if isinstance(each, str) and each.startswith("tcp://") else each
                for each in msgspec.msgpack.decode(service)
            ]
            with pytest.raises(ConfigError, match="dist at .* not encrypted"):
                fetch([msgspec.msgpack.encode(fields), backend, insecure, stall_s, *rest])
        with pytest.raises(ConfigError, match="nccl: there is no CUDA device"):
            fetch([service, "nccl", insecure, stall_s, *rest])
        with pytest.raises(ConfigError, match="no backend 'rm -rf'"):
            fetch([service, "rm -rf", insecure, stall_s, *rest])
        for wrong in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ProtocolError, match="lets others wait"):
                fetch([service, backend, insecure, wrong, *rest])
        with a_receiver() as receiver:
            other = msgspec.structs.replace(sent.manifest, tensors=())
            with pytest.raises(ProtocolError, match="another manifest of it than its publisher"):
                receiver.fetch(other, sent.where, timeout_s=30.0)
        assert fetch([service, backend, insecure, stall_s, *rest]).moved == sent.manifest.nbytes


def test_who_speaks_nonsense_harms_nobody() -> None:
    others = own_sockets("0A")
    with a_sender() as sender, a_receiver() as receiver, contextlib.ExitStack() as stack:
        sent = sent_by(sender, 1)
        sent.check(receiver.fetch(sent.manifest, sent.where, timeout_s=30.0))
        connections = own_sockets("01")
        # to the service, by who has its key
        client = ServiceClient(msgspec.msgpack.decode(sent.where)[0])
        stack.callback(client.close)
        for body in (
            b"", b"\xc1", b"\x90", *map(msgspec.msgpack.encode, (["join", 1], ["look", 9, []], ["put", 1, "x", b""],
            ["over", 1, "for fun"], ["over", -1, ""], ["leave", 0], ["leave", -1])),
        ):  # fmt: skip
            with contextlib.suppress(AsyncFlowError):
                client.call(body, 30.0)
        # and to every port at which this process listens for it, those of the group too
        ports = {int(local.rpartition(":")[2], 16) for local, _ in own_sockets("0A") - others}
        assert len(ports) >= 2
        for port in ports:
            for junk in (b"", b"x", b"GET / HTTP/1.0\r\n\r\n", bytes(64), b"\xff" * 100_000):
                caller = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                with contextlib.suppress(OSError):
                    caller.sendall(junk)
        for _ in range(2):
            sent.check(receiver.fetch(sent.manifest, sent.where, timeout_s=30.0))
        assert connections <= own_sockets("01"), "the group is still the same"


def test_only_members_of_a_round_write_and_read_on_its_board() -> None:
    with a_sender(gather_s=0.0) as sender, contextlib.ExitStack() as stack:
        sent = sent_by(sender, 1)
        service = msgspec.msgpack.decode(sent.where)[0]
        member, stranger = (ServiceClient(service) for _ in range(2))
        stack.callback(stranger.close)

        def say(client: ServiceClient, *words: Any) -> Any:
            return client.call(msgspec.msgpack.encode(words), 30.0)

        # given a round of a member that comes to no group
        start = say(member, "join", 1, 1, sent.manifest.root, "mute", 3600.0).body
        _, group, rank, names = msgspec.msgpack.decode(start)
        assert names[rank] == "mute"

        # then no stranger has a word in it, and members do not write without end
        for words in (("put", group, "0/1", bytes(64)), ("look", group, ("0/0",))):
            with pytest.raises(ProtocolError, match="no member of round 1"):
                say(stranger, *words)
        with pytest.raises(ProtocolError, match="a group is made with less"):
            say(member, "put", group, "x", bytes(1 << 15))
        with pytest.raises(ProtocolError, match="a board has"):
            say(member, "look", group, ("x",) * 5000)
        for number in range(1000):
            say(member, "put", group, str(number), b"x")
        with pytest.raises(ProtocolError, match="more than"):
            [say(member, "put", group, f"more {number}", b"x") for number in range(100)]

        # and when the member leaves, the round is over, and others are served
        member.close()
        with a_receiver() as receiver:
            sent.check(fetching(receiver, sent)())
        with pytest.raises(WireError, match="that round is over"):
            say(stranger, "put", group, "0/1", bytes(64))


def test_a_member_is_waited_for_until_its_own_deadline() -> None:
    with a_sender(stall_s=3600.0, gather_s=0.0) as sender, a_receiver() as receiver, contextlib.ExitStack() as stack:
        sent = sent_by(sender, 1)
        client = ServiceClient(msgspec.msgpack.decode(sent.where)[0])
        stack.callback(client.close)
        with pytest.raises(ProtocolError, match="mute waits nan s"):
            client.call(msgspec.msgpack.encode(["join", 1, 1, sent.manifest.root, "mute", float("nan")]), 30.0)
        # given one that comes to no group, nor ever closes
        client.call(msgspec.msgpack.encode(["join", 2, 1, sent.manifest.root, "mute", 2.0]), 30.0)
        # then it holds up the others for that long, although an hour is allowed
        sent.check(receiver.fetch(sent.manifest, sent.where, timeout_s=60.0))


def test_memory_is_used_again_only_when_nobody_refers_to_it() -> None:
    with a_sender() as sender, a_receiver() as receiver:
        held: list[Any] = []
        places: set[int] = set()
        for version, hold in enumerate([lambda v: v[3:5].view("<u2"), torch.from_numpy, memoryview, lambda v: v]):
            sent = sent_by(sender, version, chunk=1 << 12, count=3)
            fetched = receiver.fetch(sent.manifest, sent.where, timeout_s=30.0)
            found = {chunk.ctypes.data for chunk in fetched.chunks}
            # then of the last version's three chunks all but the held one are used again
            assert len(found & places) == (2 if version else 0)
            assert all(chunk.flags.writeable for chunk in fetched.chunks)
            places = found
            held.append((hold(fetched.chunks[1]), np.array(fetched.chunks[1])))
            fetched.release()
            del fetched
        for kept, wanted in held:
            start = memoryview(kept.numpy() if isinstance(kept, torch.Tensor) else kept).cast("B")
            assert bytes(wanted).find(bytes(start)) >= 0
