"""Keys: a server accepts tcp clients with a known key, and refuses others with a reason."""

import os
import re
import stat
import threading
from pathlib import Path

import pytest
import zmq
from waiting import until
from wire_handlers import Parrot, serving

from asyncflow_sdk.errors import AccessDenied, ConfigError
from asyncflow_sdk.wire import Client, RouterSockets, RunKey, Server, ServerKeys, ensure_keys, generate_keys

pytestmark = pytest.mark.fast


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "run" / "server.key", tmp_path / "run" / "run.key"


def test_keys_are_made_once_for_the_eyes_of_their_owner(files: tuple[Path, Path]) -> None:
    # given / when
    keys, run = ensure_keys(*files)
    # then
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]
    assert run == RunKey.load(files[1])
    assert (run.server, run.public) == (keys.public, keys.clients[0])
    assert run.secret != keys.secret
    # and a second start finds the same, and makes anew only what was lost
    assert ensure_keys(*files) == (keys, run)
    files[1].unlink()
    more, another = ensure_keys(*files)
    assert (more.public, more.secret, more.clients[0]) == (keys.public, keys.secret, keys.clients[0])
    assert RunKey.load(files[1]).public == another.public == more.clients[1]
    # and a run key that is another server's is replaced
    files[0].unlink()
    assert RunKey.load(files[1]).server != ensure_keys(*files).run.server
    assert sorted(files[0].parent.iterdir()) == sorted(files)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "there is no run key at"),
        (lambda path: path.chmod(0o640), "may be read by others than its owner; chmod 600"),
        (lambda path: path.write_bytes(b""), "is no run key"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "is no run key"),
        (lambda path: path.write_text("[]"), "is no run key"),
        (lambda path: path.write_text(path.read_text()[:-20]), "is no run key"),
        (lambda path: path.write_text(path.read_text().replace('"server": "', '"server": "x')), "is no run key"),
        (
            lambda path: path.write_text(re.sub('(?<="server": ").{40}', "#" * 40, path.read_text())),
            "`server` is no Z85 key",
        ),
        (lambda path: path.write_bytes((path.parent / "server.key").read_bytes()), "is no run key.*server key"),
        (lambda path: path.write_bytes(b" " * (2 << 20) + path.read_bytes()), "is no run key"),
        (lambda path: (path.unlink(), path.mkdir()), "is no file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "is no file"),
    ],
)
def test_a_key_file_that_is_none_is_refused_by_name(files: tuple[Path, Path], spoil, message: str) -> None:  # type: ignore[no-untyped-def]
    ensure_keys(*files)
    spoil(files[1])
    with pytest.raises(ConfigError, match=message) as caught:
        RunKey.load(files[1])
    assert str(files[1]) in str(caught.value)


def test_keys_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write a key to"):
        ensure_keys(tmp_path / "file" / "server.key", tmp_path / "run.key")


def test_what_is_shown_of_keys_is_no_secret() -> None:
    server, run = generate_keys()
    for shown in (repr(server), str(run), repr({"where": [server, run]}), f"{run}"):
        assert server.secret not in shown
        assert run.secret not in shown
        assert server.public in shown


def test_a_key_lets_in_over_tcp_and_the_local_socket_needs_none(files: tuple[Path, Path], tmp_path: Path) -> None:
    keys = ensure_keys(*files).server
    with serving(f"ipc://{tmp_path}/s", "tcp://0.0.0.0:0", keys=keys) as parrot:
        port = parrot.server.addresses[1].rsplit(":", 1)[1]
        clients = [Client(f"tcp://127.0.0.1:{port}", RunKey.load(files[1])), Client(parrot.server.addresses[0])]
        for number, client in enumerate(clients):
            assert client.request(b"x", 5) == b"x %d" % number
        # and payload goes both ways
        large = os.urandom(3 << 20)
        clients[0].exchange(b"with", 5, [b"small", memoryview(large)])
        assert parrot.payloads[-1] == b"small" + large
        # and further threads of a client that is let in need no second look
        thread = threading.Thread(target=clients[0].request, args=(b"y", 5))
        thread.start()
        thread.join()
        for client in clients:
            client.close()


def test_a_client_whose_key_does_not_fit_is_told_so_and_nobody_else_suffers(files: tuple[Path, Path]) -> None:
    # given a server with keys and one without
    keys, known = ensure_keys(*files)
    with serving("tcp://127.0.0.1:0", keys=keys) as parrot, serving("tcp://127.0.0.1:0", insecure=True) as open_one:
        address, good = parrot.server.addresses[0], Client(parrot.server.addresses[0], known)
        good.request(b"x", 5)
        public, secret = (each.decode() for each in zmq.curve_keypair())
        for where, key, message in [
            (address, RunKey(keys.public, public, secret), "does not accept this key"),
            (address, RunKey(public, known.public, known.secret), "has no keys, or others than this key is for"),
            (address, None, "needs a key; pass key="),
            (open_one.server.addresses[0], known, "has no keys, or others"),
        ]:
            # when
            client = Client(where, key, insecure=key is None)
            with pytest.raises(AccessDenied, match=message):
                client.request(b"x", 30)
            client.close()
        # then
        assert good.request(b"y", 5) == b"y 1"
        assert (parrot.carried_out, open_one.carried_out) == ([b"x", b"y"], [])
        good.close()


def test_a_key_that_was_struck_out_is_shut_out(files: tuple[Path, Path]) -> None:
    import msgspec

    keys = msgspec.structs.replace(ensure_keys(*files).server, clients=())
    with serving("tcp://127.0.0.1:0", keys=keys) as parrot:
        client = Client(parrot.server.addresses[0], RunKey.load(files[1]))
        with pytest.raises(AccessDenied, match="does not accept this key"):
            client.request(b"x", 30)
        client.close()


def test_a_key_where_none_is_needed_or_none_where_it_is(files: tuple[Path, Path], tmp_path: Path) -> None:
    ensure_keys(*files)
    with pytest.raises(ConfigError, match="takes no key"):
        Client(f"ipc://{tmp_path}/s", RunKey.load(files[1]))
    for address in ("tcp://127.0.0.1:7000", "tcp://10.0.0.1:7000", "tcp://example.org:1"):
        with pytest.raises(ConfigError, match="needs a key.*; pass key="):
            Client(address)
        with pytest.raises(ConfigError, match="give key= or insecure=True"):
            Client(address, RunKey.load(files[1]), insecure=True)
    for address in ("", "7000", "http://localhost:1", "tcp:/127.0.0.1:1"):
        with pytest.raises(ConfigError, match="known transports"):
            Client(address)
    for address in ("tcp://127.0.0.1:notaport", "tcp://127.0.0.1", "tcp://:1"):
        with pytest.raises(ConfigError, match="tcp://HOST:PORT is expected"):
            Client(address)
    for port in ("65536", "99999", "0099999", "1" * 5000):
        for ask in (Client, lambda address: RouterSockets([address])):
            with pytest.raises(ConfigError, match="a port is at most 65535"):
                ask(f"tcp://127.0.0.1:{port}")


def test_connections_that_come_and_go_leave_no_sockets_behind(files: tuple[Path, Path]) -> None:
    keys = ensure_keys(*files).server
    with serving("tcp://127.0.0.1:0", keys=keys) as parrot:
        # given
        def come_and_go() -> None:
            client = Client(parrot.server.addresses[0], RunKey.load(files[1]))
            client.request(b"x", 30)
            client.close()

        # when
        for _ in range(20):
            come_and_go()
        # then
        port = int(parrot.server.addresses[0].rsplit(":", 1)[1])
        until(lambda: established(port) == 0, "their connections to close")


def established(port: int) -> int:
    """Connections of this host to a port of it."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(here.endswith(f":{port:04X}") and state == "01" for _, here, _, state, *_ in lines)


def test_a_server_with_keys_stops_and_starts_again_at_its_address(files: tuple[Path, Path]) -> None:
    # given a client that is let in, and a server that ends
    keys = ensure_keys(*files).server
    with serving("tcp://127.0.0.1:0", keys=keys) as parrot:
        address = parrot.server.addresses[0]
        client = Client(address, RunKey.load(files[1]))
        client.request(b"x", 5)
    # when it is there again
    again = Parrot()
    again.server = Server(RouterSockets([address], ServerKeys.load(files[0])), again)
    again.server.start()
    # then the client goes on
    assert client.request(b"y", 30) == b"y 0"
    client.close()
    again.server.stop()
