"""Columns: callers' values packed into arrays of a declared kind, dtype and trailing shape.

pack("answer", ["12", "345"]), pack("logprobs", [lp0, lp1])       # text, ragged float32
pack("reward", torch.tensor([0., 1.]))                            # fixed float32
pack("prompt", [[{"role": "user", "content": "2+3="}]])           # json"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import xxhash

from ..errors import SchemaError
from .dtypes import carrier, dtype_name, from_torch, is_torch
from .ragged import Array, Ragged

Kind = Literal["fixed", "ragged", "text", "bytes", "json"]
Values: TypeAlias = Array | Ragged | list[str] | list[bytes] | list[Any]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
_NUMBERS = {bool, int, float, complex}


class JsonValues(list[Any]):
    """Values of a json column: anything in JSON, one a row."""


class ColumnSpec(msgspec.Struct, frozen=True, array_like=True):
    """The type of a column. Its first write fixes it for all later ones."""

    kind: Kind
    dtype: str
    shape: tuple[int, ...] = ()
    """Trailing shape: of a row (fixed) or of one element of a row (ragged)."""

    @property
    def measurable(self) -> bool:
        """True if each row has one number: its value (fixed kind) or its length (other kinds)."""
        if self.kind != "fixed":
            return True
        dtype = carrier(self.dtype)
        return not self.shape and dtype.names is None and dtype.kind != "c"

    def __str__(self) -> str:
        if self.kind in ("text", "bytes", "json"):
            return self.kind
        shape = ", ".join(("n" if self.kind == "ragged" else "", *map(str, self.shape))).strip(", ")
        return f"{self.kind} {self.dtype}[{shape}]"


class Column(msgspec.Struct, frozen=True):
    """n packed values of one column, contiguous once stored. ``offsets``: None for the fixed kind."""

    spec: ColumnSpec
    values: Array
    offsets: Array | None

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1


def check_column_name(name: Any) -> None:
    """Raise SchemaError unless ``name`` is 1 to 100 of A-Z a-z 0-9 "_" "." "-", starting with a letter or "_"."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SchemaError(
            f"a column cannot be named {name!r:.120}: use 1 to 100 letters of A-Z and a-z, digits, '_', '.' and '-',"
            " starting with a letter or '_'"
        )


def pack(name: str, value: Any) -> Column:
    """Pack ``value``, one entry a row. Arrays are not copied. Takes numpy arrays and torch tensors (first dimension =
    rows), Ragged, and sequences of str, bytes, numbers, arrays (ragged), or records and lists of records (json), as
    chats. Raises SchemaError naming the column."""
    try:
        return _pack(value)
    except SchemaError as error:
        raise SchemaError(f"column {name!r}: {error}") from None


def _pack(value: Any) -> Column:
    if type(value) is not np.ndarray:
        if isinstance(value, Ragged):
            spec = ColumnSpec("ragged", dtype_name(value.values.dtype), value.values.shape[1:])
            return Column(spec, _plain(value.values), value.offsets)
        if is_torch(value):
            value = from_torch(value)
        if isinstance(value, np.ma.MaskedArray):
            raise SchemaError("a masked array cannot be stored: its mask would be lost; store it as another column")
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OUS":
        if value.ndim == 0:
            raise SchemaError("a single number is not a column; give one entry a row")
        return Column(ColumnSpec("fixed", dtype_name(value.dtype), value.shape[1:]), _plain(value), None)
    if isinstance(value, JsonValues):
        return _pack_bytes("json", [_json(number, row) for number, row in enumerate(value)])
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)):
        raise SchemaError(f"a {type(value).__name__} is not a column; give a sequence with one entry a row")
    rows = list(value)
    try:
        return _pack_sequence(rows)
    except (SchemaError, ValueError) as error:  # numpy's, of lists within lists
        odd = find_invalid_entry(rows)
        raise SchemaError(str(error) if odd is None else f"entry {odd[0]} is {odd[1]}") from None


def find_invalid_entry(rows: Iterable[Any]) -> tuple[int, str] | None:
    """Return position and description of the first entry unsupported by any column, or None."""
    for number, row in enumerate(rows):
        if isinstance(row, (str, bytes, bytearray, memoryview)) or is_torch(row) or is_nested(row):
            continue
        try:
            kind = np.asarray(row).dtype.kind
        except ValueError:  # lists of several lengths
            kind = "O"
        if kind in "OU":
            return number, _describe(row)
    return None


def is_nested(entry: Any) -> bool:
    """True for a record, and for a non-empty list of records, such as the messages of a chat."""
    return isinstance(entry, Mapping) or (
        isinstance(entry, (list, tuple)) and bool(entry) and all(isinstance(each, Mapping) for each in entry)
    )


def _describe(entry: Any) -> str:
    if isinstance(entry, int):
        return f"{entry}, which does not fit 64 bits"
    if isinstance(entry, (list, tuple)):
        kind = f"a {type(entry).__name__} of {' and '.join(sorted({type(each).__name__ for each in entry}))}"
    elif isinstance(entry, np.ndarray):
        kind = f"an array of dtype {entry.dtype}"
    else:
        kind = "None" if entry is None else f"of type {type(entry).__name__}"
    return f"{kind}; a column has one number, array of numbers, text, bytes or record a row"


def _pack_sequence(rows: list[Any]) -> Column:
    kinds = {type(row) for row in rows}
    if all(issubclass(k, str) for k in kinds):
        try:
            encoded = [row.encode() for row in rows]
        except UnicodeEncodeError as error:
            raise SchemaError(f"text that is not valid Unicode: {error}") from None
        return _pack_bytes("text", encoded)
    if all(issubclass(k, (bytes, bytearray, memoryview)) for k in kinds):
        return _pack_bytes("bytes", [row.tobytes() if isinstance(row, memoryview) else row for row in rows])
    if any(issubclass(k, (str, bytes, bytearray, memoryview)) for k in kinds):
        raise SchemaError(f"entries of different types are mixed: {', '.join(sorted(k.__name__ for k in kinds))}")
    plain = kinds <= _NUMBERS  # the usual case of rewards: no need to inspect each row
    if not plain and any(is_nested(row) for row in rows):
        for number, row in enumerate(rows):
            if not (is_nested(row) or (isinstance(row, (list, tuple)) and not row)):
                raise SchemaError(f"entry {number} is a {type(row).__name__}, and others are records; give only one")
        return _pack(JsonValues(rows))
    if not plain and any(is_torch(row) for row in rows):
        rows = [from_torch(row) if is_torch(row) else row for row in rows]
    numbers = [plain or isinstance(row, np.generic) or np.ndim(row) == 0 for row in rows]
    if all(numbers):
        array = np.asarray(rows)
        whole = array.dtype.kind == "f" and int in kinds
        if whole and any(kinds == {int} or int(a) != b for a, b in zip(array, rows, strict=True) if type(b) is int):
            raise SchemaError("integers that neither int64 nor float64 represents exactly")
        return Column(ColumnSpec("fixed", dtype_name(array.dtype)), array, None)
    if any(numbers):
        raise SchemaError("single numbers and arrays are mixed; give one or the other")
    if not any(isinstance(row, np.ndarray) or np.size(row) for row in rows):
        raise SchemaError(
            "every row is an empty list without a dtype; give empty arrays of the column's dtype, such as"
            " np.empty(0, np.int32)"
        )
    return _pack(Ragged.of(rows))


def _json(number: int, row: Any) -> bytes:
    try:
        text = msgspec.json.encode(row)
        nan = b"null" in text  # or None
        return json.dumps(msgspec.to_builtins(row, str_keys=True), ensure_ascii=False).encode() if nan else text
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"entry {number} has no form in JSON: {error}") from None


def _pack_bytes(kind: Kind, rows: list[Any]) -> Column:
    lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
    ragged = Ragged.from_lengths(np.frombuffer(b"".join(rows), np.uint8), lengths)
    return Column(ColumnSpec(kind, "uint8"), ragged.values, ragged.offsets)


def _plain(array: Array) -> Array:
    """Return the array in native byte order, contiguous or not: the copy to storage makes it so."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def digest_of(column: Column) -> bytes:
    """Return 16 bytes of a column's type and content (xxh3), independent of memory layout."""
    values = column.values if column.values.flags.c_contiguous else np.ascontiguousarray(column.values)
    digest = xxhash.xxh3_128(values.data, _seed(column.spec))
    if column.offsets is not None:
        digest.update(np.ascontiguousarray(column.offsets).data)
    return digest.digest()


@functools.lru_cache(1024)
def _seed(spec: ColumnSpec) -> int:
    return xxhash.xxh3_64_intdigest(str(spec).encode())


def unpack(column: Column) -> Values:
    """Return a column as a read-only array, a Ragged, or a list. Raises SchemaError for invalid UTF-8 or JSON."""
    if column.spec.kind in ("fixed", "ragged"):
        values = column.values
        if values.flags.writeable:
            values = values.view()
            values.setflags(write=False)
        return values if column.offsets is None else Ragged(values, column.offsets)
    assert column.offsets is not None
    raw = column.values.tobytes()
    ends = column.offsets.tolist()
    pieces = [raw[a:b] for a, b in itertools.pairwise(ends)]
    if column.spec.kind == "bytes":
        return pieces
    if column.spec.kind == "json":
        try:
            return JsonValues(map(json.loads if b"NaN" in raw or b"Infinity" in raw else msgspec.json.decode, pieces))
        except (ValueError, RecursionError) as error:
            raise SchemaError(f"a json column holds bytes that are not JSON: {error}") from None
    try:
        return [p.decode() for p in pieces]
    except UnicodeDecodeError as error:
        raise SchemaError(f"a text column holds bytes that are not UTF-8: {error}") from None


def empty(spec: ColumnSpec) -> Column:
    """Return a column of 0 rows."""
    offsets = None if spec.kind == "fixed" else np.zeros(1, np.int64)
    return Column(spec, np.empty((0, *spec.shape), carrier(spec.dtype)), offsets)
