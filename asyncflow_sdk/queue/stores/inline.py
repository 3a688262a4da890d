"""InlineStore: columns sent beside each call, as blocks. The server stores them in its own segments.

For a client without memory in common with the server: on another host, or in a container with its
own /dev/shm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from ...errors import ProtocolError
from ...interfaces.store import PayloadStore, StoredBlock
from ...memory import HEADER_BYTES, Allocation
from ...types import Column, ColumnSpec
from ...types.blocks import Block, BlockImage, BlockSlices
from .blocks import to_image


class InlineStore(PayloadStore):
    """``check_size``: raises ProtocolError for a call of too many bytes. See ``PayloadStore``."""

    inline = True

    def __init__(self, check_size: Callable[[int], None]) -> None:
        self._check_size = check_size

    def write(self, columns: Mapping[str, Column], *, copy: bool, grow: bool = True) -> StoredBlock:
        self._check_size(sum(column.values.nbytes for column in columns.values()))
        return StoredBlock(None, to_image(columns, copy=copy))

    def image_of(self, block: Block, space: Allocation) -> StoredBlock:
        """Return a block that another store of this process has written as an image."""
        self._check_size(block.nbytes)
        parts = [np.zeros(HEADER_BYTES, np.uint8), space.memory[HEADER_BYTES:]]
        return StoredBlock(None, BlockImage(block.rows, block.nbytes, parts))

    def rewrite(self, stored: StoredBlock) -> StoredBlock | None:
        return stored

    def discard(self, stored: StoredBlock) -> None:
        """Do nothing: an unsent image is memory of this process."""

    def free(self, serials: Iterable[int]) -> None:
        """Do nothing: the server frees its blocks itself."""

    def read(self, slices: Sequence[BlockSlices], schema: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        """See ``PayloadStore.read``. Columns come beside the answers; none are anywhere else."""
        if slices:
            raise ProtocolError("the server answered with locations in memory that this client cannot see")
        return {}

    def close(self) -> None:
        """Do nothing: the columns read belong to their readers."""
