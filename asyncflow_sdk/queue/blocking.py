"""Each verb is written once, as a coroutine. Over a port that blocks instead of suspending, it is a plain call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def drive(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    coroutine.close()
    raise AssertionError("a blocking port must not suspend")


def sync(
    verb: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], promised: Callable[..., Any]
) -> Callable[Concatenate[Any, P], R]:
    """Return the blocking form of an async method: the method of an interface that is ``promised``, with its name and docstring."""

    @functools.wraps(promised, updated=())  # not that it is abstract
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return drive(verb(self, *args, **kwargs))

    return call  # type: ignore[return-value]  # wraps() names another function
