"""Shared memory: an allocator for samples and weights, and immutable read-only views."""

from .arena import Allocation, Arena, GrowthNeeded
from .buffer_pool import BufferPool
from .directory import (
    KEEP_S,
    SIGN_S,
    HomeDirectory,
    SharedDirectory,
    directory_at,
    find_home_directory,
    is_served,
    journal_owns,
    make_private_directory,
    meeting_directory,
    own_directories,
    private_opener,
    remove_if_ownerless,
    sweep,
)
from .mapper import BlockHold, MappedSegment, Mapper, PrivateMaps
from .segment import HEADER_BYTES, block_header, find_blocks, sync_directory

__all__ = [
    "HEADER_BYTES", "KEEP_S", "SIGN_S", "Allocation", "Arena", "BlockHold", "BufferPool", "GrowthNeeded",
    "HomeDirectory", "MappedSegment", "Mapper", "PrivateMaps", "SharedDirectory", "block_header", "directory_at",
    "find_blocks", "find_home_directory", "is_served", "journal_owns", "make_private_directory", "meeting_directory",
    "own_directories", "private_opener", "remove_if_ownerless", "sweep", "sync_directory",
]  # fmt: skip
