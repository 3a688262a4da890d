"""The safetensors format: headers, and the byte range of each tensor in a file.

    layout = plan({"w": ("bfloat16", (4, 8))})          # to write: layout.header, then each tensor at layout.offsets[name]
    header = read_header(file)                          # to read: header.tensors["w"].start

A file holds the length of its header (8 bytes, little-endian), the header (JSON), and the tensors' bytes without
gaps. Source: https://github.com/huggingface/safetensors#format. A dtype without a safetensors code is stored as
bytes (U8) with one more dimension, and the metadata keep its name."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import msgspec

from .dtypes import SAFETENSORS_CODES, carrier

METADATA = "__metadata__"
MAX_HEADER_BYTES = 100 << 20
_NAMES = {code: name for name, code in SAFETENSORS_CODES.items()}


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor in a header. ``data_offsets``: byte range in the file's data, end exclusive."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class StoredTensor(NamedTuple):
    """A tensor in a file, at bytes ``start`` to ``stop``. ``dtype``: its name; its code if it has none here."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """A decoded header. ``nbytes``: its size with the length field. ``end``: the byte after the last tensor."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    nbytes: int
    end: int


@dataclass(frozen=True)
class FileLayout:
    """A file of ``nbytes`` to write. ``header``: its first bytes. ``offsets``: first byte of each tensor."""

    header: bytes
    offsets: dict[str, int]
    nbytes: int


def entry(dtype: str, shape: tuple[int, ...], at: int) -> TensorEntry:
    """Return the header entry of a tensor at byte ``at`` of the file's data."""
    code, itemsize = SAFETENSORS_CODES.get(dtype), carrier(dtype).itemsize
    stored = shape if code else (*shape, itemsize)
    return TensorEntry(code or "U8", stored, (at, at + math.prod(shape) * itemsize))


def dtype_metadata(name: str, dtype: str) -> dict[str, str]:
    """Return metadata with the dtype of a tensor stored as bytes, else {}."""
    return {} if dtype in SAFETENSORS_CODES else {f"dtype of {name}": dtype}


def encode_header(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str], align: int = 8) -> bytes:
    """Return the header with its length field, padded: data start at a multiple of ``align`` bytes."""
    text = msgspec.json.encode({**({METADATA: metadata} if metadata else {}), **tensors})
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text


def plan(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None, align: int = 8
) -> FileLayout:
    """Lay out tensors, given by dtype and shape, in one file: wide elements first, aligned without
    gaps; tensors of one width keep their order. ``metadata``: default ``{"format": "pt"}``."""
    found = dict({"format": "pt"} if metadata is None else metadata)
    entries: dict[str, TensorEntry] = {}
    end = 0
    for name in sorted(tensors, key=lambda each: -carrier(tensors[each][0]).itemsize):
        dtype, shape = tensors[name]
        entries[name] = entry(dtype, shape, end)
        found |= dtype_metadata(name, dtype)
        end = entries[name].data_offsets[1]
    header = encode_header(entries, found, align)
    offsets = {name: len(header) + each.data_offsets[0] for name, each in entries.items()}
    return FileLayout(header, offsets, len(header) + end)


def read_header(file: BinaryIO) -> Header:
    """Read an open file's header. Raises ValueError if no safetensors file, or truncated."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    begin = 8 + length
    if begin > size or length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    try:
        raw = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop(METADATA, msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {name: msgspec.json.decode(each, type=TensorEntry) for name, each in raw.items()}
    except msgspec.MsgspecError as error:
        raise ValueError(f"the header is damaged: {error}") from None
    tensors: dict[str, StoredTensor] = {}
    end = begin
    for name, each in entries.items():
        start, stop = each.data_offsets
        dtype = _NAMES.get(each.dtype, each.dtype)
        known = each.dtype in _NAMES
        expected = math.prod(each.shape) * carrier(dtype).itemsize if known else stop - start
        if min(each.shape, default=0) < 0 or start < 0 or stop - start != expected:
            raise ValueError(f"tensor {name!r} of {each.dtype}{list(each.shape)} at bytes {start} to {stop}")
        if begin + stop > size:
            raise ValueError(f"the file is cut short: tensor {name!r} ends at byte {begin + stop} of {size}")
        tensors[name] = StoredTensor(dtype, each.shape, begin + start, begin + stop)
        end = max(end, begin + stop)
    return Header(tensors, metadata, begin, end)
