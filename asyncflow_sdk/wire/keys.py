"""Key files: server and clients authenticate each other over tcp with CurveZMQ keys.

    keys = ensure_keys(Path("runs/x/server.key"), Path("runs/x/run.key"))    # makes missing files
    keys.server, keys.run                                                    # for the server, for its clients
    RunKey.load("runs/x/run.key")                                            # in a client

Both files are JSON with Z85 keys. As with ssh, a file readable by other users is rejected. ``server.key`` stays on
the server's host. ``run.key`` is copied to clients: it holds the server's public key, which identifies the server,
and a key pair of the client. ``clients`` in ``server.key`` lists the accepted public keys of clients. A client
shows the key of ``run.key`` only once: its hello introduces a key pair of its own, accepted while its session
lives. So ``run.key`` can be replaced during the run.

A server offers its run key in the run's directory of shared memory (mode 0700), where clients of the same user on
this host find it by the tcp address. The offer is removed with its server, unless a journal keeps it for the run's
next server."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import zmq
from zmq.utils import z85

from ..errors import AccessDenied, ConfigError, ServerLost
from ..memory import is_served, journal_owns, make_private_directory, own_directories
from .sockets import EVERY_HOST, RETRY_S, host_and_port, is_loopback, probe

Key = Annotated[str, msgspec.Meta(min_length=40, max_length=40, pattern=r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]*$")]
FILE = "tcp.key"  # an offer, in a directory of shared memory
_K = TypeVar("_K", bound="_KeyFile")


class _KeyFile(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            for key in (value,) if isinstance(value, str) else value:
                try:
                    z85.decode(key)
                except struct.error:  # five characters above 2**32 - 1
                    raise ValueError(f"`{name}` is no Z85 key") from None

    def __repr__(self) -> str:
        """Without the secret: it is shown in messages and logs."""
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "secret")
        return f"{type(self).__name__}({', '.join(shown)})"

    @classmethod
    def load(cls: type[_K], path: str | os.PathLike[str]) -> _K:
        """Raises ConfigError for a missing or unreadable file, one readable by others, or another kind of file."""
        what = str(cls.__struct_config__.tag).removeprefix("asyncflow ")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not block
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise ConfigError(f"{path} is no file; a {what} is expected there")
                if status.st_mode & 0o077:
                    raise ConfigError(f"the {what} {path} may be read by others than its owner; chmod 600 {path}")
                text = os.read(fd, 1 << 20)
            finally:
                os.close(fd)
        except FileNotFoundError:
            raise ConfigError(f"there is no {what} at {path}; a server makes one in its run directory") from None
        except OSError as error:
            raise ConfigError(f"the {what} {path} cannot be read: {os.strerror(error.errno or 0)}") from None
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is no {what}: {error}") from None


class ServerKeys(_KeyFile, frozen=True, tag="asyncflow server key"):
    """The server's key pair, and the public keys of its accepted clients."""

    public: Key
    secret: Key
    clients: tuple[Key, ...]


class RunKey(_KeyFile, frozen=True, tag="asyncflow run key"):
    """A client's keys: the server's public key, and its own key pair."""

    server: Key
    public: Key
    secret: Key


class KeyPair(NamedTuple):
    """The keys of one server, and an accepted key of its clients."""

    server: ServerKeys
    run: RunKey


def ensure_keys(server: Path, run: Path) -> KeyPair:
    """Load both files' keys; make missing files, and replace ``run`` of another server. Raises ConfigError."""
    new = msgspec.structs.replace(generate_keys().server, clients=())
    keys = ServerKeys.load(server) if os.path.lexists(server) else new
    if os.path.lexists(run):
        known = RunKey.load(run)
        if known.server == keys.public and known.public in keys.clients:
            return KeyPair(keys, known)
    made = own_key(keys.public)
    pair = KeyPair(msgspec.structs.replace(keys, clients=(*keys.clients, made.public)), made)
    save_keys(server, run, pair)
    return pair


def generate_keys() -> KeyPair:
    """Return new keys, without key files."""
    key = own_key()
    return rotated(ServerKeys(key.public, key.secret, ()))


def rotated(server: ServerKeys) -> KeyPair:
    """Return the server's keys with another key for clients, the only accepted one."""
    run = own_key(server.public)
    return KeyPair(msgspec.structs.replace(server, clients=(run.public,)), run)


def save_keys(server: Path, run: Path, keys: KeyPair) -> None:
    """Replace the key files of a server. Raises ConfigError."""
    save(server, keys.server)
    save(run, keys.run)


def own_key(server: str | None = None) -> RunKey:
    """Return a new key pair of a client. ``server``: the public key of its server; default: its own."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return RunKey(server or public, public, secret)


def save(path: Path, keys: Any) -> None:
    """Write a file atomically, readable only by its owner. Raises ConfigError."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        make_private_directory(path.parent)
        fd = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with open(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(keys)) + b"\n")
        os.replace(new, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise ConfigError(f"cannot write a key to {path}: {os.strerror(error.errno or 0)}") from None


class _Offer(msgspec.Struct, frozen=True):
    """``network``: the network namespace of ``addresses``. ``bound``: False if the server will listen soon."""

    network: str
    addresses: tuple[str, ...]
    bound: bool
    key: RunKey


def offer_key(directory: Path, addresses: Sequence[str], key: RunKey | None, *, bound: bool) -> None:
    """Offer a key to clients of this user; None withdraws it. Call before and after binding, so that a client able
    to connect finds it. Raises ConfigError if it cannot be written."""
    if key is not None:
        over_tcp = tuple(address for address in addresses if address.startswith("tcp://"))
        save(directory / FILE, _Offer(_network(), over_tcp, bound, key))
    else:
        (directory / FILE).unlink(missing_ok=True)


def find_key(address: str) -> RunKey | None:
    """Return the key offered by a server of this user for a tcp address of this host, else None.

    Prefers a running server over one to be continued from its journal, then a listening server."""
    host, port = _split(address)
    network, found = _network(), list[tuple[bool, bool, RunKey]]()
    for directory in own_directories():
        try:
            offer = msgspec.json.decode((directory / FILE).read_bytes(), type=_Offer)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            continue
        if offer.network != network:
            continue
        for each in map(_split, offer.addresses):
            if each[1] == port and (each[0] == host or (each[0] in EVERY_HOST and _is_here(host))):
                served = is_served(directory)
                if served or journal_owns(directory):
                    found.append((served, offer.bound, offer.key))
    return max(found, key=lambda each: each[:2])[2] if found else None


def await_key(address: str, timeout_s: float) -> RunKey | None:
    """Like ``find_key``. On loopback, wait up to ``timeout_s`` for a starting server.

    Raises ServerLost if none listens in time, AccessDenied if one of another user listens."""
    until = time.monotonic() + timeout_s
    while True:
        if (key := find_key(address)) is not None or not is_loopback(address):
            return key
        try:
            probe(address)
        except ServerLost:
            if time.monotonic() >= until:
                raise ServerLost(
                    f"nobody listens at {address}, after {timeout_s:.1f} s of waiting for a server; is the run served"
                    " there, and does its process still live?"
                ) from None
            time.sleep(RETRY_S)
            continue
        if (key := find_key(address)) is not None:  # the server offers it before it listens
            return key
        raise AccessDenied(
            f"at {address} listens no server of this user on this host, so no key for it is known; pass key=,"
            " the path of a copy of the run's run.key, or insecure=True if it is served without keys"
        )


def _network() -> str:
    """Return the network namespace of this process: other containers may use the same address."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def _split(address: str) -> tuple[str, int]:
    host, port = host_and_port(address)
    return "127.0.0.1" if host == "localhost" else host, port


def _is_here(host: str) -> bool:
    """True if a host name or IP address belongs to this host: a socket can be bound to it."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, (ip, *_rest) in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as trial:
                trial.bind((ip, 0))
                return True
    return False
