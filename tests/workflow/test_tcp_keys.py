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

import numpy as np
import pytest
import zmq
from children import Child, say
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import AccessDenied, AsyncFlowError, ServerLost
from asyncflow_sdk.memory import SharedDirectory
from asyncflow_sdk.wire import RunKey, await_key, generate_keys, offer_key

NOBODY = 65534
CUT_OFF = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


def listening() -> set[str]:
    """Where this process listens on loopback."""
    own = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(link).removeprefix("socket:[").rstrip("]"))
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    ports = [line[1].partition(":")[2] for line in lines if line[9] in own and line[3] == "0A"]
    return {f"tcp://127.0.0.1:{int(port, 16)}" for port in ports}


def is_cut_off(address: str) -> bool:
    """True if a client that speaks ZeroMQ and has no key is cut off in the handshake; it is given no answer."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 0
        with raw.get_monitor_socket(CUT_OFF) as monitor:
            raw.connect(address)
            raw.send(b"a request")
            cut = bool(monitor.poll(60_000)) and not raw.poll(0)
            raw.disable_monitor()
        return cut


def count_rows(address: str) -> None:
    """In a process of its own: connect with the address alone, and say how many rows were put."""
    with af.connect(address) as run:
        say(run.queue.audit().put)


def try_as_another_user(address: str, directory: str, weights: str, file: str) -> None:
    """As the user nobody: say what came of each way to the run's rows and weights."""
    connect, _ = af.connect, "x".encode("idna")  # what loads lazily, from files that the other user may not see
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    found = {"call the weights without a key": "it is cut off" if is_cut_off(weights) else "it worked"}
    for name, attempt in {
        "connect": lambda: connect(address, timeout_s=20.0),
        "connect without a key": lambda: connect(address, timeout_s=20.0, insecure=True),
        "connect to the directory": lambda: connect(directory, timeout_s=1.0),
        "read the key": lambda: Path(directory, "run.key").read_bytes(),
        "open a socket file": lambda: os.stat(file),
    }.items():
        try:
            attempt()
            found[name] = "it worked"
        except (AsyncFlowError, OSError) as error:
            found[name] = type(error).__name__
    say(found)


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
    assert key_of(known) is None


def key_of(address: str) -> RunKey | None:
    """The key that a client of this user finds."""
    try:
        return await_key(address, 0.0)
    except (AccessDenied, ServerLost):
        return None


def test_a_raw_client_without_a_key_leases_nothing_and_gets_no_weight(tmp_path: Path) -> None:
    before = listening()
    with af.serve(tmp_path / "run", address="tcp://127.0.0.1:0") as run, run.weight_publisher("tcp") as publisher:
        run.queue.declare("work", needs=["x"])
        run.queue.put({"x": np.arange(3.0)})
        publisher.publish(0, {"w": np.arange(1000.0)})
        assert len(listening() - before) == 2, "one for rows, one for weights"
        # when clients that speak ZeroMQ have no key, then they are cut off
        for address in listening() - before:
            assert is_cut_off(address)
        # and have no session and no row
        assert [each.name for each in run.queue.status().sessions] == ["driver"]
        assert len(run.queue.get("work", 3, at_least=3, timeout_s=30).ids) == 3
        # and a client of ours is told why
        with pytest.raises(AccessDenied, match="needs a key"):
            af.connect(run.address, insecure=True)
        # while who has the key gets the weights
        with af.connect(run.address, shared_memory=False) as other:
            with next(iter(other.weight_updates(timeout_s=60))) as update:
                assert [array.sum() for _, array in update.arrays()] == [499500.0]


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
    before = listening()
    with af.serve(open_folder / "run", address="tcp://127.0.0.1:0") as run, run.weight_publisher("tcp") as publisher:
        run.queue.put({"x": np.arange(3.0)})
        publisher.publish(0, {"w": np.arange(1000.0)})
        (weights,) = listening() - before - {run.address}
        directory = run.queue.connection.directory
        assert directory is not None
        assert (directory / "queue").is_socket()
        # when
        ways = [run.address, str(open_folder / "run"), weights, str(directory / "queue")]
        with Child(try_as_another_user, *ways) as child:
            found = child.hear()
    # then
    assert found == {
        "connect": "AccessDenied",
        "connect without a key": "AccessDenied",
        "connect to the directory": "ConfigError",
        "read the key": "PermissionError",
        "call the weights without a key": "it is cut off",
        "open a socket file": "PermissionError",
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
    directory, key = SharedDirectory(**options), generate_keys().run
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
        assert key_of(f"{asked}:{port}") == key


def test_the_key_of_another_address_is_not(port: int) -> None:
    with offered(f"tcp://127.0.0.1:{port}"):
        for other in (f"tcp://127.0.0.1:{port - 1}", f"tcp://127.0.0.2:{port}", f"tcp://192.0.2.1:{port}"):
            assert key_of(other) is None
    with offered(f"tcp://0.0.0.0:{port}"):
        assert key_of(f"tcp://192.0.2.1:{port}") is None


def unlock(*directories: Path) -> None:
    """Give up the locks of servers' directories, as the end of a process does."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if Path(os.readlink(link)).parent in directories or Path(os.readlink(link)) in directories:
                fcntl.flock(int(link.name), fcntl.LOCK_UN)


def test_the_server_that_listens_is_preferred(port: int, tmp_path: Path) -> None:
    # given servers that died: one kept nothing, another's run may be continued
    address = f"tcp://127.0.0.1:{port}"
    (journal := tmp_path / "journal").mkdir()
    with offered(address, journal=journal) as (kept, of_journal), offered(address) as (gone, _):
        unlock(kept.path, gone.path)
        assert key_of(address) == of_journal
        # when one is about to listen, and another does
        with offered(address, bound=False) as (_, starting):
            assert key_of(address) == starting
            with offered(address) as (_, listening):
                assert key_of(address) == listening


def test_an_offer_that_is_none_or_of_another_network_is_passed_over(port: int) -> None:
    address = f"tcp://127.0.0.1:{port}"
    with offered(address) as (directory, key):
        (file,) = [each for each in directory.path.iterdir() if "key" in each.name]
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        text = file.read_text()
        for other in ("", "{}", text[:-9], text.replace("net:", "another:")):
            file.write_text(other)
            assert key_of(address) is None
        file.write_text(text)
        assert key_of(address) == key
        offer_key(directory.path, [], None, bound=True)
        assert key_of(address) is None


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
