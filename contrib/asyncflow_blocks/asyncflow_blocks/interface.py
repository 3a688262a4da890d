"""BlockStore: blocks of bytes, held by name in the memory of another system; with its memory on one host, and reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec


class BlockRead(msgspec.Struct, frozen=True):
    """A block to read. ``ranges``: (start, stop) of its bytes, in order. They are copied to the same
    positions of ``into``, a contiguous uint8 array of the block's size."""

    name: str
    ranges: Sequence[tuple[int, int]]
    into: Any


class BlockStore(ABC):
    """Blocks of bytes, held by name in the memory of another system. Thread-safe.

    Each host has its own memory, opened by its storage unit with ``open_memory``; ``address`` is that
    of its ``BlockMemory``. All blocks in it are lost together. A name is written once and never
    again. Calls may block for seconds. ``whole``: True if a range costs as much as its block.
    ``fetch_s``: longest wait for a read, after which its rows are given back.
    """

    whole: bool = False
    fetch_s: float = 30.0

    @abstractmethod
    def write(self, address: str, name: str, block: Any) -> None:
        """Write a contiguous uint8 array as a block. On return every reader can read it. Raises
        MemoryFull, StoreUnavailable; then nothing was written, or it is freed with all others."""

    @abstractmethod
    def read(self, address: str, reads: Sequence[BlockRead]) -> None:
        """Read ranges of blocks. Raises LeaseLost if a block is not there, freed or lost, and
        StoreUnavailable if that is not known now."""

    @abstractmethod
    def free(self, address: str, names: Sequence[str]) -> None:
        """Free blocks. Idempotent; ignores unknown names. Raises StoreUnavailable."""

    @abstractmethod
    def is_lost(self, address: str, identity: str) -> bool:
        """True if the memory's contents are not these any more. Raises StoreUnavailable if that is not
        known now."""

    @abstractmethod
    def open_memory(self, run: str, name: str, host: str) -> BlockMemory:
        """Open this host's memory, in the process of its storage unit. ``name``: of the home. ``host``:
        its IP address. The memory stays open after ``close``. Raises ConfigError, StoreUnavailable."""

    @abstractmethod
    def close(self) -> None:
        """Stop writing and reading. Blocks stay. Idempotent."""


class BlockMemory(ABC):
    """The memory of one host in a ``BlockStore``. One thread uses it.

    ``address``: valid after ``check``.
    """

    address: str = ""

    @abstractmethod
    def check(self) -> str:
        """Return the identity of the contents: text without "/", never used before for others. If the
        contents are lost, it is another one from now on, and the memory is usable again. Raises
        StoreUnavailable if their state is not known now."""

    @abstractmethod
    def free_all(self, prefixes: Sequence[str]) -> None:
        """Free all blocks with names that begin with one of these. Raises StoreUnavailable."""

    @abstractmethod
    def close(self, *, keep: bool) -> None:
        """Close the memory. ``keep``: leave the blocks to the next unit of this host, if they can
        outlive this process. Idempotent."""
