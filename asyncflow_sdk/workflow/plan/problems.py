"""Problems: all errors of a workflow, each with its key, raised together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from ...errors import AsyncFlowError, ConfigError, PluginError
from ..processes.launchers import Launchers

Key = tuple[str | int, ...]
"""The path of a value in a workflow: ("batch_size",), ("rollout", 0, "model")."""

ErrorSink = Callable[[Key, AsyncFlowError], None]
_sink: ContextVar[ErrorSink] = ContextVar("sink", default=lambda key, error: None)
_role: ContextVar[str | None] = ContextVar("role", default=None)


@contextlib.contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def error_sink(sink: ErrorSink) -> AbstractContextManager[None]:
    """Pass every problem of workflows made in this block to ``sink``, before it is raised."""
    return _set(_sink, sink)


def for_role(task: str) -> AbstractContextManager[None]:
    """Check workflows made in this block only for the role ``task``: the others are on other hosts. Placements are
    checked when the role starts."""
    return _set(_role, task)


def checks_placements() -> bool:
    """True if placements are checked: not within ``for_role``."""
    return _role.get() is None


def is_checked_here(task: str) -> bool:
    """True if the engine, model and tokenizer of a role must be on this host."""
    return _role.get() in (None, task)


class Problems:
    """Errors in the order they were found, each text once. ``launchers``: those of the checks, each made once for all
    of them; the run makes its own."""

    def __init__(self) -> None:
        self.found: list[tuple[Key, AsyncFlowError]] = []
        self.launchers = Launchers()

    def add(self, text: str, *key: str | int) -> None:
        """Add a ConfigError of the value at ``key``."""
        self._add(ConfigError(text), key)

    @contextlib.contextmanager
    def collect(self, *key: str | int) -> Iterator[None]:
        """Add a ConfigError or PluginError raised in this block instead of raising it."""
        try:
            yield
        except (ConfigError, PluginError) as error:
            self._add(error, key)

    def check(self, key: Key, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Call a function, and add a ConfigError or PluginError of it."""
        with self.collect(*key):
            function(*arguments, **named)

    def raise_all(self) -> None:
        """Raise a single error unchanged, several as one ConfigError with a list."""
        for key, error in self.found:
            _sink.get()(key, error)
        if len(self.found) == 1:
            raise self.found[0][1]
        if self.found:
            listed = "".join(f"\n  {number}. {error}" for number, (_, error) in enumerate(self.found, 1))
            raise ConfigError(f"{len(self.found)} things in this workflow cannot work:{listed}")

    def _add(self, error: AsyncFlowError, key: Key) -> None:
        if str(error) not in {str(known) for _, known in self.found}:
            self.found.append((key, error))
