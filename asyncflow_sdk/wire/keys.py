"""Key files: who may reach a server over tcp, and by which keys the two know each other.

keys = ensure_keys(Path("runs/x/server.key"), Path("runs/x/run.key"))    # made when they are not there
keys.server, keys.run                                                    # what the server holds, what a client is given
RunKey.load("runs/x/run.key")                                            # the same, read by a client

Both are JSON with Z85 texts of CurveZMQ keys, readable by their owner alone; others' eyes make them void, as with
ssh. ``server.key`` stays where the server is. ``run.key`` is copied to the hosts of clients: it holds the server's
public key, by which a client knows the server, and a pair of which the server knows the public half. Each entry of
``clients`` in ``server.key`` is one such half: striking it out, and starting the server again, shuts that key out.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import zmq

from ..errors import ConfigError
from ..memory import make_private_directory

Key = Annotated[str, msgspec.Meta(min_length=40, max_length=40, pattern=r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]*$")]


class ServerKeys(
    msgspec.Struct, frozen=True, tag="asyncflow server key", tag_field="kind", forbid_unknown_fields=True
):
    """The server's pair, and the public keys of the clients it lets in."""

    public: Key
    secret: Key
    clients: tuple[Key, ...]

    def __repr__(self) -> str:
        """Of what is no secret: messages and logs show it."""
        return f"ServerKeys(public={self.public!r}, clients={self.clients!r})"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ServerKeys:
        """Raises ConfigError: no such file, not readable, readable by others, or no server key."""
        return _load(Path(path), cls, "server key")


class RunKey(msgspec.Struct, frozen=True, tag="asyncflow run key", tag_field="kind", forbid_unknown_fields=True):
    """What a client is given: the server's public key, and a pair of its own."""

    server: Key
    public: Key
    secret: Key

    def __repr__(self) -> str:
        """Of what is no secret: messages and logs show it."""
        return f"RunKey(server={self.server!r}, public={self.public!r})"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunKey:
        """Raises ConfigError: no such file, not readable, readable by others, or no run key."""
        return _load(Path(path), cls, "run key")


class KeyPair(NamedTuple):
    """The keys of one server, and a client's key that it lets in."""

    server: ServerKeys
    run: RunKey


def ensure_keys(server: Path, run: Path) -> KeyPair:
    """The keys in file ``server``, and in file ``run`` a key that it lets in. Missing files are made; a run key of
    another server is replaced. Raises ConfigError."""
    keys = ServerKeys.load(server) if os.path.lexists(server) else ServerKeys(*_pair(), ())
    known = None
    if os.path.lexists(run):
        known = RunKey.load(run)
        if (known.server, known.public in keys.clients) == (keys.public, True):
            return KeyPair(keys, known)
    public, secret = _pair()
    keys = msgspec.structs.replace(keys, clients=(*keys.clients, public))
    made = RunKey(keys.public, public, secret)
    save(server, keys)
    save(run, made)
    return KeyPair(keys, made)


def generate_keys() -> KeyPair:
    """Keys of a server that is known to nobody yet, and the one that it lets in. No file of keys is made for them; but a run
    keeps in its journal, which is its owner's alone, what a weight service says of itself, and so the key to it."""
    (server, secret), (client, own) = _pair(), _pair()
    return KeyPair(ServerKeys(server, secret, (client,)), RunKey(server, client, own))


def _pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


_K = TypeVar("_K", ServerKeys, RunKey)


def _load(path: Path, kind: type[_K], what: str) -> _K:
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
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no {what}: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no {what}: it is not text") from None


def save(path: Path, keys: Any) -> None:
    """Write a file atomically, readable by its owner alone. Raises ConfigError."""
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
        raise ConfigError(f"no key can be written to {path}: {os.strerror(error.errno or 0)}") from None
