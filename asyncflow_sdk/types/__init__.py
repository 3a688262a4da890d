"""Plain values: columns, batches, version spans, manifests, events and configuration."""

from .batch import Batch, loss_mask
from .columns import Column, ColumnSpec, Values, check_column_name, digest_of, pack, unpack
from .config import Chat, Checkpoint, Probe, Sampling, Staleness, Store, Weights
from .dtypes import carrier, dtype_name, from_torch, to_torch
from .events import Event
from .manifest import Chunk, Manifest, Shard, TensorInfo
from .ragged import Ragged
from .reports import Audit
from .spans import (
    LOSS_MASK,
    VERSION_SPANS,
    AgeSums,
    TokenAges,
    VersionSpan,
    one_version,
    token_ages,
    token_staleness,
    token_steps,
    token_versions,
)
from .validation import check_above, check_least

__all__ = [
    "LOSS_MASK", "VERSION_SPANS", "AgeSums", "Audit", "Batch", "Chat", "Checkpoint", "Chunk", "Column", "ColumnSpec",
    "Event", "Manifest", "Probe", "Ragged", "Sampling", "Shard", "Staleness", "Store",
    "TensorInfo", "TokenAges", "Values", "VersionSpan", "Weights", "carrier", "check_above", "check_column_name",
    "check_least", "digest_of", "dtype_name", "from_torch", "loss_mask", "one_version", "pack", "to_torch",
    "token_ages", "token_staleness", "token_steps", "token_versions", "unpack",
]  # fmt: skip
