"""Every tcp socket has keys: the user of a run finds them on its host, and nobody else gets a row or a weight."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from children import Child
from key_children import count_rows, try_as_another_user
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import AccessDenied
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.memory import SharedDirectory
from asyncflow_sdk.queue.protocol import Call, Hello
from asyncflow_sdk.queue.protocol import encode as encode_call
from asyncflow_sdk.testing.ends import Ends, Sent
from asyncflow_sdk.weights.tcp import TcpTransport
from asyncflow_sdk.weights.tcp_messages import TcpWhere
from asyncflow_sdk.wire import RunKey, fresh_keys, offer_key
from asyncflow_sdk.wire.envelope import PROTOCOL, Request, encode
from asyncflow_sdk.wire.known_keys import FILE, find_key

CUT_OFF = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


@pytest.mark.parametrize(
    ("address", "directory"),
    [("tcp://127.0.0.1:0", True), ("tcp://127.0.0.1:0", False), ("tcp://[::1]:0", False), ("tcp://0.0.0.0:0", True)],
)
def test_the_user_of_a_run_connects_with_its_address_alone(address: str, directory: bool, tmp_path: Path) -> None:
    with af.serve(tmp_path / "run" if directory else None, address=address) as run:
        run.queue.put({"x": np.arange(3.0)})
        port = run.address.rpartition(":")[2]
        if directory:
            assert stat.S_IMODE((tmp_path / "run" / "run.key").stat().st_mode) == 0o600
        for known in [
            run.address.replace("0.0.0.0", "127.0.0.1"),
            *([] if "[" in address else [f"tcp://localhost:{port}"]),
        ]:
            # when another process of this user comes, or a thread of this one
            with Child(count_rows, known) as child:
                assert child.hear() == 3
            with af.connect(known, shared_memory=False) as other:
                assert other.queue.audit().put == 3
    # and the key is offered no longer than it is served
    assert find_key(known) is None


def test_a_raw_client_without_a_key_leases_nothing(tmp_path: Path) -> None:
    with af.serve(tmp_path / "run", address="tcp://127.0.0.1:0") as run:
        run.queue.declare("work", needs=["x"])
        run.queue.put({"x": np.arange(3.0)})
        # given a client that speaks ZeroMQ and the SDK's protocol, and has no key
        raw = zmq.Context.instance().socket(zmq.DEALER)
        raw.linger = 0
        monitor = raw.get_monitor_socket(CUT_OFF)
        raw.connect(run.address)
        for seq, command in enumerate((Hello("thief", 0, "", af.__version__), cmd.Lease(task="work", count=3)), 1):
            raw.send(encode(Request(PROTOCOL, "s", seq, 1, (), (), encode_call(Call(command, inline=True)))))
        # when it is cut off, in the handshake
        assert monitor.poll(60_000), "it was not cut off"
        # then it has no session, no answer and no row
        assert [each.name for each in run.queue.status().sessions] == ["driver"]
        assert not raw.poll(0)
        assert len(run.queue.get("work", 3, at_least=3, timeout_s=30).ids) == 3
        raw.disable_monitor()
        raw.close()
        # and a client of ours is told why
        with pytest.raises(AccessDenied, match="needs a key"):
            af.connect(run.address, insecure=True)


@contextlib.contextmanager
def published() -> Iterator[tuple[Ends, Sent]]:
    """A version at a publisher on loopback."""
    with Ends(TcpTransport, TcpTransport) as ends:
        sent = ends.publish(1, {"w": np.arange(1000.0)})
        ends.keep(1)
        yield ends, sent


def test_weights_on_loopback_have_keys() -> None:
    with published() as (ends, sent):
        place = msgspec.msgpack.decode(sent.where, type=TcpWhere)
        address, key, *process = msgspec.msgpack.decode(place.service)
        assert address.startswith("tcp://127.0.0.1:")
        assert key is not None
        # when they are fetched by somebody who knows all but the key, and does not reach the socket file
        service = msgspec.msgpack.encode((address, None, *process))
        without = msgspec.msgpack.encode(msgspec.structs.replace(place, service=service, bulk=None))
        with pytest.raises(AccessDenied, match="needs a key"):
            ends.fetch(ends.receiver(), sent, where=without)
        # then whoever has the key gets them
        sent.check(ends.fetch(ends.receiver(), sent))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter, whose umask would let them read what is made there."""
    before = os.umask(0)
    folder = Path(tempfile.mkdtemp(prefix="asyncflow-test-"))
    folder.chmod(0o777)
    yield folder
    os.umask(before)
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_host_gets_no_row_and_no_weight(open_folder: Path) -> None:
    # given
    with af.serve(open_folder / "run", address="tcp://127.0.0.1:0") as run, published() as (_, sent):
        run.queue.put({"x": np.arange(3.0)})
        # when
        with Child(try_as_another_user, run.address, str(open_folder / "run"), sent.where.hex()) as child:
            found = child.hear()
    # then
    assert found == {
        "connect": "AccessDenied",
        "connect without a key": "AccessDenied",
        "connect to the directory": "ConfigError",
        "read the key": "PermissionError",
        "call the weights without a key": "AccessDenied",
        "open the weights' socket file": "PermissionError",
    }


# ---- finding keys


@pytest.fixture
def port() -> Iterator[int]:
    """A port that is nobody else's: keys are offered to all processes of a user."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        yield holder.getsockname()[1]


@contextlib.contextmanager
def offered(*addresses: str, bound: bool = True, **options: Any) -> Iterator[tuple[SharedDirectory, RunKey]]:
    """The directory of a server that offers a key, and the key."""
    directory, key = SharedDirectory(**options), fresh_keys().run
    offer_key(directory.path, addresses, key, bound=bound)
    try:
        yield directory, key
    finally:
        directory.close()


@pytest.mark.parametrize(
    ("asked", "offer"),
    [
        ("tcp://127.0.0.1", "tcp://127.0.0.1"),
        ("tcp://localhost", "tcp://127.0.0.1"),
        ("tcp://127.0.0.1", "tcp://0.0.0.0"),
        ("tcp://127.0.0.2", "tcp://*"),
        ("tcp://[::1]", "tcp://[::]"),
    ],
)
def test_the_key_of_an_address_is_found(asked: str, offer: str, port: int) -> None:
    with offered("inproc://x", "ipc:///x", "tcp://127.0.0.1:1"), offered(f"{offer}:{port}") as (_, key):
        assert find_key(f"{asked}:{port}") == key


def test_the_key_of_another_address_is_not(port: int) -> None:
    with offered(f"tcp://127.0.0.1:{port}"):
        for other in (f"tcp://127.0.0.1:{port - 1}", f"tcp://127.0.0.2:{port}", f"tcp://192.0.2.1:{port}"):
            assert find_key(other) is None
    with offered(f"tcp://0.0.0.0:{port}"):
        assert find_key(f"tcp://192.0.2.1:{port}") is None


def test_the_server_that_listens_is_preferred(port: int, tmp_path: Path) -> None:
    # given servers that died: one kept nothing, another's run may be continued
    address = f"tcp://127.0.0.1:{port}"
    (journal := tmp_path / "journal").mkdir()
    with offered(address, journal=journal) as (kept, of_journal), offered(address) as (gone, _):
        for each in (kept, gone):
            fcntl.flock(each._lock, fcntl.LOCK_UN)
        assert find_key(address) == of_journal
        # when one is about to listen, and another does
        with offered(address, bound=False) as (_, starting):
            assert find_key(address) == starting
            with offered(address) as (_, listening):
                assert find_key(address) == listening


def test_an_offer_that_is_none_or_of_another_network_is_passed_over(port: int) -> None:
    address = f"tcp://127.0.0.1:{port}"
    with offered(address) as (directory, key):
        file = directory.path / FILE
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        text = file.read_text()
        for other in ("", "{}", text[:-9], text.replace("net:", "another:")):
            file.write_text(other)
            assert find_key(address) is None
        file.write_text(text)
        assert find_key(address) == key
        offer_key(directory.path, [], None, bound=True)
        assert find_key(address) is None


def test_a_server_of_another_user_is_told_at_once_and_one_that_starts_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(AccessDenied, match=r"no server of this user.*pass key=.*or insecure=True"):
            af.connect(address, timeout_s=3600.0)
    # when nobody listens there, and a run is served later
    joined = in_thread(af.connect, address, timeout_s=60.0)
    with af.serve(address=address) as run:
        with joined() as other:
            assert other.queue.audit().put == 0
        until(lambda: run.queue.status().session_count == 1, "its leave")
