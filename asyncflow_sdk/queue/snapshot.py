"""Snapshots: the state of a queue server as bytes, without pickle.

    data = encode(state, parts)     # dicts, lists, sets, deques, arrays, numbers, and objects of our packages
    state = decode(data, parts)     # equal, and shared objects are shared again

Encoding is structural: every attribute of every object is written, except those named in its
class's ``TRANSIENT``, which the constructor makes anew. If the class has ``KEPT``, only the
attributes named there are written. ``parts`` are objects outside the snapshot, by name; a reference
to one is written as its name. Decoding creates only classes of the packages below, imports nothing,
and calls only constructors without arguments.
"""

from __future__ import annotations

import os
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import xxhash

from ..errors import AsyncFlowError, ProtocolError
from ..memory import sync_directory

PACKAGES = ("ledger", "memory", "queue", "types", "wire")
FORMAT = b"5"
MAGIC = b"asyncfl-snapsh" + FORMAT + b"\n"
_LENGTH = struct.Struct("<QQ")
_PACKAGE = __name__.split(".")[0]
_PLAIN = (type(None), bool, int, float, str, bytes)
_FACTORIES: dict[str, Callable[[], Any]] = {"Counter": Counter, "list": list, "dict": dict, "set": set, "int": int}
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


def encode(state: Any, parts: Mapping[str, object] = MappingProxyType({})) -> bytes:
    """Return the state as bytes. Raises TypeError naming an object that cannot be written."""
    return _pack(_Encoder(parts).node(state, "state"))


def decode(data: bytes, parts: Mapping[str, object] = MappingProxyType({})) -> Any:
    """Return the state. Raises ProtocolError for bytes not made by ``encode``."""
    try:
        return _Decoder(parts).value(_unpack(data))
    except AsyncFlowError:
        raise
    except Exception as error:
        raise ProtocolError(f"not a snapshot: {error!r}") from error


def write(path: Path, head: bytes, body: bytes) -> None:
    """Write a file atomically, also if the host crashes. Raises OSError."""
    part = path.with_suffix(".part")
    try:
        with os.fdopen(os.open(part, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(MAGIC)
            for content in (head, body):
                file.write(_LENGTH.pack(len(content), xxhash.xxh3_64_intdigest(content)))
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_directory(path.parent)
    finally:
        part.unlink(missing_ok=True)


def read(path: Path) -> tuple[bytes, bytes]:
    """Return head and encoded state. Raises ProtocolError for a damaged file or another format."""
    data = path.read_bytes()
    if data[: len(MAGIC)] != MAGIC and data[: len(MAGIC) - 2] == MAGIC[:-2]:
        raise ProtocolError(
            f"{path} has snapshot format {data[len(MAGIC) - 2 : len(MAGIC) - 1].decode(errors='replace')!r}; this"
            f" asyncflow-sdk reads format {FORMAT.decode()!r}: use the version that wrote it"
        )
    found = []
    at = len(MAGIC)
    for _ in range(2):
        length, checksum = _LENGTH.unpack_from(data, at) if len(data) >= at + _LENGTH.size else (0, 1)
        content = data[at + _LENGTH.size : at + _LENGTH.size + length]
        if data[: len(MAGIC)] != MAGIC or len(content) != length or xxhash.xxh3_64_intdigest(content) != checksum:
            raise ProtocolError(f"{path} is damaged")
        found.append(content)
        at += _LENGTH.size + length
    return found[0], found[1]


def attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes to write: those in ``KEPT``, or all but those in ``TRANSIENT``."""
    kept = getattr(type(thing), "KEPT", None)
    if kept is not None:
        return {name: getattr(thing, name) for name in kept}
    named = dict(getattr(thing, "__dict__", {}))
    for cls in type(thing).__mro__:
        slots = getattr(cls, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                named[name] = getattr(thing, name)
    for name in getattr(type(thing), "TRANSIENT", ()):
        named.pop(name, None)
    return named


class _Encoder:
    """Encodes one state. Objects are numbered in order of their first appearance."""

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._parts = {id(part): name for name, part in parts.items()}
        self._known: dict[int, int] = {}
        self._kept: list[Any] = []  # keeps objects alive, so that their ids stay unique

    def node(self, thing: Any, where: str) -> Any:
        """Return plain values unchanged, anything else as a list beginning with its kind."""
        kind = type(thing)
        if kind in _PLAIN:
            return thing
        if kind is tuple:
            return ["tuple", *self._all(thing, where)]
        if (part := self._parts.get(id(thing))) is not None:
            return ["part", part]
        if (known := self._known.get(id(thing))) is not None:
            return ["same", known]
        self._known[id(thing)] = len(self._kept)
        self._kept.append(thing)
        if kind is np.ndarray and thing.dtype.kind in "biuf":
            return ["array", thing.dtype.str, list(thing.shape), np.ascontiguousarray(thing).tobytes()]
        if isinstance(thing, np.generic) and thing.dtype.kind in "biuf":
            return ["number", thing.dtype.str, thing.tobytes()]
        if kind in (dict, Counter, OrderedDict):
            return [kind.__name__, *self._pairs(thing, where)]
        if kind is defaultdict:
            factory = getattr(thing.default_factory, "__name__", "")
            if factory not in _FACTORIES:
                raise TypeError(f"{where}: a defaultdict of {thing.default_factory} cannot be written")
            return ["defaultdict", factory, *self._pairs(thing, where)]
        if kind is list:
            return ["list", *self._all(thing, where)]
        if kind is deque:
            return ["deque", thing.maxlen, *self._all(thing, where)]
        if isinstance(thing, tuple):
            return ["named", _known_name(kind, where), *self._all(thing, where)]
        if kind in (set, frozenset):
            return [kind.__name__, *self._all(sorted(thing), where)]
        name = _known_name(kind, where)
        if isinstance(thing, msgspec.Struct) and kind.__struct_config__.frozen:
            return ["struct", name, _pack(thing)]
        if isinstance(thing, msgspec.Struct):
            named = {field: getattr(thing, field) for field in kind.__struct_fields__}
        else:
            named = attributes(thing)
        flat: list[Any] = ["object", name]
        for attribute, value in named.items():
            flat += (attribute, self.node(value, f"{where}.{attribute}"))
        return flat

    def _all(self, things: Iterable[Any], where: str) -> list[Any]:
        return [thing if type(thing) in _PLAIN else self.node(thing, where) for thing in things]

    def _pairs(self, things: dict[Any, Any], where: str) -> list[Any]:
        flat: list[Any] = []
        for key, value in things.items():
            flat += (
                key if type(key) in _PLAIN else self.node(key, where),
                value if type(value) in _PLAIN else self.node(value, f"{where}[{key!r}]"),
            )
        return flat


class _Decoder:
    def __init__(self, parts: Mapping[str, object]) -> None:
        self._parts = parts
        self._known: list[Any] = []
        self._types: dict[str, type] = {}

    def value(self, node: Any) -> Any:
        """Return the object for an encoded node."""
        if type(node) is not list:
            return node
        kind, rest = node[0], node[1:]
        if kind == "tuple":
            return tuple(self.value(each) for each in rest)
        if kind == "part":
            return self._parts[rest[0]]
        if kind == "same":
            return self._known[rest[0]]
        if kind in ("array", "number", "struct"):
            self._known.append(self._leaf(kind, rest))
            return self._known[-1]
        return self._container(kind, rest)

    def _leaf(self, kind: str, rest: list[Any]) -> Any:
        if kind == "struct":
            return msgspec.msgpack.decode(rest[1], type=self._type(rest[0]))
        dtype = np.dtype(rest[0])
        if dtype.kind not in "biuf":
            raise ProtocolError(f"a snapshot cannot contain {dtype}")
        if kind == "number":
            return np.frombuffer(rest[1], dtype)[0]
        return np.frombuffer(rest[2], dtype).reshape(rest[1]).copy()

    def _container(self, kind: str, rest: list[Any]) -> Any:
        made: Any
        cls: Any
        at = len(self._known)
        self._known.append(None)
        if kind in ("frozenset", "named"):
            cls = frozenset if kind == "frozenset" else self._type(rest.pop(0))
            values = [self.value(each) for each in rest]
            made = self._known[at] = cls(values) if cls is frozenset else cls(*values)
            return made
        if kind == "object":
            cls = self._type(rest[0])
            made = cls() if getattr(cls, "TRANSIENT", ()) else cls.__new__(cls)
        elif kind == "defaultdict":
            made = defaultdict(_FACTORIES[rest[0]])
        elif kind == "deque":
            made = deque(maxlen=rest[0])
        else:
            made = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict, "list": list, "set": set}[kind]()
        self._known[at] = made
        rest = rest[1:] if kind in ("object", "defaultdict", "deque") else rest
        if kind == "object":
            for name, node in zip(rest[::2], rest[1::2], strict=True):
                object.__setattr__(made, name, self.value(node))
        elif kind in ("dict", "Counter", "OrderedDict", "defaultdict"):
            for key, node in zip(rest[::2], rest[1::2], strict=True):
                made[self.value(key)] = self.value(node)
        elif kind == "set":
            made.update(self.value(each) for each in rest)
        else:
            made.extend(self.value(each) for each in rest)
        return made

    def _type(self, name: str) -> type:
        if name not in self._types:
            self._types = self._types or classes()
            if name not in self._types:
                raise ProtocolError(f"the snapshot names an unknown class, {name!r}")
        return self._types[name]


def _known_name(cls: type, where: str) -> str:
    name = _name(cls)
    if name is None:
        raise TypeError(f"{where}: a {cls.__module__}.{cls.__qualname__} cannot be written")
    return name


def classes() -> dict[str, type]:
    """Return the imported classes of our packages, by their names in snapshots."""
    named: dict[str, type] = {}
    for module in [module for name, module in sys.modules.items() if name.startswith(f"{_PACKAGE}.")]:
        for cls in list(vars(module).values()):
            if isinstance(cls, type) and cls.__module__ == module.__name__ and (name := _name(cls)) is not None:
                assert named.setdefault(name, cls) is cls, f"two classes are {name}"
    return named


def _name(cls: type) -> str | None:
    """Return a class's name in snapshots, independent of its module; None outside our packages."""
    top, _, module = cls.__module__.partition(".")
    package = module.partition(".")[0]
    if top != _PACKAGE or package not in PACKAGES or issubclass(cls, BaseException):
        return None
    return f"{package}:{cls.__qualname__}"
