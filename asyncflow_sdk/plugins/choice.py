"""The choice of plugins to load: all of this environment, unless these variables restrict it. Names
are separated by commas. A plugin answers to the name of its entry point and to that of its
distribution.

    ASYNCFLOW_PLUGINS=mine,torch           only these, and "core"
    ASYNCFLOW_NO_PLUGINS=broken            all but these
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

ONLY, WITHOUT = "ASYNCFLOW_PLUGINS", "ASYNCFLOW_NO_PLUGINS"
CORE = "core"
"""The SDK's own plugin. It cannot be blocked."""


class PluginChoice(NamedTuple):
    """Names to load and names to block, as the user wrote them. ``only`` None: load all."""

    only: tuple[str, ...] | None
    without: tuple[str, ...]

    def allows(self, names: Iterable[str]) -> bool:
        """True if a plugin with these names may be loaded."""
        known = {canonical_name(name) for name in names}
        if known & set(map(canonical_name, self.without)):
            return False
        return self.only is None or bool(known & set(map(canonical_name, self.only)))


def read_choice() -> PluginChoice:
    """Read the choice from this process's environment."""
    only = os.environ.get(ONLY)
    return PluginChoice(None if only is None else _split(only), _split(os.environ.get(WITHOUT, "")))


def plugin_variables() -> dict[str, str]:
    """Return the variables that are set, for processes with the same plugins."""
    return {name: os.environ[name] for name in (ONLY, WITHOUT) if name in os.environ}


def block_plugins(names: Iterable[str]) -> None:
    """Block further plugins, in this process and in processes started by it."""
    os.environ[WITHOUT] = ",".join(dict.fromkeys((*read_choice().without, *names)))


def canonical_name(name: str) -> str:
    """Return a distribution name in canonical form: lower case, its words joined by "-"."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _split(text: str) -> tuple[str, ...]:
    return tuple(each for each in re.split(r"[,\s]+", text) if each)
