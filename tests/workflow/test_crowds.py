"""No number of peers ends a server: it keeps descriptors for its own work, says why it lets nobody in, and goes on."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from children import Child
from crowd_children import NULL_HANDSHAKE, knock, note_of, open_descriptors, serve_with_few
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk import __version__
from asyncflow_sdk.errors import ServerLost, WireError
from asyncflow_sdk.queue import QueueServer
from asyncflow_sdk.queue import server as queue_server
from asyncflow_sdk.queue.connection import Connection
from asyncflow_sdk.queue.protocol import Answer, Call, Hello, Welcome, decode_answer, encode
from asyncflow_sdk.wire import RunKey, process_key
from asyncflow_sdk.wire import sockets as wire_sockets
from asyncflow_sdk.wire.envelope import PROTOCOL, Request, decode_response
from asyncflow_sdk.wire.envelope import encode as encode_request

LIMIT = 1024


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Any]:
    with Child(serve_with_few, str(tmp_path), LIMIT, LIMIT) as child:
        yield child


def served_at(child: Any) -> tuple[str, str]:
    """The addresses of a child's run: its socket file, and tcp."""
    (_, ipc, tcp), _ = child.hear()
    return ipc.removeprefix("ipc://"), tcp


def test_the_soft_limit_is_raised_where_a_run_is_served(tmp_path: Path) -> None:
    with Child(serve_with_few, str(tmp_path), 200, LIMIT) as child:
        assert child.hear()[1] == LIMIT


def test_idle_connections_without_a_key_shut_the_port_and_nothing_else(child: Any, tmp_path: Path) -> None:
    # given
    _, tcp = served_at(child)
    # when more peers come than the server has descriptors, and say nothing
    with contextlib.ExitStack() as peers:
        for peer in knock(tcp, LIMIT + 200):
            peers.enter_context(peer)
        # then it says that it takes no more of them
        note = note_of(child, "takes no connections for now")
        assert "not authenticated" in note or "descriptors are free" in note
        # and a client of this host is let in
        with af.connect(tmp_path, timeout_s=60) as run:
            assert run.queue.audit().put == 0
    # and once they are gone, one with a key
    note_of(child, "takes connections again")
    with af.connect(tcp, key=tmp_path / "run.key", timeout_s=60) as run:
        assert run.queue.audit().put == 0


def test_a_crowd_on_this_host_is_refused_until_some_of_it_leaves(child: Any, tmp_path: Path) -> None:
    # given peers that are connected, as the threads of many clients are, and a client among them
    path, _ = served_at(child)
    with contextlib.ExitStack() as peers, af.connect(tmp_path, timeout_s=60) as early:
        for _ in range(LIMIT + 200):
            peer = peers.enter_context(socket.socket(socket.AF_UNIX))
            peer.connect(path)
            with_handshake(peer)
        note_of(child, "clients of this host are refused for now")
        # then a new client is told why
        with pytest.raises(
            ServerLost, match=r"cut \d+ connections as they were made: is it short of file descriptors"
        ):
            told_why(f"ipc://{path}")
        # and the one that was there before goes on
        assert early.queue.audit().put == 0
        # when some leave while another one waits
        late = in_thread(af.connect, tmp_path, timeout_s=60)
        peers.close()
        # then that one is let in
        run = late()
        assert run.queue.audit().put == 0
        run.close()


def with_handshake(peer: socket.socket) -> None:
    """Finish the handshake, where the server has not refused: a peer that does not is disconnected after a while."""
    try:
        peer.sendall(NULL_HANDSHAKE)
    except OSError:
        peer.close()


def told_why(address: str) -> None:
    """Try to connect; wait longer while the server has no time to answer at all."""
    for timeout_s in (0.5, 2.0, 8.0, 32.0):
        try:
            Connection(address, "late", timeout_s=timeout_s)
        except ServerLost as error:
            if "cut" in str(error) or timeout_s == 32.0:
                raise


def test_hellos_that_name_one_process_take_one_descriptor(child: Any, tmp_path: Path) -> None:
    # given a holder of the key
    _, tcp = served_at(child)
    key, pid = RunKey.load(tmp_path / "run.key"), os.getpid()
    hello = encode(Call(Hello("one of many", pid, process_key(pid), __version__)))
    with zmq.Context.instance().socket(zmq.DEALER) as dealer:
        wire_sockets.connect(dealer, tcp, key)
        dealer.send(encode_request(Request(PROTOCOL, "first", 1, 1, (), (), hello)))
        assert dealer.poll(60_000)
        before, answers = open_descriptors(child), list[Answer]()
        # when it says hello for as many sessions as there are descriptors, all of one process that lives
        for number in range(LIMIT + 200):
            dealer.send(encode_request(Request(PROTOCOL, f"s{number}", 1, 1, (), (), hello)))
        for _ in range(LIMIT + 200 + 1):
            assert dealer.poll(60_000)
            answers.append(decode_answer(decode_response(dealer.recv()).body))
        assert all(isinstance(answer.reply, Welcome) for answer in answers)
        # then they share the descriptor by which its end is seen
        assert open_descriptors(child) <= before + 5
    with af.connect(tmp_path, timeout_s=60) as run:
        assert run.queue.audit().put == 0


def test_a_session_too_many_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_server, "MOST_SESSIONS", 2)
    server = QueueServer([])
    try:
        first, second = (Connection(server.addresses[1], name) for name in ("first", "second"))
        with pytest.raises(WireError, match="this run has 2 sessions, and takes no more: close clients"):
            Connection(server.addresses[1], "third")
        # when one leaves
        first.close()
        # then there is room
        Connection(server.addresses[1], "third").close()
        second.close()
    finally:
        server.close()


def test_clients_that_come_and_go_leave_no_listening_socket_behind() -> None:
    server = QueueServer([])
    try:
        stays = Connection(server.addresses[1], "stays")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(30):
            Connection(server.addresses[1], "goes").close()
        until(lambda: len(os.listdir("/proc/self/fd")) <= before + 10, "their descriptors to be closed")
        # and those that stay keep the connection they have
        stays.answered(stays.wire.exchange(stays.call(None), 30))
        assert len(server._wire._sessions[stays.wire.session].heard) == 1
        stays.close()
    finally:
        server.close()
