"""Listeners are paused and resumed while peers wait."""

import contextlib
import ctypes
import errno
import socket
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from waiting import in_thread, until
from wire_handlers import client_of, serving

from asyncflow_sdk.wire import connection_limiter, router_sockets, sockets
from asyncflow_sdk.wire.connection_limiter import IPC_BACKLOG, IpcListener

pytestmark = pytest.mark.fast


def knock(address: str) -> socket.socket:
    """Begin to connect over tcp."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    peer = socket.socket()
    peer.setblocking(False)
    assert peer.connect_ex((host, int(port))) in (0, errno.EINPROGRESS)
    return peer


def connected(peer: socket.socket) -> bool:
    try:
        peer.getpeername()
    except OSError:
        return False
    return True


@pytest.fixture
def filters() -> None:
    """Skip the test if this kernel lets only root attach a filter to a socket. Doors over tcp are not held then."""
    ret_0 = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HxxxxxxP", 1, ctypes.addressof(ret_0)))
        except PermissionError as error:
            pytest.skip(f"no socket may have a filter here: {error}")


def test_local_peers_that_libzmq_has_yet_to_accept_hold_up_only_remote_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filters: None
) -> None:
    with serving(f"ipc://{tmp_path}/s", "tcp://127.0.0.1:0", insecure=True) as parrot:
        local, tcp = parrot.server.addresses
        early, there = client_of(local), client_of(tcp)
        assert (early.request(b"x", 60), there.request(b"x", 60)) == (b"x 0", b"x 1")
        # when libzmq is slow to accept a client of this host
        with monkeypatch.context() as slow:
            slow.setattr(connection_limiter, "has_waiting", lambda each: each.family == socket.AF_UNIX)
            slow.setattr(connection_limiter, "_ACCEPT_S", float("inf"))
            late = client_of(local)
            assert late.request(b"y", 60) == b"y 2"
            # then those that are in go on, and a remote peer waits
            peer = knock(tcp)
            assert (early.request(b"z", 60), there.request(b"z", 60)) == (b"z 3", b"z 4")
            assert not connected(peer)
        parrot.server.call(parrot.server.limiter.update)
        until(lambda: connected(peer), "the peer to be let in")
        for each in (peer, early, there, late):
            each.close()


def knock_local(path: Path, peers: list[socket.socket]) -> socket.socket:
    """Connect to a socket file, unless too many wait there already."""
    peers.append(peer := socket.socket(socket.AF_UNIX))
    peer.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        peer.connect(str(path))
    return peer


def test_local_peers_that_leave_at_once_keep_nobody_out(tmp_path: Path) -> None:
    with serving(f"ipc://{tmp_path}/s", "tcp://127.0.0.1:0", insecure=True) as parrot:
        # when many peers connect and leave, some while libzmq has yet to accept others
        for _ in range(400):
            peers: list[socket.socket] = []
            for _ in range(20):
                knock_local(tmp_path / "s", peers)
            for peer in peers:
                peer.close()
        # then a local and a remote client are let in
        for number, address in enumerate(parrot.server.addresses):
            client = client_of(address)
            assert client.request(b"x", 60) == b"x %d" % number
            client.close()


def test_a_socket_that_libzmq_never_accepts_from_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given sockets passed to libzmq that have a waiting peer for ever
    stuck, other = socket.socketpair()
    admit = IpcListener.admit

    def admit_all_but_one(listener: IpcListener) -> socket.socket:
        admit(listener).close()
        return stuck.dup()

    with stuck, other, serving(f"ipc://{tmp_path}/s", "tcp://127.0.0.1:0", insecure=True) as parrot:
        other.send(b"x")
        monkeypatch.setattr(IpcListener, "admit", admit_all_but_one)
        # then one local client after the other is let in, and a remote one
        local, tcp = parrot.server.addresses
        for number, address in enumerate((local, local, tcp)):
            client = client_of(address)
            assert client.request(b"x", 60) == b"x %d" % number
            client.close()


def test_a_crowd_at_one_server_of_a_process_leaves_turns_to_another(tmp_path: Path) -> None:
    # given two servers, of which one always has a local peer waiting
    servers = [router_sockets.RouterSockets([f"ipc://{tmp_path}/{name}"]) for name in "ab"]
    crowd: list[socket.socket] = []
    late = knock_local(tmp_path / "b", [])

    def greeted() -> bool:
        knock_local(tmp_path / "a", crowd)
        for server in servers:
            server.limiter.update()
        with contextlib.suppress(BlockingIOError):
            return bool(late.recv(1))
        return False

    # then the other one's turn comes
    until(greeted, "the peer of the other server to be accepted")
    for each in (late, *crowd, *servers):
        each.close()


def test_remote_peers_have_their_turn_between_rounds_of_local_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a server that admits a local peer, and pauses tcp listeners meanwhile
    changes, peers = list[bool](), list[socket.socket]()
    monkeypatch.setattr(connection_limiter, "_filter_tcp", lambda: changes.append(not changes))
    server = router_sockets.RouterSockets([f"ipc://{tmp_path}/s"])
    knock_local(tmp_path / "s", peers)
    server.limiter.update()
    assert changes == [True]
    # when another one comes, and the first is accepted
    second = knock_local(tmp_path / "s", peers)

    def resumed() -> bool:
        server.limiter.update()
        return len(changes) > 1

    until(resumed, "the tcp listeners to go on")
    # then they go on before the other one is admitted
    with pytest.raises(BlockingIOError):
        second.recv(1)
    for each in (*peers, server):
        each.close()


@pytest.mark.parametrize("taken", ["before the round", "while tcp peers are accepted"])
def test_local_peers_are_admitted_only_with_a_descriptor_for_each(
    taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a server with few descriptors, and too few free ones for all peers that one round may admit
    free, has_waiting = [IPC_BACKLOG if taken == "before the round" else 200], connection_limiter.has_waiting

    def accept_others(listening: socket.socket) -> bool:
        if listening.family == socket.AF_INET:
            free[:] = [min(free[0], IPC_BACKLOG)]
        return has_waiting(listening)

    notes: list[str] = []
    with monkeypatch.context() as small:
        small.setattr(connection_limiter, "descriptor_limit", lambda: 256)
        small.setattr(connection_limiter, "free_descriptors", lambda: free[0])
        small.setattr(connection_limiter, "has_waiting", accept_others)
        with serving(f"ipc://{tmp_path}/s", "tcp://127.0.0.1:0", insecure=True) as parrot:
            parrot.server.limiter.on_note(lambda text, level: notes.append(text))
            # when a local client comes
            client = client_of(parrot.server.addresses[0])
            answer = in_thread(client.request, b"x", 60)
            # then it is refused, until others have left
            until(
                lambda: any("clients of this host are refused" in note for note in notes), "word that it is refused"
            )
            assert not parrot.carried_out
            small.setattr(connection_limiter, "has_waiting", has_waiting)
            free[:] = [200]
            assert answer() == b"x 0"
            client.close()


def test_a_socket_that_cannot_be_watched_takes_no_place_of_another(tmp_path: Path) -> None:
    # given a listener
    watched: list[socket.socket] = []

    def watch(new: socket.socket, events: int) -> None:
        if watched:
            raise OSError(errno.ENOSPC, "the kernel watches no more")
        watched.append(new)

    ready: Any = SimpleNamespace(register=watch, unregister=watched.remove)
    with zmq.Context.instance().socket(zmq.ROUTER) as router, socket.socket(socket.AF_UNIX) as peer:
        listener = IpcListener(router, str(tmp_path / "s"), ready)
        # when its next socket cannot be watched
        with pytest.raises(OSError, match="watches no more"):
            listener.renew()
        # then the former one takes the next peer
        peer.connect(str(tmp_path / "s"))
        until(lambda: connection_limiter.has_waiting(listener.socket), "the peer")
        listener.close()


def test_silent_peers_shut_the_tcp_door_until_they_are_gone(monkeypatch: pytest.MonkeyPatch, filters: None) -> None:
    # given a server that takes three peers that have not authenticated
    monkeypatch.setattr(connection_limiter, "MAX_UNAUTHENTICATED", 3)
    notes: list[str] = []
    with serving("tcp://127.0.0.1:0", insecure=True) as parrot:
        parrot.server.limiter.on_note(lambda text, level: notes.append(text))
        address = parrot.server.addresses[0]
        early = client_of(address)
        early.request(b"x", 60)
        # when more come
        peers = [knock(address) for _ in range(3)]
        until(lambda: len(notes) == 1, "word that the door is shut")
        # then it is shut to others, and who is in stays in
        assert "takes no connections for now: 3 peers have connected and not authenticated" in notes[0]
        late = knock(address)
        assert early.request(b"y", 60) == b"y 1"
        assert not connected(late)
        # when they leave
        for peer in peers:
            peer.close()
        until(lambda: connected(late) and len(notes) == 2, "the next to be let in, and word of it")
        assert "takes connections again" in notes[1]
        for each in (late, early):
            each.close()


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_silent_peer_is_disconnected(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (router_sockets, sockets):
        monkeypatch.setattr(module, "GIVE_UP_MS", 200)
    with serving(f"ipc://{tmp_path}/s" if kind == "ipc" else "tcp://127.0.0.1:0", insecure=kind == "tcp") as parrot:
        address = parrot.server.addresses[0]
        with socket.socket(socket.AF_UNIX if kind == "ipc" else socket.AF_INET) as peer:
            peer.settimeout(60)
            if kind == "ipc":
                peer.connect(address.removeprefix("ipc://"))
            else:
                host, _, port = address.removeprefix("tcp://").rpartition(":")
                peer.connect((host, int(port)))
            with contextlib.suppress(ConnectionError):  # it may be disconnected before it has said anything
                peer.sendall(b"\xff" + bytes(8) + b"\x7f")  # how a greeting begins
                while peer.recv(1024):
                    pass
