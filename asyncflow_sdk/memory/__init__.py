"""Shared memory: an allocator for samples and weights, and immutable read-only views."""

from .arena import Allocation, Arena, GrowthNeeded
from .buffer_pool import BufferPool
from .directory import (
    KEEP_S,
    SIGN_S,
    SharedDirectory,
    directory_at,
    is_served,
    journal_owns,
    meeting_directory,
    own_directories,
    remove_if_ownerless,
    sweep,
)
from .home_directory import HomeDirectory, find_home_directory
from .mapped_segment import BlockHold, MappedSegment
from .mapper import Mapper
from .private_files import make_private_directory, private_opener
from .private_maps import PrivateMaps
from .segment import HEADER_BYTES, block_header, find_blocks, sync_directory

__all__ = [
    "HEADER_BYTES",
    "KEEP_S",
    "SIGN_S",
    "Allocation",
    "Arena",
    "BlockHold",
    "BufferPool",
    "GrowthNeeded",
    "HomeDirectory",
    "MappedSegment",
    "Mapper",
    "PrivateMaps",
    "SharedDirectory",
    "block_header",
    "directory_at",
    "find_blocks",
    "find_home_directory",
    "is_served",
    "journal_owns",
    "make_private_directory",
    "meeting_directory",
    "own_directories",
    "private_opener",
    "remove_if_ownerless",
    "sweep",
    "sync_directory",
]
