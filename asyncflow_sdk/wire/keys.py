"""Key files: server and clients authenticate each other over tcp with CurveZMQ keys.

    keys = ensure_keys(Path("runs/x/server.key"), Path("runs/x/run.key"))    # makes missing files
    keys.server, keys.run                                                    # for the server, for its clients
    RunKey.load("runs/x/run.key")                                            # in a client

Both files are JSON with Z85 keys. As with ssh, a file readable by other users is rejected.
``server.key`` stays on the server's host. ``run.key`` is copied to clients: it holds the server's
public key, which identifies the server, and a key pair of the client. ``clients`` in ``server.key``
lists the accepted public keys of clients. A client shows the key of ``run.key`` only once: its hello
introduces a key pair of its own, accepted while its session lives. So ``run.key`` can be replaced
during the run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import struct
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import zmq
from zmq.utils import z85

from ..errors import ConfigError
from ..memory import make_private_directory

Key = Annotated[str, msgspec.Meta(min_length=40, max_length=40, pattern=r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]*$")]


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
        """Raises ConfigError for a missing or unreadable file, one readable by others, or another
        kind of file."""
        what = str(cls.__struct_config__.tag).removeprefix("asyncflow ")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            raise ConfigError(f"there is no {what} at {path}; a server makes one in its run directory") from None
        except OSError as error:
            raise ConfigError(f"the {what} {path} cannot be read: {os.strerror(error.errno or 0)}") from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path} is no file; a {what} is expected there")
            if status.st_mode & 0o077:
                raise ConfigError(f"the {what} {path} may be read by others than its owner; chmod 600 {path}")
            text = os.read(fd, 1 << 20)
        finally:
            os.close(fd)
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} is no {what}: {error}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is no {what}: it is not text") from None


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
    """Load the server's keys from file ``server`` and the clients' key from ``run``. Make missing
    files; replace the run key of another server. Raises ConfigError."""
    keys = ServerKeys.load(server) if os.path.lexists(server) else ServerKeys(*_pair(), ())
    if os.path.lexists(run):
        known = RunKey.load(run)
        if known.server == keys.public and known.public in keys.clients:
            return KeyPair(keys, known)
    public, secret = _pair()
    keys = msgspec.structs.replace(keys, clients=(*keys.clients, public))
    made = RunKey(keys.public, public, secret)
    save(server, keys)
    save(run, made)
    return KeyPair(keys, made)


def generate_keys() -> KeyPair:
    """Return new keys, without key files. A run writes those of its weight services into its
    journal, which only its owner can read."""
    (server, secret), (client, own) = _pair(), _pair()
    return KeyPair(ServerKeys(server, secret, (client,)), RunKey(server, client, own))


def rotated(keys: KeyPair) -> KeyPair:
    """Return the same server's keys with another key for clients, the only accepted one."""
    public, secret = _pair()
    server = msgspec.structs.replace(keys.server, clients=(public,))
    return KeyPair(server, RunKey(server.public, public, secret))


def save_keys(server: Path, run: Path, keys: KeyPair) -> None:
    """Replace the key files of a server. Raises ConfigError."""
    save(server, keys.server)
    save(run, keys.run)


def own_key(server: str | None = None) -> RunKey:
    """Return a new key pair of a client. ``server``: the public key of its server; default: its own,
    for connections to others than the server."""
    public, secret = _pair()
    return RunKey(server or public, public, secret)


def _pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


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
