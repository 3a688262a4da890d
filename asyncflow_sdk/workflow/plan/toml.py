"""Workflows as TOML: names as in Python, a table for each object, functions by import path.

    steps = 200
    batch_size = 256
    prompts = "data.jsonl"                      # paths are relative to the file
    reward = "rewards:exact_match"              # modules beside the file can be imported
    rollout = { engine = "transformers", model = "model", group_size = 8, sampling = { max_tokens = 32 } }
    train = { engine = "torch", model = "model", learning_rate = 1e-6 }

workflow = load_workflow("run.toml", {"train.learning_rate": "1e-5"})
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ...errors import ConfigError, PluginError
from ...plugins import import_name, registry
from ...types.validation import check_types, place_of
from ..evaluation import Evaluation
from ..model_folder import is_hub_name
from ..specs import Rollout, Stage, Train
from ..work import Generate, Logprobs
from ..workflow import Workflow
from .problems import Key, error_sink

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_WORKS = {"logprobs": Logprobs, "generate": Generate}
_SPECS = (Rollout, Stage, Train, Evaluation)


def load_workflow(path: str | os.PathLike[str], changes: Mapping[str, str] | None = None) -> Workflow:
    """Read a workflow from a file. ``changes``: TOML values by dotted key ("train.learning_rate": "1e-5"); text needs
    no quotes. Adds the file's folder to ``sys.path``. Raises ConfigError with every wrong key, and the nearest known
    key."""
    return _File(Path(path), changes or {}).workflow()


def problems_of_file(path: str | os.PathLike[str]) -> list[str]:
    """Return the errors of ``load_workflow``, each with its key; empty for a valid file. Raises ConfigError for a
    file that cannot be read or is no TOML."""
    file = _File(Path(path), {})
    try:
        file.workflow()
    except ConfigError:
        return list(file.errors)
    return []


class _InvalidValue(Exception):
    """Raised for a wrong value after its error was added to ``errors``."""


class _File:
    """A TOML file with changed values. ``errors``: found so far, with their keys."""

    def __init__(self, path: Path, changes: Mapping[str, str]) -> None:
        self.path = path
        try:
            self.values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path} is no TOML: {error}") from None
        self._changes: dict[Key, str] = {}
        self.errors: dict[str, None] = {}
        for name, value in changes.items():
            self._change(name, value)

    def workflow(self) -> Workflow:
        """Make the workflow. Raises one ConfigError with all errors."""
        folder = str(self.path.parent.resolve())
        if folder not in sys.path:
            sys.path.insert(0, folder)
        arguments: dict[str, Any] = {}
        with contextlib.suppress(_InvalidValue):
            arguments = self._arguments(Workflow, self.values, ())
            try:
                with error_sink(lambda key, error: self._add_error(key, str(error))):
                    return Workflow(**arguments)
            except (ConfigError, PluginError) as error:
                if not self.errors:  # raised before the checks, which report to the sink
                    self._add_error(_key_of(str(error), arguments), str(error))
        listed = list(self.errors)
        if len(listed) == 1:
            raise ConfigError(listed[0])
        raise ConfigError("\n  ".join([f"{len(listed)} things in {self.path} cannot work:", *listed]))

    # ---- errors

    def _add_error(self, key: Key, text: str) -> None:
        if key and not isinstance(self.values.get(str(key[0])), list):  # the only rollout has no number
            key = tuple(part for part in key if isinstance(part, str))
        near = [key[:end] for end in range(len(key), 0, -1) if key[:end] in self._changes]
        places = [self._changes[near[0]] if near else str(self.path)]
        if key and near[:1] != [key]:
            places.append(_dotted(key))
        self.errors[": ".join([*places, text])] = None

    def _fail(self, key: Key, text: str) -> typing.NoReturn:
        self._add_error(key, text)
        raise _InvalidValue

    @contextlib.contextmanager
    def _at(self, key: Key) -> Iterator[None]:
        """Report errors of constructors and imports with the key."""
        try:
            yield
        except (ConfigError, PluginError, TypeError) as error:
            self._add_error(key, str(error))
            raise _InvalidValue from None

    def _change(self, name: str, value: str) -> None:
        key: Key = tuple(int(part) if part.isdecimal() else part for part in name.split("."))
        try:
            new = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            new = value  # text without quotes
        at: Any = self.values
        for number, part in enumerate(key, 1):
            fits = isinstance(part, str) if isinstance(at, dict) else isinstance(at, list) and part in range(len(at))
            if not fits:
                raise ConfigError(f"{name}={value}: {self.path} has nothing at {_dotted(key[:number])}")
            if number == len(key):
                at[part] = new
            else:
                at = at.setdefault(part, {}) if isinstance(at, dict) else at[part]
        self._changes[key] = f"{name}={value}"

    # ---- objects from tables

    def _arguments(self, make: Any, table: Mapping[str, Any], key: Key) -> dict[str, Any]:
        """Return the arguments of ``make``. Raises _InvalidValue after adding all errors."""
        before = len(self.errors)
        parameters = inspect.signature(make).parameters
        named = {name: each for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD}
        plain = isinstance(make, type) and not dataclasses.is_dataclass(make)
        hints = typing.get_type_hints(typing.cast(Any, make).__init__ if plain else make)
        arguments = {}
        for name, value in table.items():
            with contextlib.suppress(_InvalidValue):
                if name == "work" and isinstance(value, str) and "python" not in table:
                    arguments[name] = self._function(value, (*key, name))
                elif name in named:
                    arguments[name] = read = self._value(hints.get(name, Any), value, (*key, name))
                    with self._at((*key, name)):
                        if not (isinstance(read, float) and read.is_integer()):  # 64.0: the constructor decides
                            check_types(make, {name: read})
                elif len(named) < len(parameters):
                    arguments[name] = self._resolve(value)
                else:
                    self._add_error((*key, name), f"there is no such key; {place_of(make, name, named)}")
        for name, parameter in named.items():
            if parameter.default is parameter.empty and name not in table:
                self._add_error((*key, name), "the value is missing")
        if len(self.errors) > before:
            raise _InvalidValue
        return arguments

    def _make(self, make: Any, table: Any, key: Key) -> Any:
        if not isinstance(table, dict):
            self._fail(key, f"a table is expected, not {_kind(table)}")
        arguments = self._arguments(make, table, key)
        with self._at(key):
            return make(**arguments)

    def _value(self, hint: Any, value: Any, key: Key) -> Any:
        """Convert a value for a parameter of this type."""
        name, members = key[-1], _members(hint)
        special = {"prompts": self._prompts, "algorithm": self._algorithm}
        if key == ("track",):
            return self._trackers(value, key)
        if name in special:
            return special[str(name)](value, key)
        if key == ("reward",) and isinstance(value, list):
            return [self._reward(each, (*key, number)) for number, each in enumerate(value)]
        if name == "work" and isinstance(value, dict):
            return self._work(value, key)
        for member in members:
            if isinstance(value, dict) and (member in _SPECS or dataclasses.is_dataclass(member)):
                return self._make(member, value, key)
            of = typing.get_args(member)
            if isinstance(value, list) and of and of[0] in _SPECS:
                return self._make_list(of[0], value, key)
            if isinstance(value, list) and typing.get_origin(member) is tuple:
                return tuple(value)
        if all(member in (*_SPECS, type(None)) or dataclasses.is_dataclass(member) for member in members):
            return self._make(members[0], value, key)
        if isinstance(value, str):
            if str not in members and any(_is_function(member) for member in members):
                return self._function(value, key)
            if name == "model" and is_hub_name(value) and not os.path.exists(self._path(value)):
                return value
            if Path in members or (name == "python" and "/" in value):
                return self._path(value)
        resolved = self._resolve(value)
        try:
            return msgspec.convert(resolved, hint)
        except (msgspec.ValidationError, TypeError):  # the constructor refuses it, or converts it
            return resolved

    def _make_list(self, make: Any, tables: list[Any], key: Key) -> list[Any]:
        made = []
        for number, table in enumerate(tables):
            with contextlib.suppress(_InvalidValue):
                made.append(self._make(make, table, (*key, number)))
        if len(made) < len(tables):
            raise _InvalidValue
        return made

    def _function(self, path: str, key: Key) -> Any:
        if ":" not in path:
            self._fail(key, f'a function is named "module:function", not {path!r}')
        with self._at(key):
            return import_name(path)

    def _prompts(self, value: Any, key: Key) -> Any:
        """Read a file, data, or the import path of a function of data."""
        if not isinstance(value, str) or (file := Path(self._path(value))).is_file():
            return file if isinstance(value, str) else value
        if ":" not in value:
            self._fail(key, f'there is no file {file}; a function is named "module:function"')
        return self._function(value, key)

    def _reward(self, value: Any, key: Key) -> Any:
        """Read the import path of a function, or a pair of it and a weight."""
        path, *weight = value if isinstance(value, list) and value else [value]
        if not isinstance(path, str):
            self._fail(key, '"module:function" is expected, or a list of it and a weight')
        function = self._function(path, key)
        return (function, *weight) if weight else function

    def _named(self, value: Any, key: Key, name: str | None = None) -> tuple[str, dict[str, Any]]:
        """Return the name and the options of a name, or of a table with a name and options. ``name``: the default."""
        table = {"name": value} if isinstance(value, str) else value
        if not isinstance(table, dict) or not isinstance(found := table.get("name", name), str):
            self._fail(key, f"a name is expected, or a table with a name and options, not {_kind(value)}")
        return found, {option: each for option, each in table.items() if option != "name"}

    def _algorithm(self, value: Any, key: Key) -> Any:
        """Make an installed algorithm, to report its errors with their keys; return the name and options of
        another."""
        name, options = self._named(value, key, "grpo")
        if "python" in self.values.get(str(key[0]), {}) and registry().find("algorithm", name) is None:
            return name, self._resolve(options)
        with self._at(key):
            factory = registry().get("algorithm", name).load()
        return self._make(factory, options, key)

    def _trackers(self, value: Any, key: Key) -> list[Any]:
        """Return names, and pairs of a name and options."""
        named = [
            self._named(each, (*key, number))
            for number, each in enumerate(value if isinstance(value, list) else [value])
        ]
        return [(name, self._resolve(options)) if options else name for name, options in named]

    def _work(self, table: dict[str, Any], key: Key) -> Any:
        kinds = [kind for kind in _WORKS if kind in table]
        if len(kinds) != 1:
            self._fail(key, "an engine's work is { logprobs = ENGINE, ... } or { generate = ENGINE, ... }")
        options = {name: value for name, value in table.items() if name != kinds[0]}
        return self._make(_WORKS[kinds[0]], {"engine": table[kinds[0]], **options}, key)

    def _path(self, value: str) -> str:
        return str(self.path.parent.resolve() / value)

    def _resolve(self, value: Any) -> Any:
        """Resolve text in an option that starts as a relative path ("./", "../")."""
        if isinstance(value, dict):
            return {name: self._resolve(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self._resolve(each) for each in value]
        return self._path(value) if isinstance(value, str) and value.startswith(("./", "../")) else value


def _key_of(text: str, arguments: Mapping[str, Any]) -> Key:
    """Return the argument named by a constructor's error; without a name it is about the data."""
    named = [name for name in arguments if text.startswith((f"Workflow: {name} ", f"{name} must be "))]
    return (named[0],) if named else ("prompts",) if arguments["rollout"] else ("rollout",)


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(each for member in typing.get_args(hint) for each in _members(member))
    return (hint,)


def _is_function(member: Any) -> bool:
    return member is Callable or typing.get_origin(member) is collections.abc.Callable


def _dotted(key: Key) -> str:
    return ".".join(map(str, key))


def _kind(value: Any) -> str:
    names = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "a table"}
    return names.get(type(value), type(value).__name__)
