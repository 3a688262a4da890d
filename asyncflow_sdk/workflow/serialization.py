"""Serialization of workflows and their parts as JSON, to resume a run and to start its workers.

A ``Serializable`` object records its constructor's arguments and is made again from them. Arguments
are plain values, dataclasses, msgspec Structs, Serializable objects, and objects with an import
path.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
import numpy as np

from ..errors import ConfigError
from ..plugins import import_name, import_path
from ..types.validation import check_keywords, check_types

_Arguments = ParamSpec("_Arguments")
_Options = TypeVar("_Options")
_Self = TypeVar("_Self")
_Made = TypeVar("_Made", bound="Serializable")
TYPE, NAME, MAP, FLOAT = "$type", "$name", "$map", "$float"


class Serializable:
    """Records the constructor's arguments in ``init_args``. Raises ConfigError for an argument of another type than
    annotated."""

    init_args: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = super().__new__(cls)
        self.init_args = {}
        signature = inspect.signature(cls)
        check_keywords(cls, kwargs)
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return self  # the constructor raises it, too
        for name, value in given.items():
            more = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            self.init_args.update(dict(value) if more else {name: value})
        check_types(cls, {name: value for name, value in given.items() if name in self.init_args})
        return self

    def changed(self: _Made, **arguments: Any) -> _Made:
        """Return a copy with other constructor arguments."""
        return type(self)(**{**self.init_args, **arguments})


def keywords_of(
    options: Callable[_Arguments, _Options],
) -> Callable[[Callable[[_Self, _Options], None]], Callable[Concatenate[_Self, _Arguments], None]]:
    """Return a decorator of ``__init__(self, options)``: its signature are the fields of the class ``options``."""
    hints, fields = typing.get_type_hints(options), inspect.signature(options).parameters.values()
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)

    def _decorate(init: Callable[[_Self, _Options], None]) -> Callable[Concatenate[_Self, _Arguments], None]:
        @functools.wraps(init)
        def __init__(self: _Self, /, *args: _Arguments.args, **given: _Arguments.kwargs) -> None:
            try:
                made = options(*args, **given)
            except TypeError as error:  # of the caller, who knows no class of options
                raise TypeError(str(error).replace(options.__name__, type(self).__name__, 1)) from None
            init(self, made)

        __init__.__signature__ = inspect.Signature([this, *fields], return_annotation="None")  # type: ignore[attr-defined]
        __init__.__annotations__ = {**hints, "return": None}
        del __init__.__wrapped__  # it has other arguments
        return __init__

    return _decorate


def to_json(thing: Any, where: str) -> Any:
    """Convert a value to JSON types. Raises ConfigError with the path ``where`` of a value without a JSON form."""
    if isinstance(thing, float) and not math.isfinite(thing):  # JSON has none
        return {FLOAT: str(thing)}
    if thing is None or isinstance(thing, (bool, int, float, str)):
        return thing
    if isinstance(thing, Path):
        return str(thing)
    if isinstance(thing, np.generic):
        return to_json(thing.item(), where)
    if isinstance(thing, Serializable):
        return {TYPE: _name_of(type(thing), where), **_all(thing.init_args, where)}
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        fields = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing) if f.init}
        return {TYPE: _name_of(type(thing), where), **_all(fields, where)}
    if isinstance(thing, msgspec.Struct):
        fields = {name: getattr(thing, name) for name in thing.__struct_fields__}
        return {TYPE: _name_of(type(thing), where), **_all(fields, where)}
    if isinstance(thing, Mapping):
        return {MAP: _all(thing, where)}
    if isinstance(thing, (list, tuple, set, frozenset)):
        return [to_json(each, f"{where}[{number}]") for number, each in enumerate(thing)]
    if callable(thing):
        return {NAME: _name_of(thing, where)}
    raise ConfigError(f"{where} is a {type(thing).__name__}, which a run that is to be resumed cannot write down")


def from_json(data: Any, **more: Any) -> Any:
    """Make the value that ``to_json`` converted. ``more``: further arguments of the outermost constructor. Raises
    ConfigError if an object cannot be imported, and the constructors' errors."""
    if isinstance(data, list):
        return [from_json(each) for each in data]
    if not isinstance(data, dict):
        return data
    if NAME in data:
        return import_name(data[NAME])
    if FLOAT in data:
        return float(data[FLOAT])
    if MAP in data:
        return {name: from_json(value) for name, value in data[MAP].items()}
    kind = import_name(data[TYPE])
    if not isinstance(kind, type) or not (
        issubclass(kind, (Serializable, msgspec.Struct)) or dataclasses.is_dataclass(kind)
    ):
        raise ConfigError(f"{data[TYPE]!r} is nothing that a workflow is made of")
    return kind(**{name: from_json(value) for name, value in data.items() if name != TYPE}, **more)


def differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, old value, new value) of each value that differs in two results of ``to_json``; None for a
    missing one."""
    if isinstance(old, dict) and isinstance(new, dict) and old.get(TYPE) == new.get(TYPE) and NAME not in old:
        if TYPE in old and old.keys() < new.keys() and dataclasses.is_dataclass(import_name(old[TYPE])):
            old = to_json(from_json(old), name)  # with fields that its version of the SDK lacked
        for key in dict.fromkeys((*old, *new)):
            inner = name if key == MAP else f"{name}.{key}".lstrip(".")
            yield from differences(old.get(key), new.get(key), inner)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{name}.{number}")
    elif old != new:
        yield name, old, new


def _all(things: Mapping[Any, Any], where: str) -> dict[str, Any]:
    return {str(name): to_json(value, f"{where}.{name}" if where else str(name)) for name, value in things.items()}


def _name_of(thing: Any, where: str) -> str:
    path = import_path(thing)
    if path is None:
        name = getattr(thing, "__qualname__", repr(thing))
        raise ConfigError(
            f"{where}: {name} cannot be imported by another process, as it must be to resume this run: put it into"
            " a module (not the script itself, a notebook or a lambda), or run without checkpoint="
        )
    return path
