"""Shared memory: one allocator for samples and for weights, and read-only views that never change."""

from .arena import Allocation, Arena
from .directory import SharedDirectory, remove_if_ownerless, sweep
from .mapper import Mapper

__all__ = ["Allocation", "Arena", "Mapper", "SharedDirectory", "remove_if_ownerless", "sweep"]
