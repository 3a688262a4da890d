"""Which plugins may be loaded: all, unless these environment variables say otherwise. Names are separated by commas; a plugin
has the name of its entry point, and its distribution's counts too.

    ASYNCFLOW_PLUGINS=mine,torch           only these, and "core"
    ASYNCFLOW_NO_PLUGINS=broken            not these
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

ONLY, WITHOUT = "ASYNCFLOW_PLUGINS", "ASYNCFLOW_NO_PLUGINS"
CORE = "core"
"""The plugin without which nothing works: it is always there."""


class Choice(NamedTuple):
    """What was said; names as they were written. ``only`` None: everything."""

    only: tuple[str, ...] | None
    without: tuple[str, ...]

    def allows(self, names: Iterable[str]) -> bool:
        """Whether a plugin that has these names may be loaded."""
        known = {plain(name) for name in names}
        if known & set(map(plain, self.without)):
            return False
        return self.only is None or bool(known & set(map(plain, self.only)))


def read_choice() -> Choice:
    """What the environment of this process says."""
    only = os.environ.get(ONLY)
    return Choice(None if only is None else _split(only), _split(os.environ.get(WITHOUT, "")))


def plugin_choice() -> dict[str, str]:
    """The variables that are set, for processes that are to have the same plugins."""
    return {name: os.environ[name] for name in (ONLY, WITHOUT) if name in os.environ}


def without(names: Iterable[str]) -> None:
    """Block these, too, in this process and in those that it starts."""
    blocked = dict.fromkeys((*read_choice().without, *names))
    os.environ[WITHOUT] = ",".join(blocked)


def plain(name: str) -> str:
    """Names of distributions are alike in whatever case and with whichever of these between their words."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _split(text: str) -> tuple[str, ...]:
    return tuple(each for each in re.split(r"[,\s]+", text) if each)
