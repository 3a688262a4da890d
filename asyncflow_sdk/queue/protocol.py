"""What queue clients and servers say to each other: a ledger command and where its payload lies."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ..errors import AsyncFlowError, by_name
from ..ledger.commands import AnyCommand, AnyReply, LeaseRows
from ..types import ColumnSpec, Event
from .blocks import Block, Located


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The first call of a client. ``pid_key`` lets the server see its death; "" where it cannot. ``host``: for
    people."""

    name: str
    pid: int
    pid_key: str
    sdk: str
    host: str = ""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """``directory``: of the run's shared memory; ``owner``: device and inode of the file of that name in it, by which a
    client knows that it sees this directory and not its like. ``rows``: where segments of rows lie, if elsewhere.
    ``durability``: a server that dies may come back: "" (never), process or host. ``pid``, ``pid_key``: its process.
    ``max_bytes``: the largest call it takes. ``addresses``: the tcp ones that it serves."""

    session: int
    directory: str
    sdk: str
    durability: str = ""
    rows: str = ""
    owner: tuple[int, int] = (0, 0)
    pid: int = 0
    pid_key: str = ""
    max_bytes: int = 1 << 30
    addresses: tuple[str, ...] = ()


class Call(msgspec.Struct, frozen=True, array_like=True):
    """``command`` None only delivers ``events``. ``block``: the payload of a put or a completion. ``then``: a lease
    asked for by the way, once ``command`` (a completion or a return of rows) has had its effect; if that fails,
    nothing is leased. ``payload``: rows of a put or a completion whose columns come beside this, as a block; ``inline``: so
    shall those of the answer."""

    command: AnyCommand | Hello | None
    block: Block | None = None
    events: tuple[Event, ...] = ()
    then: LeaseRows | None = None
    payload: int | None = None
    inline: bool = False


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Either ``reply`` or ``error`` (class name and message). ``freed``: serials (int64) of this session's blocks
    that nobody needs any more. ``first``: of a call with ``then``, what ``command`` came to; None when
    that failed, and the error is its. With it, ``reply`` and ``error`` are those of ``then``. ``payload``: rows of the
    block beside this, which has the columns of ``schema``; 0: they ended before they could be sent."""

    reply: AnyReply | Welcome | None = None
    error: tuple[str, str] | None = None
    located: tuple[Located, ...] = ()
    schema: dict[str, ColumnSpec] = {}
    freed: bytes = b""
    first: AnyReply | None = None
    payload: int | None = None

    def raise_error(self) -> None:
        if self.error is not None:
            raise by_name(*self.error)


class Delivered(Answer, frozen=True, array_like=True):
    """An answer with the block that came beside it. It does not travel."""

    memory: Any = None


def _plain(value: Any) -> Any:
    """A numpy scalar, as counts and versions often are, is a number."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be sent to a queue server: {value!r}")


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def failure(error: AsyncFlowError) -> tuple[str, str]:
    return type(error).__name__, str(error)
