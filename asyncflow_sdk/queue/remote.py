"""Remote: the server's part in the payload of clients that share no memory with it. What comes beside a call is written
to segments of the server's own as it arrives, and is a block like any other once it is whole; what goes beside an answer
is sent from where it lies.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..errors import AsyncFlowError, ProtocolError, SchemaError
from ..ledger import commands as cmd
from ..ledger import unpack_ids
from ..memory import HEADER_BYTES, Allocation, Arena
from ..types import Column, ColumnSpec
from .blocks import Block, Located
from .payload import from_image, to_image
from .protocol import Answer, Call, decode_call, encode
from .reader import Reader

OWNER, NUMBER = "", 0
"""Who owns blocks that the server wrote: no session."""
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding a call raises."""
_log = logging.getLogger(__name__)


class IncomingBlock:
    """Where the payload of a call goes (see ``PayloadSink``): a block that nobody else knows of yet."""

    error: AsyncFlowError | None = None

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self._arena = arena
        self.space: Allocation = arena.allocate(max(nbytes, HEADER_BYTES))

    def write(self, start: int, data: Any) -> None:
        skip = max(0, HEADER_BYTES - start)  # the arena's own
        self.space.memory[start + skip : start + len(data)] = np.frombuffer(data, np.uint8)[skip:]

    def release(self) -> None:
        self._arena.free([self.space.serial])


class Refused:
    """A sink for payload that is not wanted, or for which there is no memory."""

    def __init__(self, error: AsyncFlowError) -> None:
        self.error = error

    def write(self, start: int, data: Any) -> None:
        raise AssertionError("a refused payload has no place")

    def release(self) -> None:
        pass


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

    def sink(self, body: bytes, nbytes: int) -> IncomingBlock | Refused:
        """Room for the payload of a call, which is still to come."""
        try:
            call = decode_call(body)
            if (
                call.payload is None
                or not isinstance(call.command, (cmd.AddRows, cmd.Complete))
                or call.block is not None
            ):
                raise SchemaError("this command takes no payload")
            return IncomingBlock(self.arena, nbytes)
        except AsyncFlowError as error:
            return Refused(error)
        except UNREADABLE as error:
            return Refused(ProtocolError(f"the server cannot read this call: {error}"))

    def store(self, call: Call, incoming: IncomingBlock | Refused | None) -> Call:
        """The payload of a call is there. Return the call as a client on this host would have made it, but for its
        ``payload``. Raises SchemaError for what is not that of the call, MemoryFull; then its memory is free again."""
        if incoming is None:
            raise SchemaError("no payload came with the call")
        if isinstance(incoming, Refused):
            raise incoming.error
        assert isinstance(call.command, (cmd.AddRows, cmd.Complete))
        assert call.payload is not None
        space = incoming.space
        try:
            columns = from_image(space.memory, call.payload, call.command.columns)
        except BaseException:
            incoming.release()
            raise
        if self._synced:
            self.arena.sync(space)
        block = Block(space.segment, space.start, space.serial, call.payload, space.nbytes, tuple(columns))
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
        rows, parts = 0, list[Any]()
        try:
            image = to_image(read(self._reader, answer.located, answer.schema))
            rows, parts = image.rows, list[Any](image.parts)
        except AsyncFlowError as error:
            _log.warning("rows leased to a client on another host cannot be read: %s", error)
        return encode(msgspec.structs.replace(answer, located=(), payload=rows)), parts

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close(unlink=False)


def read(reader: Reader, located: Sequence[Located], schema: Mapping[str, ColumnSpec]) -> dict[str, Column]:
    """The columns of rows, in the order of ``schema``."""
    columns: dict[str, Column] = {}
    for part in located:
        columns.update(reader.read(part, schema))
    return {name: columns[name] for name in schema}
