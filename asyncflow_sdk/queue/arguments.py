"""Arguments: what a caller handed in is of the type its command says, seen before anything is written or sent.

A server cannot read a call with anything else in it, and could then not free the payload that came with it.
"""

from __future__ import annotations

import functools
import types
import typing
from typing import Any

import msgspec
import numpy as np

from ..errors import SchemaError
from ..types import check_column_name

_LARGEST = 1 << 63
_EXACT: dict[Any, tuple[type, ...]] = {
    int: (int,), float: (float, int), str: (str,), bool: (bool,), bytes: (bytes,), type(None): (type(None),),
}  # fmt: skip


def check_arguments(command: msgspec.Struct) -> None:
    """Raises TypeError naming the argument; SchemaError for what is not a number or past 64 bits, and for text that is
    no Unicode."""
    for name, allowed in _fields(type(command)):
        value = getattr(command, name)
        kind = type(value)
        if kind in allowed:
            if kind is int and not -_LARGEST <= value < _LARGEST:
                raise SchemaError(f"{name} is past the largest number, 2**63 - 1")
            if kind is float and value != value:
                raise SchemaError(f"{name} is not a number")
            if kind is str and not value.isascii():
                _check_text(name, value)
        elif not (isinstance(value, np.generic) and type(value.item()) in allowed):
            words = " or ".join("None" if kind is type(None) else kind.__name__ for kind in allowed)
            raise TypeError(f"{name} must be {words}, not {type(value).__name__}: {value!r:.100}")


def check_columns(what: str, names: Any) -> tuple[str, ...]:
    """Names of columns to be. Raises SchemaError for one name, which is a sequence of letters, and for what names no column."""
    found = _listed(what, names)
    for name in found:
        try:
            check_column_name(name)
        except SchemaError as error:
            raise SchemaError(f"{what}: {error}") from None
    return found


def check_names(what: str, names: Any, *, empty: bool = False) -> tuple[str, ...]:
    """Names that are looked up, or of partitions. Raises SchemaError for one name, which is a sequence of letters, and for what is
    no name. ``empty``: "" is one."""
    found = _listed(what, names)
    for name in found:
        if name or not empty:
            check_name(what, name)
    return found


def _listed(what: str, names: Any) -> tuple[Any, ...]:
    if isinstance(names, str):
        raise SchemaError(f"{what} is a list of names; {names!r} is one name: write [{names!r}]")
    try:
        return tuple(names)
    except TypeError:
        raise SchemaError(f"{what} is a list of names, not {names!r:.100}") from None


def check_name(what: str, name: Any) -> None:
    """Raises SchemaError for what is no name."""
    if not isinstance(name, str) or not name or len(name) > 1000:
        raise SchemaError(f"{what}: a name is text of 1 to 1,000 letters, not {name!r:.100}")
    if not name.isascii():
        _check_text(what, name)


def plain_text(text: str, most: int = 4000) -> str:
    """Text that can be sent, whatever an exception made it of; of one that is too long the beginning and the end."""
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return text.encode(errors="backslashreplace").decode()


def _check_text(name: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise SchemaError(f"{name}: text that is not valid Unicode: {error}") from None


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, tuple[type, ...]], ...]:
    """The plain fields of a command and the types they may have."""
    found = []
    for field in msgspec.structs.fields(kind):
        parts = typing.get_args(field.type) if _is_union(field.type) else (field.type,)
        if all(part in _EXACT for part in parts):
            found.append((field.name, tuple(kind for part in parts for kind in _EXACT[part])))
    return tuple(found)


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)
