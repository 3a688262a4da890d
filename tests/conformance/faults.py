"""Make an engine wrong: replace methods of a right one, each by a function of a table of faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

Fault = Mapping[str, Callable[..., Any]]
"""By the name of a method: called with the engine, its right method and the arguments."""


def replace_methods(engine: object, fault: Fault) -> None:
    for name, wrong in fault.items():
        setattr(engine, name, partial(wrong, engine, getattr(engine, name)))


def before(action: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``action`` with the engine and the arguments, then the right method."""
    return lambda self, right, *args: (action(self, *args), right(*args))[1]
