"""Engines of workers: check their options, make them.

odd_options("torch", factory, {"learning_rate": "1e-5"})
# [("learning_rate", "engine 'torch', option 'learning_rate' must be float, not str: '1e-5'")]
with loading_model(queue, "train"):
    engine = make_engine("train", "torch", model=folder, learning_rate=1e-5)
"""

from __future__ import annotations

import contextlib
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import UnionType
from typing import Any, Literal

from ...errors import ConfigError
from ...interfaces import SAMPLING_MASK
from ...ledger import commands as cmd
from ...plugins import registry
from ...queue import QueueClient
from ...types.validation import PLAIN, hint, kind_of, unfit

GIVEN = ("model", "algorithm")  # arguments of a factory besides options


def odd_options(
    engine: str, factory: Callable[..., Any], options: Mapping[str, Any], also: Iterable[str] = ()
) -> list[tuple[str, str]]:
    """Return unknown options, options of a wrong type by the factory's signature, and the first value refused by
    its ``check_options``, if it has one: each with an error text. ``also``: further names to suggest."""
    known = _options_of(factory)
    odd = []
    for option in [name for name in options if known is not None and name not in (*known, *GIVEN)]:
        meant = hint(option, [*(known or ()), *also])
        text = f"engine {engine!r} has no option {option!r}{meant and '; '}{meant}".removesuffix("?")
        odd.append((option, f"{text}{'?' if meant.endswith('?') else '.'} It takes: {', '.join(known or ())}"))
    plain = {name: value for name, value in options.items() if name not in GIVEN}
    odd += [(name, f"engine {engine!r}, option {name!r} {what}") for name, what in type_errors(factory, plain)]
    check: Callable[..., Any] | None = getattr(factory, "check_options", None)
    if check is not None and not odd:
        try:
            check(**options)
        except ConfigError as error:
            odd.append((next((name for name in plain if name in str(error)), ""), f"engine {engine!r}: {error}"))
    return odd


def type_errors(function: Callable[..., Any], given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, problem) for each JSON value of another type than annotated in ``function`` or
    in a class's constructor. Checks only numbers, text, bools, None, and lists and mappings of
    these, because ``function`` may convert other values. Raises nothing."""
    of: Any = function.__init__ if inspect.isclass(function) else function
    of = inspect.unwrap(of)
    for name, value in given.items():
        kind = _annotation(of, name)
        if kind is not None and _is_plain(kind):
            fit, words = kind_of(kind)
            if not fit(value):
                yield name, unfit(words, value)


def _annotation(function: Any, name: str) -> Any:
    """Return the resolved annotation of a parameter; None if missing or not resolvable at run time."""
    written = getattr(function, "__annotations__", {}).get(name)
    if written is None:
        return None
    try:
        holder = types.SimpleNamespace(__annotations__={name: written})
        return typing.get_type_hints(holder, globalns=getattr(function, "__globals__", {}))[name]
    except Exception:  # evaluating a plugin's annotation may raise anything
        return None


def _is_plain(kind: Any) -> bool:
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return True
    if origin in (typing.Union, UnionType) or (
        isinstance(origin, type) and issubclass(origin, Collection) and not isinstance(origin, str)
    ):
        return bool(of) and all(each is ... or _is_plain(each) for each in of)
    return kind in (*PLAIN, str, list, dict)


def _options_of(factory: Callable[..., Any]) -> list[str] | None:
    """Return the names of an engine's options; None if it takes any, or has no signature."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL and p.name not in GIVEN]


def frozen_options(engine: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a train engine for log-probs alone: with ``frozen``, if its adapter declares it."""
    can_freeze = registry().declared("train", engine, "frozen") is not None
    return ({"frozen": True} if can_freeze else {}) | dict(options)


def make_engine(kind: Literal["rollout", "train"], name: str, **options: Any) -> Any:
    """Make an engine. Raises ConfigError with the unknown options, or those of a wrong type."""
    factory = registry().get(kind, name).load()
    odd = odd_options(name, factory, options)
    if odd:
        raise ConfigError("; ".join(text for _, text in odd))
    takes = inspect.signature(factory)
    try:
        takes.bind(**options)
    except TypeError as error:
        text = f"engine {name!r}: {error}; it takes: {', '.join(map(str, takes.parameters.values()))}"
        raise ConfigError(text) from None
    return factory(**options)


def check_mask(engine: str, able: bool, needs: Collection[str]) -> None:
    """Raise ConfigError for a train engine without sampling masks (``able``), if it needs them."""
    if not SAMPLING_MASK.keys().isdisjoint(needs) and not able:
        text = f"{engine} computes log-probs over the whole vocabulary, and the draws are over their kept tokens"
        raise ConfigError(f"{text} (TrainEngine.sampling_mask): leave sampling_mask=True out")


def whole_step_text(engine: str, reason: str) -> str:
    """Return the error for a trainer with ``stream=True`` that needs whole steps."""
    return f"train with engine {engine!r} has stream=True, and needs whole steps: {reason}; leave stream= out"


@contextlib.contextmanager
def loading_model(queue: QueueClient, task: str) -> Iterator[None]:
    """Report to the run, inside this block, that this worker loads its model for ``task``."""
    queue.send(cmd.Prepare(task=task, what="loading its model"))
    yield
    queue.send(cmd.Prepare(task=task))  # after an error its session ends
