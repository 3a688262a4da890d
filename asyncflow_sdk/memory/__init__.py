"""Shared memory: one allocator for samples and for weights, and read-only views that never change."""

from .arena import Allocation, Arena, NoHole
from .buffer_pool import BufferPool
from .directory import (
    SharedDirectory,
    directory_at,
    is_served,
    journal_owns,
    own_directories,
    remove_if_ownerless,
    sweep,
)
from .mapper import Hold, Mapped, Mapper
from .private import PrivateMaps
from .private_files import private_directory, private_opener
from .room import free_memory
from .segment import HEADER_BYTES, blocks_there, sync_directory

__all__ = [
    "HEADER_BYTES",
    "Allocation",
    "Arena",
    "BufferPool",
    "Hold",
    "Mapped",
    "Mapper",
    "NoHole",
    "PrivateMaps",
    "SharedDirectory",
    "blocks_there",
    "directory_at",
    "free_memory",
    "is_served",
    "journal_owns",
    "own_directories",
    "private_directory",
    "private_opener",
    "remove_if_ownerless",
    "sweep",
    "sync_directory",
]
