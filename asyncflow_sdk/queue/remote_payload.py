"""RemotePayload: the payload of clients without access to the server's memory.

Uploads are written into the server's own segments as they arrive, and become ordinary blocks when
complete. Downloads are sent from the blocks of their rows.
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
from ..ledger import unpack_ids
from ..ledger.commands import AddRows, Complete
from ..memory import HEADER_BYTES, Allocation, Arena
from ..types import Column, ColumnSpec
from ..types.blocks import Block, BlockSlices
from .protocol import WRITING, Call, CallResult, decode_call, encode, failure
from .stores.blocks import to_image
from .stores.fetch import FetchRequest, check_parts, read_parts
from .stores.homes import SERVER_MEMORY, home_of
from .stores.reader import ColumnReader, from_image

NUMBER = 0
"""Who owns blocks that the server wrote: no session."""
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions raised by decoding an invalid call."""
_log = logging.getLogger(__name__)


class IncomingBlock:
    """A block being received (see ``PayloadSink``)."""

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self._arena = arena
        self.space: Allocation = arena.allocate(max(nbytes, HEADER_BYTES))

    def write(self, start: int, data: Any) -> None:
        """Write a part of the block. The arena's header at its start is skipped."""
        skip = max(0, HEADER_BYTES - start)
        self.space.write(start + skip, np.frombuffer(data, np.uint8)[skip:])

    def release(self) -> None:
        """Free the block."""
        self._arena.free([self.space.serial])


class RemotePayload:
    """``directory``: of the row segments. ``synced``: uploads are synced to the disk before they
    count. Not thread-safe: only the server's thread uses it."""

    def __init__(self, directory: Path, reader: ColumnReader, synced: bool) -> None:
        self._directory, self._reader, self._synced = directory, reader, synced
        self._prefix = f"s{NUMBER}-{secrets.token_hex(4)}-"
        self._arena: Arena | None = None
        self.freed: list[int] = []

    @property
    def arena(self) -> Arena:
        """The server's own segments, made at first use."""
        if self._arena is None:
            self._arena = Arena(self._directory, self._prefix)
        return self._arena

    def sink(self, body: bytes, nbytes: int) -> IncomingBlock:
        """Return a sink for the payload of a call. Raises SchemaError, MemoryFull, ProtocolError."""
        try:
            call = decode_call(body)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"the server cannot read this call: {error}") from None
        if call.payload is None or call.block is not None or type(call.command) not in WRITING:
            raise SchemaError("this command takes no payload")
        return IncomingBlock(self.arena, nbytes)

    def store(self, call: Call, incoming: IncomingBlock | AsyncFlowError | None) -> Call:
        """Return the call with ``block`` set to its complete upload.

        Raises ``incoming`` if it is an error, SchemaError if it does not fit the call, MemoryFull; then its memory
        is free again.
        """
        if incoming is None:
            raise SchemaError("the call's payload is missing")
        if isinstance(incoming, AsyncFlowError):
            raise incoming
        assert isinstance(call.command, AddRows | Complete)
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
        command = msgspec.structs.replace(call.command, block=block)
        return msgspec.structs.replace(call, command=command)

    def free(self, segment: str, serials: bytes) -> bool:
        """Free blocks at the next ``free_pending``. False for a segment of an earlier server."""
        if not segment.startswith(self._prefix):
            return False
        self.freed += unpack_ids(serials).tolist()
        return True

    def free_pending(self) -> None:
        """Free the blocks passed to ``free``, once the records of their rows' end are committed."""
        if self.freed:
            freed, self.freed = self.freed, []
            self.arena.free(freed)

    def inline(self, answer: CallResult) -> tuple[bytes, Sequence[Any]]:
        """Return an encoded result and the columns of its rows, read anew each time it is sent.

        The lease keeps the rows in place. If they have ended, the result has no payload. If some are
        in another home, the result is unchanged: the client reads all of them where they are.
        """
        if any(home_of(segment) != SERVER_MEMORY for part in answer.slices for segment in part.segments):
            return encode(answer), ()
        rows, parts = 0, list[Any]()
        try:
            image = to_image(read(self._reader, answer.slices, answer.schema))
            rows, parts = image.rows, list[Any](image.parts)
        except AsyncFlowError as error:
            _log.warning("rows leased to a client without shared memory cannot be read: %s", error)
        return encode(msgspec.structs.replace(answer, slices=(), payload=rows)), parts

    def fetch(self, request: FetchRequest) -> tuple[bytes, Sequence[Any]]:
        """Return an encoded result and the columns of rows in the server's memory."""
        try:
            check_parts(request.parts)
            reply, frames = read_parts(self._reader, request.parts)
        except AsyncFlowError as error:
            return encode(CallResult(error=failure(error))), ()
        return encode(CallResult(reply)), frames

    def close(self) -> None:
        """Unmap the server's segments."""
        if self._arena is not None:
            self._arena.close(unlink=False)


def read(reader: ColumnReader, slices: Sequence[BlockSlices], schema: Mapping[str, ColumnSpec]) -> dict[str, Column]:
    """Return the columns of rows, in the order of ``schema``."""
    columns: dict[str, Column] = {}
    for part in slices:
        columns.update(reader.read(part, schema))
    return {name: columns[name] for name in schema}
