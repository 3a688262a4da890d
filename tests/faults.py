"""Make an engine wrong: replace methods of a right one, each by a function of a table of faults."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from asyncflow_sdk.errors import EngineError

LEFT = contextlib.ExitStack()
"""Frees what engines left behind; tests close it."""
Fault = Mapping[str, Callable[..., Any]]
"""By the name of a method: called with the engine, its right method and the arguments."""


def with_fault(engine: Any, fault: Fault) -> Any:
    """The engine, with other methods from now on."""
    for name, wrong in fault.items():
        setattr(engine, name, partial(wrong, engine, getattr(engine, name)))
    return engine


def before(action: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``action`` with the engine and the arguments, then the right method."""
    return lambda self, right, *args, **more: (action(self, *args), right(*args, **more))[1]


def refuses(
    when: Callable[..., Any], error: type[Exception] = EngineError, text: str = "refused"
) -> Callable[..., Any]:
    """Raise an error ``when`` the engine and the arguments are so."""

    def method(self: Any, right: Any, *args: Any, **more: Any) -> Any:
        if when(self, *args):
            raise error(text)
        return right(*args, **more)

    return method


def event() -> threading.Event:
    """Set in the end."""
    end = threading.Event()
    LEFT.callback(end.set)
    return end


def leave_thread(**options: Any) -> None:
    threading.Thread(target=event().wait, **options).start()


def leave_descriptor() -> None:
    LEFT.callback(os.close, os.open("/dev/zero", os.O_RDONLY))
