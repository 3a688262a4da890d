"""The safetensors format: headers, and where in a file each tensor lies.

    layout = plan({"w": ("bfloat16", (4, 8))})          # to write: layout.header, then each tensor at layout.offsets[name]
    header = read_header(file)                          # to read: header.tensors["w"].start

A file is the length of its header (8 bytes, little-endian), the header (JSON), and the tensors' bytes without holes.
Source: https://github.com/huggingface/safetensors#format. A dtype without a name in safetensors is stored as bytes (U8) with one more
dimension, and its name is kept in the metadata.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import msgspec

from .dtypes import carrier

METADATA = "__metadata__"
CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
"""The code of each dtype that safetensors has a name for."""
MAX_HEADER_BYTES = 100 << 20
_NAMES = {code: name for name, code in CODES.items()}


class Entry(msgspec.Struct, frozen=True):
    """A tensor in a header. ``data_offsets``: its first byte and the one after its last, in the file's data."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class StoredTensor(NamedTuple):
    """A tensor in a file: its dtype by our name (by its code if it has none), and its bytes ``start`` to ``stop`` in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """``nbytes``: of the header with its length. ``end``: the byte after the last tensor."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    nbytes: int
    end: int


@dataclass(frozen=True)
class Layout:
    """``header``: the bytes at the begin of the file. ``offsets``: of each tensor in the file. ``nbytes``: of the whole file."""

    header: bytes
    offsets: dict[str, int]
    nbytes: int


def entry(dtype: str, shape: tuple[int, ...], at: int) -> Entry:
    """The header's entry of a tensor whose data begins at byte ``at`` of the file's data."""
    code, itemsize = CODES.get(dtype), carrier(dtype).itemsize
    stored = shape if code else (*shape, itemsize)
    return Entry(code or "U8", stored, (at, at + math.prod(shape) * itemsize))


def dtype_metadata(name: str, dtype: str) -> dict[str, str]:
    """Metadata that keeps the dtype of a tensor that is stored as bytes; empty for others."""
    return {} if dtype in CODES else {f"dtype of {name}": dtype}


def encode_header(tensors: Mapping[str, Entry], metadata: Mapping[str, str], align: int = 8) -> bytes:
    """The begin of a file, padded so that the data begins at a multiple of ``align`` bytes. Without metadata there is no entry for it."""
    said = {METADATA: metadata} if metadata else {}
    text = msgspec.json.encode({**said, **tensors})
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text


def plan(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None, align: int = 8
) -> Layout:
    """Lay tensors, given by dtype and shape, out in one file. Wide elements come first, so that each tensor is aligned without holes;
    tensors of one width keep their order. ``metadata``: the default is ``{"format": "pt"}``."""
    said = dict({"format": "pt"} if metadata is None else metadata)
    entries: dict[str, Entry] = {}
    end = 0
    for name in sorted(tensors, key=lambda each: -carrier(tensors[each][0]).itemsize):
        dtype, shape = tensors[name]
        entries[name] = entry(dtype, shape, end)
        said |= dtype_metadata(name, dtype)
        end = entries[name].data_offsets[1]
    header = encode_header(entries, said, align)
    offsets = {name: len(header) + each.data_offsets[0] for name, each in entries.items()}
    return Layout(header, offsets, len(header) + end)


def read_header(file: BinaryIO) -> Header:
    """Read the header at the begin of an open file. Raises ValueError if it is no safetensors file, or cut short."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    begin = 8 + length
    if begin > size or length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    try:
        raw = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop(METADATA, msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {name: msgspec.json.decode(each, type=Entry) for name, each in raw.items()}
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
            raise ValueError(f"it is cut short: tensor {name!r} ends at byte {begin + stop} of {size}")
        tensors[name] = StoredTensor(dtype, each.shape, begin + start, begin + stop)
        end = max(end, begin + stop)
    return Header(tensors, metadata, begin, end)
