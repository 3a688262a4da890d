"""Messages of queue clients and servers: ledger commands, and the location of their payload."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, get_args

import msgspec
import numpy as np

from ..errors import AsyncFlowError, error_from_name
from ..ledger.commands import AddRows, AnyCommand, AnyReply, Complete, LeaseRows
from ..types import ColumnSpec, Event
from ..types.blocks import Block, BlockSlices
from ..wire import MAX_BYTES, RunKey
from .stores.fetch import FetchReply, FetchRequest, Needed, NeededRequest

PublicKey: TypeAlias = Annotated[str, msgspec.Meta(max_length=40)]


class ClientHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The first call of a client. ``pid_key``: identifies the process to detect its death; "" from
    another host. ``host``: for display. ``public``: the key of its later connections."""

    name: str
    pid: int
    pid_key: str
    sdk: str
    host: str = ""
    public: PublicKey = ""


class MemberQuery(msgspec.Struct, frozen=True, array_like=True, tag="get_members"):
    """Ask which public keys belong to open sessions. Answered with ``Members``."""

    keys: tuple[PublicKey, ...]


class Members(msgspec.Struct, frozen=True, array_like=True, tag="members"):
    """``keys``: the keys of a ``MemberQuery`` that belong to open sessions."""

    keys: tuple[PublicKey, ...]


class KeyRequest(msgspec.Struct, frozen=True, array_like=True, tag="get_key"):
    """Ask for the key of new clients. Answered with ``CurrentKey``."""


class RotateKey(msgspec.Struct, frozen=True, array_like=True, tag="rotate_key"):
    """Replace the key of new clients, and end the sessions ``evict`` in the same round: none of their
    clients gets the new key. Answered with ``CurrentKey``."""

    evict: tuple[int, ...] = ()
    reason: str = ""


class CurrentKey(msgspec.Struct, frozen=True, array_like=True, tag="current_key"):
    """``key``: the accepted one; None for a run without keys. ``unsaved``: why it could not be written to
    ``run.key``."""

    key: RunKey | None
    unsaved: str = ""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The reply to ``ClientHello``.

    ``directory``: of the run's shared memory. ``owner``: device and inode of the file ``owner`` in
    it; the client compares them to recognise the same directory. ``rows``: directory of the row
    segments; "" if it is ``directory``. ``durability``: "" if a dead server does not restart; else
    "process" or "host". ``pid``, ``pid_key``: the server's process. ``max_bytes``: largest call
    accepted. ``addresses``: the server's tcp addresses. ``store``, ``store_options``: the kind of
    store of all clients, and its options.
    """

    session: int
    directory: str
    sdk: str
    durability: str = ""
    rows: str = ""
    owner: tuple[int, int] = (0, 0)
    pid: int = 0
    pid_key: str = ""
    max_bytes: int = MAX_BYTES
    addresses: tuple[str, ...] = ()
    store: str = "local"
    store_options: dict[str, Any] = {}


Unrecorded: TypeAlias = FetchRequest | NeededRequest | MemberQuery | KeyRequest | RotateKey
"""Requests answered by the server itself, and not recorded as requests."""
UNRECORDED = frozenset(get_args(Unrecorded))
WRITING = frozenset({AddRows, Complete})
"""Commands with columns."""
CallCommand: TypeAlias = AnyCommand | ClientHello | Unrecorded


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A request. ``command`` None only delivers ``events``.

    ``then``: a lease to request once ``command`` (a completion or a return of rows) has succeeded; if it
    fails, nothing is leased. ``payload``: number of rows whose columns are sent beside the call, as a block.
    """

    command: CallCommand | None
    events: tuple[Event, ...] = ()
    then: LeaseRows | None = None
    payload: int | None = None

    @property
    def block(self) -> Block | None:
        """The location of the payload of a put or a completion."""
        return self.command.block if isinstance(self.command, AddRows | Complete) else None

    @property
    def client_serials(self) -> bytes:
        """The serial of the client's own block, as in ``CallResult.freed``; b"" without one."""
        return b"" if self.block is None else self.block.packed_serial


class CallResult(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a call: either ``reply`` or ``error`` (class name and message).

    ``freed``: serials (int64) of this session's freed blocks. ``first``: in a call with ``then``,
    the reply to ``command``; None if it failed, with its error in ``error``. ``reply`` and
    ``error`` are otherwise those of ``then``. ``payload``: number of rows in the block beside the
    answer, with the columns of ``schema``; 0 if the rows ended before they were sent.
    """

    reply: AnyReply | Welcome | FetchReply | Needed | Members | CurrentKey | None = None
    error: tuple[str, str] | None = None
    slices: tuple[BlockSlices, ...] = ()
    schema: dict[str, ColumnSpec] = {}
    freed: bytes = b""
    first: AnyReply | None = None
    payload: int | None = None

    def raise_error(self) -> None:
        """Raise ``error``, if there is one."""
        if self.error is not None:
            raise error_from_name(*self.error)


class ResultWithPayload(CallResult, frozen=True, array_like=True):
    """A result and the block received beside it. It is never sent."""

    memory: Any = None


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be sent to a queue server: {value!r}")


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_result = msgspec.msgpack.Decoder(CallResult).decode


def failure(error: AsyncFlowError) -> tuple[str, str]:
    """Return an error as ``CallResult.error``."""
    return type(error).__name__, str(error)
