"""No number of peers ends a server: it keeps descriptors for its own work, says why it lets nobody in, and goes on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from children import Child, hear, say
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ServerLost, WireError
from asyncflow_sdk.types.events import Event, Note
from asyncflow_sdk.wire.processes import raise_limit

LIMIT = 400
NULL_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
NULL_HANDSHAKE = NULL_GREETING + b"\x04" + bytes([len(READY)]) + READY
"""What a peer without keys sends before its first message."""


def serve_with_few(directory: str, limit: int = LIMIT, keyed: bool = True) -> None:
    """Serve a run with few file descriptors. Say its addresses and how many that are, then each note."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit // 2, limit))
    options: dict[str, Any] = {"key": f"{directory}/server.key"} if keyed else {"insecure": True}

    def tell(event: Event) -> None:
        if isinstance(event, Note):
            say(event.text)

    with af.serve(directory, address="tcp://127.0.0.1:0", on_event=tell, **options) as run:
        say([*run.addresses, resource.getrlimit(resource.RLIMIT_NOFILE)[0]])
        hear()


def note_of(child: Any, part: str) -> str:
    """The next note of the child with ``part`` in it."""
    while part not in (text := child.hear()):
        pass
    return str(text)


def descriptors(pid: int, kind: str = "") -> int:
    """How many descriptors a process has that lead to something of a kind."""
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            count += kind in os.readlink(link)
    return count


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Any]:
    with Child(serve_with_few, str(tmp_path)) as child:
        child.ipc, child.tcp, limit = child.hear()[-3:]
        assert limit == LIMIT, "the soft limit is raised where a run is served"
        yield child


def test_crowds_are_refused_until_some_of_them_leave_and_nothing_else_is(child: Any, tmp_path: Path) -> None:
    # given
    path = child.ipc.removeprefix("ipc://")
    host, _, port = child.tcp.removeprefix("tcp://").rpartition(":")
    with contextlib.ExitStack() as peers, af.connect(tmp_path, timeout_s=60) as early:
        # when more peers come over tcp than the server has descriptors, and say nothing
        for _ in range(LIMIT + 100):
            peer = peers.enter_context(socket.socket())
            peer.setblocking(False)
            peer.connect_ex((host, int(port)))
        # then it says that it takes no more of them
        note = note_of(child, "takes no connections for now")
        assert "not authenticated" in note or "descriptors are free" in note
        # and a client of this host is let in
        with af.connect(tmp_path, timeout_s=60) as run:
            assert run.queue.audit().put == 0
        # and once they are gone, one with a key
        peers.close()
        note_of(child, "takes connections again")
        with af.connect(child.tcp, key=tmp_path / "run.key", timeout_s=60) as run:
            assert run.queue.audit().put == 0
        # when as many come on this host, and are connected as the threads of many clients are
        for _ in range(LIMIT + 100):
            peer = peers.enter_context(socket.socket(socket.AF_UNIX))
            peer.connect(path)
            with contextlib.suppress(OSError):  # where the server has refused
                peer.sendall(NULL_HANDSHAKE)
        note_of(child, "clients of this host are refused for now")
        # then a new client is told why
        with pytest.raises(
            ServerLost, match=r"cut \d+ connections during the handshake: is it short of file descriptors"
        ):
            told_why(tmp_path)
        # and the one that was there before goes on
        assert early.queue.audit().put == 0
        # when some leave while another one waits
        late = in_thread(af.connect, tmp_path, timeout_s=60)
        peers.close()
        # then that one is let in
        run = late()
        assert run.queue.audit().put == 0
        run.close()


@pytest.fixture
def filters() -> None:
    """Skip the test if this kernel lets only root attach a filter to a socket."""
    ret_0 = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HxxxxxxP", 1, ctypes.addressof(ret_0)))
        except PermissionError as error:
            pytest.skip(f"no socket may have a filter here: {error}")


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "insecure"])
@pytest.mark.parametrize("limit", [1024, 4096])
def test_idle_peers_leave_descriptors_for_local_clients(
    limit: int, keyed: bool, tmp_path: Path, filters: None
) -> None:
    raise_limit()
    with Child(serve_with_few, str(tmp_path), limit, keyed) as child, contextlib.ExitStack() as peers:
        host, _, port = child.hear()[-2].removeprefix("tcp://").rpartition(":")
        early, crowd = peers.enter_context(af.connect(tmp_path, timeout_s=60)), []
        # when 1,100 peers come and say nothing, without keys: nothing more than who they are
        for _ in range(22):
            for _ in range(50):
                crowd.append(peer := peers.enter_context(socket.socket()))
                peer.setblocking(False)
                peer.connect_ex((host, int(port)))
            # then those that are in go on
            assert early.queue.audit().put == 0
            crowd = [] if keyed else [peer for peer in crowd if not sent(peer, NULL_HANDSHAKE)]
        # and clients of this host are let in
        for _ in range(3):
            with af.connect(tmp_path, timeout_s=60) as run:
                assert run.queue.audit().put == 0
        # and the server keeps descriptors for its own work
        until(lambda: descriptors(child.pid) <= limit - limit // 16, "descriptors to be free")


def sent(peer: socket.socket, data: bytes) -> bool:
    """Send if the peer is connected by now."""
    with contextlib.suppress(OSError):
        return peer.send(data) == len(data)
    return False


def told_why(directory: Path) -> None:
    """Try to connect; wait longer while the server has no time to answer at all."""
    for timeout_s in (0.5, 2.0, 8.0, 32.0):
        try:
            af.connect(directory, timeout_s=timeout_s)
        except ServerLost as error:
            if "cut" in str(error) or timeout_s == 32.0:
                raise


def test_clients_of_one_process_share_a_descriptor_and_leave_none_behind(child: Any, tmp_path: Path) -> None:
    with af.connect(tmp_path, timeout_s=60) as stays:
        before, watched = descriptors(child.pid, "socket:"), descriptors(child.pid, "pidfd")
        assert watched == 1, "the one by which the end of this process is seen"
        with contextlib.ExitStack() as clients:
            for _ in range(10):
                clients.enter_context(af.connect(tmp_path, timeout_s=60))
            assert descriptors(child.pid, "pidfd") == watched
        until(lambda: descriptors(child.pid, "socket:") <= before, "their sockets to be closed")
        # and those that stay keep the connection they have
        assert stays.queue.audit().put == 0


def test_a_session_too_many_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncflow_sdk.wire.request_table.MOST_SESSIONS", 3)
    with af.serve() as run, af.connect(run.address) as first, af.connect(run.address):
        with pytest.raises(WireError, match="this run has 3 sessions, the most it can have: close unneeded clients"):
            af.connect(run.address)
        # when one leaves
        first.close()
        # then there is room
        af.connect(run.address).close()
