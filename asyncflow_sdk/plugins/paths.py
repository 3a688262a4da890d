"""Import paths "module:name" of functions and classes, by which another process imports them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError


def import_path(function: Callable[..., Any]) -> str | None:
    """Return "module:name" for a function or class; None if another process cannot import it."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<locals>")
    if module in (None, "__main__", "builtins") or "<" in name:
        return None
    path = f"{module}:{name}"
    try:
        found = _resolve(path)
    except (ImportError, AttributeError):
        return None
    return path if found is function and importlib.util.find_spec(module) is not None else None


def import_name(path: str) -> Any:
    """Import the object at "module:name". Raises ConfigError with the reason."""
    try:
        return _resolve(path)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{path!r} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:  # raised by the module's own code, such as a script that exits
        raise ConfigError(f"importing {path!r} failed: {type(error).__name__}: {error}") from error


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
