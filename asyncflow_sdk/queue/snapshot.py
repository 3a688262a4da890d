"""Snapshots: the state of a queue server as bytes, without pickle.

    data = encode(state, parts)     # dicts, lists, sets, deques, arrays, numbers, and objects of our packages
    state = decode(data, parts)     # equal, and shared objects are shared again

Encoding is structural: every attribute of every object is written, except names in its class's ``TRANSIENT``; the
constructor makes these anew. ``parts`` are objects outside the snapshot, by name; a reference to one is written as
its name. Decoding creates only classes of the packages below, imports nothing, and calls only constructors without
arguments.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from ..errors import AsyncFlowError, ProtocolError

PACKAGES = ("ledger", "memory", "queue", "types", "wire")
_PACKAGE = __name__.split(".")[0]
_PLAIN = (type(None), bool, int, float, str, bytes)
_CONTAINERS: dict[str, Any] = {each.__name__: each for each in (dict, Counter, list, deque, set, frozenset)}
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


def encode(state: Any, parts: Mapping[str, object] = MappingProxyType({})) -> bytes:
    """Return the state as bytes. Raises TypeError naming an unknown object."""
    return _pack(_Encoder(parts).node(state, "state"))


def decode(data: bytes, parts: Mapping[str, object] = MappingProxyType({})) -> Any:
    """Return the state. Raises ProtocolError for bytes not made by ``encode``."""
    try:
        return _Decoder(parts).value(_unpack(data))
    except AsyncFlowError:
        raise
    except Exception as error:
        raise ProtocolError(f"not a snapshot: {error!r}") from error


def attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes to write: all but those in ``TRANSIENT``."""
    transient = getattr(type(thing), "TRANSIENT", ())
    return {name: value for name, value in vars(thing).items() if name not in transient}


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
        if isinstance(thing, np.ndarray | np.generic) and thing.dtype.kind in "biuf":
            shape = list(thing.shape) if kind is np.ndarray else None
            return ["array", thing.dtype.str, shape, thing.tobytes()]
        if _CONTAINERS.get(kind.__name__) is kind:
            if isinstance(thing, dict):
                items = [item for pair in thing.items() for item in pair]
            else:
                items = sorted(thing) if isinstance(thing, set | frozenset) else thing
            return ["items", kind.__name__, getattr(thing, "maxlen", None), *self._all(items, where)]
        name = _name(kind)
        if name is None:
            raise TypeError(f"{where}: a {kind.__module__}.{kind.__qualname__} cannot be written")
        if isinstance(thing, tuple):
            return ["items", name, None, *self._all(thing, where)]
        if isinstance(thing, msgspec.Struct):
            if kind.__struct_config__.frozen:
                return ["struct", name, _pack(thing)]
            named = msgspec.structs.asdict(thing)
        else:
            named = attributes(thing)
        flat: list[Any] = ["object", name]
        for attribute, value in named.items():
            flat += (attribute, self.node(value, f"{where}.{attribute}"))
        return flat

    def _all(self, things: Iterable[Any], where: str) -> list[Any]:
        return [thing if type(thing) in _PLAIN else self.node(thing, where) for thing in things]


class _Decoder:
    def __init__(self, parts: Mapping[str, object]) -> None:
        self._parts = parts
        self._known: list[Any] = []
        self._types = classes()

    def value(self, node: Any) -> Any:
        """Return the object for an encoded node."""
        if type(node) is not list:
            return node
        kind, first, *rest = node if len(node) > 1 else (*node, None)
        if kind == "tuple":
            return tuple(self.value(each) for each in node[1:])
        if kind == "part":
            return self._parts[first]
        if kind == "same":
            return self._known[first]
        at = len(self._known)
        self._known.append(None)
        if kind == "items":
            return self._container(at, first, *rest)
        if kind == "array":
            dtype, (shape, data) = np.dtype(first), rest
            if dtype.kind not in "biuf":
                raise ProtocolError(f"a snapshot cannot contain {dtype}")
            array = np.frombuffer(data, dtype)
            self._known[at] = array[0] if shape is None else array.reshape(shape).copy()
        elif kind == "struct":
            self._known[at] = msgspec.msgpack.decode(rest[0], type=self._type(first))
        elif kind == "object":
            cls: Any = self._type(first)
            made = self._known[at] = cls() if getattr(cls, "TRANSIENT", ()) else cls.__new__(cls)
            for name, each in zip(rest[::2], rest[1::2], strict=True):
                object.__setattr__(made, name, self.value(each))
        else:
            raise ProtocolError(f"a snapshot cannot contain {kind!r}")
        return self._known[at]

    def _container(self, at: int, name: str, limit: int | None, *items: Any) -> Any:
        cls = _CONTAINERS.get(name)
        if cls is None or cls is frozenset:
            values = [self.value(each) for each in items]
            self._known[at] = frozenset(values) if cls is frozenset else self._type(name)(*values)
            return self._known[at]
        made = self._known[at] = deque(maxlen=limit) if cls is deque else cls()  # items may refer to it
        decoded = map(self.value, items)
        if isinstance(made, dict):
            for key in decoded:
                made[key] = next(decoded)
        elif isinstance(made, set):
            made.update(decoded)
        else:
            made.extend(decoded)
        return made

    def _type(self, name: str) -> type:
        if name not in self._types:
            raise ProtocolError(f"the snapshot names an unknown class, {name!r}")
        return self._types[name]


def classes() -> dict[str, type]:
    """Return the imported classes of our packages, by their names in snapshots."""
    named: dict[str, type] = {}
    for module in [module for name, module in list(sys.modules.items()) if name.startswith(f"{_PACKAGE}.")]:
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
