"""Payload of AsyncFlow SDK in stores that hold blocks of bytes by name: the base of asyncflow-ray and asyncflow-mooncake.

class Mine(BlockStore): ...                          # write, read and free named blocks

def mine(context: StoreContext, **options: Any) -> PayloadStore:       # the factory of an adapter of kind "store"
    return BlockPayloadStore("mine", Mine(**options), context)
"""

from .interface import BlockMemory, BlockRead, BlockStore
from .payload import BlockPayloadStore

__all__ = ["BlockMemory", "BlockPayloadStore", "BlockRead", "BlockStore"]
