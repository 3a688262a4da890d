"""Remote: the server's part in the payload of clients that share no memory with it. What comes beside a call is copied
once, into segments of the server's own, and is a block like any other from then on; what goes beside an answer is
sent from where it lies.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..errors import AsyncFlowError, SchemaError
from ..ledger import commands as cmd
from ..ledger import unpack_ids
from ..memory import Arena
from ..types import Column, ColumnSpec
from . import blocks
from .blocks import Located
from .payload import Payload, from_frames, to_frames
from .protocol import Answer, Call, encode
from .reader import Reader

OWNER, NUMBER = "", 0
"""Who owns blocks that the server wrote: no session."""
_log = logging.getLogger(__name__)


class Remote:
    """Not thread-safe: the server's thread owns it. ``directory``: where segments of rows lie. ``synced``: what comes is
    on the disk before it counts."""

    def __init__(self, directory: Path, reader: Reader, synced: bool) -> None:
        self._directory, self._reader, self._synced = directory, reader, synced
        self._prefix = f"s{NUMBER}-{secrets.token_hex(4)}-"
        self._arena: Arena | None = None
        self._freed: list[int] = []

    @property
    def arena(self) -> Arena:
        if self._arena is None:
            self._arena = Arena(self._directory, self._prefix)
        return self._arena

    def store(self, call: Call, frames: Sequence[Any]) -> Call:
        """Put the columns that came beside a call where those of a client on this host would be, and return the call
        as that one would have made it, but for its ``payload``. Raises SchemaError, MemoryFull."""
        if call.payload is None or not isinstance(call.command, (cmd.Put, cmd.Complete)) or call.block is not None:
            raise SchemaError("this command takes no payload")
        columns = from_frames(call.payload, call.command.columns, frames)
        if not columns:
            raise SchemaError("columns and payload belong together")
        block, space = blocks.write(self.arena, columns)
        if self._synced:
            self.arena.sync(space)
        return msgspec.structs.replace(call, block=block)

    def free(self, segment: str, serials: bytes) -> bool:
        """Blocks in a segment are needed no more, once ``carry_out`` is called. False if it is an earlier server's."""
        if not segment.startswith(self._prefix):
            return False
        self._freed += unpack_ids(serials).tolist()
        return True

    def carry_out(self) -> None:
        """What was freed may be written again, now that it is kept who ended."""
        if self._freed:
            freed, self._freed = self._freed, []
            self.arena.free(freed)

    def inline(self, answer: Answer) -> tuple[bytes, Sequence[Any]]:
        """An answer with the values of its rows beside it. They are read where they lie each time it is sent: the lease
        holds them there. When they cannot be, the rows have ended, and the answer goes without."""
        payload, frames = Payload(0, ()), list[Any]()
        try:
            payload, frames = to_frames(read(self._reader, answer.located, answer.schema))
        except AsyncFlowError as error:
            _log.warning("rows leased to a client on another host cannot be read: %s", error)
        return encode(msgspec.structs.replace(answer, located=(), payload=payload)), frames

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close(unlink=False)


def read(reader: Reader, located: Sequence[Located], schema: Mapping[str, ColumnSpec]) -> dict[str, Column]:
    """The columns of rows, in the order of ``schema``."""
    columns: dict[str, Column] = {}
    for part in located:
        columns.update(reader.read(part, schema))
    return {name: columns[name] for name in schema}
