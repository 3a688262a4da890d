"""Messages of queue clients and servers: ledger commands, the location of their payload, and exceptions as text."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, TypeAlias, get_args

import msgspec
import numpy as np

from ..errors import AsyncFlowError, error_from_name
from ..interfaces.store import HomeCatalog, HomeOffer, StorageHome
from ..ledger import commands as cmd
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
    """The reply to ``ClientHello``. ``directory``: the run's shared memory. ``owner``: device and inode of the file
    ``owner`` in it; the client compares them to recognise the same directory. ``rows``: directory of the row
    segments; "" if it is ``directory``. ``durability``: "" if a dead server does not restart; else "process" or
    "host". ``pid``, ``pid_key``: the server's process. ``max_bytes``: largest call accepted. ``addresses``: the
    server's tcp addresses. ``store``, ``store_options``: the kind of store of all clients, and its options."""

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
    """A request. ``command`` None only delivers ``events``. ``then``: a lease to request once ``command`` (a
    completion or a return of rows) has succeeded; if it fails, nothing is leased. ``payload``: number of rows with
    columns sent beside the call, as a block."""

    command: CallCommand | None
    events: tuple[Event, ...] = ()
    then: LeaseRows | None = None
    payload: int | None = None

    @property
    def block(self) -> Block | None:
        """The location of the payload of a put or a completion."""
        return self.command.block if isinstance(self.command, AddRows | Complete) else None


class CallResult(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a call: either ``reply`` or ``error`` (class name and message). ``freed``: serials (int64) of
    this session's freed blocks. ``first``: in a call with ``then``, the reply to ``command``; None if it failed, with
    its error in ``error``. ``reply`` and ``error`` are otherwise those of ``then``. ``payload``: number of rows in
    the block beside the answer, with the columns of ``schema``; 0 if the rows ended before they were sent."""

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


class LedgerCatalog(HomeCatalog):
    """The homes of a run with a ledger. ``send``: sends a command to the server, and returns the reply.
    Thread-safe if it is."""

    def __init__(self, send: Callable[[Any], Any]) -> None:
        self._send = send

    def open(self, offer: HomeOffer) -> tuple[int, int]:
        opened = self._send(cmd.OpenHome(offer=offer))
        return opened.home, opened.epoch

    def homes(self) -> Sequence[StorageHome]:
        """Return the homes. An absent one has no address."""
        homes = []
        for each in self._send(cmd.GetHomes()).homes:
            offer = msgspec.structs.asdict(each.offer) | ({} if each.unit >= 0 else {"address": ""})
            homes.append(StorageHome(**offer, home=each.number, epoch=each.epoch, lost=each.lost))
        return tuple(homes)

    def needed(self, home: int, epoch: int) -> tuple[Set[str], Set[int]]:
        found = self._send(NeededRequest(home, epoch))
        return set(found.segments), set(found.sessions)


# ---- exceptions as text: messages, and tracebacks without the SDK's own frames

SDK = f"{Path(__file__).parent.parent}/"
FRAMES = 8
"""The number of innermost frames shown."""


def user_trace(error: BaseException) -> str:
    """Return the traceback of an error from its first frame outside the SDK on, without its message; "" if
    there is none, for example for a function called with wrong arguments. Thread-safe."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(SDK):
        trace = trace.tb_next
    if trace is None:
        return ""
    return plain_text(trace_text(error, trace, FRAMES))


def trace_text(error: BaseException, trace: TracebackType | None, frames: int) -> str:
    """Return the innermost frames of a traceback, without the error's message: callers begin with it."""
    try:
        lines = traceback.format_exception(type(error), error, trace, limit=-frames)
        message = next(line for line in traceback.format_exception_only(error) if not line.startswith(" "))
    except Exception:  # str(error) fails
        return "".join(traceback.format_tb(trace, limit=-frames)).rstrip()
    return "".join(line for line in lines if line != message).rstrip()


def error_text(error: BaseException) -> str:
    """Return an exception's class name and message, even if its ``str`` raises."""
    try:
        text = str(error)
    except Exception as wrong:
        text = f"its __str__ raised {type(wrong).__name__}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def plain_text(text: str, most: int = 4000) -> str:
    """Return text without characters invalid in UTF-8. Text longer than ``most`` is cut in the middle."""
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return text.encode(errors="backslashreplace").decode()
