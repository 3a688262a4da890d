"""Workflows as TOML: the words are those of Python, a table for what a class makes, functions by their import path.

    steps = 200
    batch_size = 256
    prompts = "data.jsonl"                      # paths are relative to the file
    reward = "rewards:exact_match"              # and modules beside it can be imported
    rollout = { engine = "transformers", model = "model", group_size = 8, sampling = { max_tokens = 32 } }
    train = { engine = "torch", model = "model", lr = 1e-6 }

workflow = load_workflow("run.toml", {"train.lr": "1e-5"})
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError, PluginError
from ..plugins import import_name, registry
from ..types.validation import suggestion
from .positions import positions
from .problems import Key, error_sink
from .specs import Rollout, Stage, Train
from .work import Generate, Logprobs
from .workflow import Workflow

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_WORKS = {"logprobs": Logprobs, "generate": Generate}
_SPECS = (Rollout, Stage, Train)


def load_workflow(path: str | os.PathLike[str], changes: Mapping[str, str] | None = None) -> Workflow:
    """The workflow of a file. ``changes``: values for keys, as they would stand in the file ("train.lr": "1e-5"); text needs
    no quotes. The file's folder can be imported from afterwards. Raises ConfigError that names line and column of
    every key that is wrong, with the nearest known key."""
    return _File(Path(path), changes or {}).workflow()


def problems_of_file(path: str | os.PathLike[str]) -> list[str]:
    """Everything for which ``load_workflow`` refuses a file, each with line and column; empty if it takes it. Raises ConfigError for a
    file that cannot be read or is no TOML."""
    file = _File(Path(path), {})
    try:
        file.workflow()
    except ConfigError:
        return file.wrong
    return []


class _Misfit(Exception):
    """A value that is wrong, and which was told of."""


class _File:
    def __init__(self, path: Path, changes: Mapping[str, str]) -> None:
        self.path = path
        try:
            text = path.read_text(encoding="utf-8")
            self.values: dict[str, Any] = tomllib.loads(text)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path} is no TOML: {error}") from None
        self._places: dict[Key, str] = {key: f"{path}:{line}:{at}" for key, (line, at) in positions(text).items()}
        self._wrong: dict[str, None] = {}
        for name, value in changes.items():
            self._change(name, value)

    def workflow(self) -> Workflow:
        folder = str(self.path.parent.resolve())
        if folder not in sys.path:
            sys.path.insert(0, folder)
        arguments: dict[str, Any] = {}
        with contextlib.suppress(_Misfit):
            arguments = self._arguments(Workflow, self.values, ())
        if self._wrong:
            self._raise()
        try:
            with error_sink(lambda key, error: self._say(key, str(error))):
                return Workflow(**arguments)
        except (ConfigError, PluginError) as error:
            if not self._wrong:  # else it is the report itself; these are made before the checks
                self._say(_about(str(error), arguments), str(error))
            self._raise()

    # ---- what is wrong

    @property
    def wrong(self) -> list[str]:
        """All that was told of, with its place in the file."""
        return list(self._wrong)

    def _say(self, key: Key, text: str) -> None:
        self._wrong[f"{self._place(key)}: {text}"] = None

    def _place(self, key: Key) -> str:
        """Of the key, or of the nearest thing around it that is in the file."""
        for end in range(len(key), 0, -1):
            for name in (key[:end], tuple(part for part in key[:end] if isinstance(part, str))):
                if name in self._places:
                    return self._places[name]
        return str(self.path)

    def _raise(self) -> typing.NoReturn:
        listed = list(self._wrong)
        if len(listed) == 1:
            raise ConfigError(listed[0]) from None
        raise ConfigError("\n  ".join([f"{len(listed)} things in {self.path} cannot work:", *listed])) from None

    def _change(self, name: str, value: str) -> None:
        key: Key = tuple(int(part) if part.isdigit() else part for part in name.split("."))
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
        self._places = {k: p for k, p in self._places.items() if k[: len(key)] != key} | {key: f"{name}={value}"}

    # ---- from tables to what they make

    def _arguments(self, make: Any, table: Mapping[str, Any], key: Key) -> dict[str, Any]:
        """What ``make`` is called with. Raises _Misfit after telling of everything that is wrong."""
        before = len(self._wrong)
        signature = inspect.signature(make)
        named = {n: p for n, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD}
        plain = isinstance(make, type) and not dataclasses.is_dataclass(make)
        of = typing.cast(Any, make).__init__ if plain else make
        hints = typing.get_type_hints(of)
        options = len(named) < len(signature.parameters)
        arguments = {}
        for name, value in table.items():
            where = (*key, name)
            if name in named:
                with contextlib.suppress(_Misfit):
                    local = name == "work" and isinstance(value, str) and "python" not in table
                    read = self._function(value, where) if local else self._value(hints.get(name, Any), value, where)
                    arguments[name] = read
            elif options:
                arguments[name] = self._located(value)
            else:
                self._say(where, f"there is no key {_dotted(where)}; {suggestion(name, named)}")
        for name, parameter in named.items():
            if parameter.default is parameter.empty and name not in table:
                self._say(key, f"{_dotted((*key, name))} is missing")
        if len(self._wrong) > before:
            raise _Misfit
        return arguments

    def _made(self, make: Any, table: Any, key: Key) -> Any:
        if not isinstance(table, dict):
            self._say(key, f"{_dotted(key)} is a table, not {_kind(table)}")
            raise _Misfit
        arguments = self._arguments(make, table, key)
        try:
            return make(**arguments)
        except (ConfigError, PluginError) as error:
            self._say(key, str(error))
        except TypeError as error:
            self._say(key, f"{_dotted(key)}: {error}")
        raise _Misfit

    def _value(self, hint: Any, value: Any, key: Key) -> Any:
        """A value for a parameter of this type."""
        name, members = key[-1], _members(hint)
        if key == ("prompts",):
            return self._prompts(value, key)
        if key == ("trackers",):
            return self._trackers(value, key)
        if name == "algorithm":
            return self._algorithm(value, key)
        if name == "work" and isinstance(value, dict):
            return self._work(value, key)
        for member in members:
            if isinstance(value, dict) and (member in _SPECS or dataclasses.is_dataclass(member)):
                return self._made(member, value, key)
            of = typing.get_args(member)
            if isinstance(value, list) and of and of[0] in _SPECS:
                return self._several(of[0], value, key)
            if isinstance(value, list) and typing.get_origin(member) is tuple:
                return tuple(value)
        if all(member in (*_SPECS, type(None)) or dataclasses.is_dataclass(member) for member in members):
            return self._made(members[0], value, key)
        if isinstance(value, str):
            if str not in members and any(_is_function(member) for member in members):
                return self._function(value, key)
            if Path in members or (name == "python" and "/" in value):
                return self._path(value)
        return self._converted(hint, self._located(value), key)

    def _several(self, make: Any, tables: list[Any], key: Key) -> list[Any]:
        made = []
        for number, table in enumerate(tables):
            with contextlib.suppress(_Misfit):
                made.append(self._made(make, table, (*key, number)))
        if len(made) < len(tables):
            raise _Misfit
        return made

    def _converted(self, hint: Any, value: Any, key: Key) -> Any:
        try:
            return msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            self._say(key, f"{_dotted(key)}: {str(error).partition(' - at')[0]}")
            raise _Misfit from None
        except TypeError:  # a type that only Python has: what is made of it will say
            return value

    def _function(self, path: str, key: Key) -> Any:
        try:
            if ":" not in path:
                raise ConfigError(f'a function is named "module:function", not {path!r}')
            return import_name(path)
        except ConfigError as error:
            self._say(key, f"{_dotted(key)}: {error}")
        raise _Misfit

    def _prompts(self, value: Any, key: Key) -> Any:
        """A file, data, or the import path of a function that gives data."""
        if not isinstance(value, str) or (file := Path(self._path(value))).is_file():
            return file if isinstance(value, str) else value
        if ":" not in value:
            self._say(key, f'prompts: there is no file {file}; a function is named "module:function"')
            raise _Misfit
        found = self._function(value, key)
        try:
            return found() if callable(found) else found
        except Exception as error:
            self._say(key, f"prompts: {value}() raised {type(error).__name__}: {error}")
            raise _Misfit from None

    def _algorithm(self, value: Any, key: Key) -> Any:
        """Made where it is installed, so that what is wrong is told with its line; else its name and options."""
        table = {"name": value} if isinstance(value, str) else value
        if not isinstance(table, dict) or not isinstance(name := table.get("name", "grpo"), str):
            self._say(key, f"{_dotted(key)} is a name, or a table with a name and options, not {_kind(value)}")
            raise _Misfit
        options = {n: v for n, v in table.items() if n != "name"}
        try:
            factory = registry().get("algorithm", name).load()
        except PluginError as error:
            if "python" in self.values.get(str(key[0]), {}):
                return name, self._located(options)
            self._say(key, f"{_dotted(key)}: {error}")
            raise _Misfit from None
        return self._made(factory, options, key)

    def _trackers(self, value: Any, key: Key) -> list[Any]:
        """Names, and tables with a name and options."""
        made: list[Any] = []
        for number, each in enumerate(value if isinstance(value, list) else [value]):
            name = each.get("name") if isinstance(each, dict) else each
            if not isinstance(name, str):
                where = (*key, number)
                self._say(where, f"{_dotted(where)} is a name, or a table with a name and options")
                raise _Misfit
            options = {n: self._located(v) for n, v in each.items() if n != "name"} if isinstance(each, dict) else {}
            made.append((name, options) if options else name)
        return made

    def _work(self, table: dict[str, Any], key: Key) -> Any:
        kinds = [kind for kind in _WORKS if kind in table]
        if len(kinds) != 1:
            self._say(
                key,
                f"{_dotted(key)}: an engine's work is {{ logprobs = ENGINE, ... }} or {{ generate = ENGINE, ... }}",
            )
            raise _Misfit
        engine = {"engine": table[kinds[0]]}
        return self._made(_WORKS[kinds[0]], engine | {n: v for n, v in table.items() if n != kinds[0]}, key)

    def _path(self, value: str) -> str:
        return str(self.path.parent.resolve() / value)

    def _located(self, value: Any) -> Any:
        """A value of which nobody knows what it is: text that begins as a relative path is one."""
        if isinstance(value, dict):
            return {name: self._located(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self._located(each) for each in value]
        return self._path(value) if isinstance(value, str) and value.startswith(("./", "../")) else value


def _about(text: str, arguments: Mapping[str, Any]) -> Key:
    """The argument that an error of the constructor names; those that name none are of the data."""
    named = [name for name in arguments if text.startswith(f"Workflow: {name} ")]
    return (named[0],) if named else ("prompts",) if arguments["rollout"] else ("rollout",)


def _members(hint: Any) -> tuple[Any, ...]:
    """The types of a union."""
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
