"""Launchers: the launchers of placements, each made once for its name and options."""

from __future__ import annotations

import inspect
import threading

import msgspec

from ...errors import ConfigError, PluginError
from ...interfaces import Launcher, Placement
from ...plugins import registry


class Launchers:
    """Makes launchers, and closes them. Thread-safe."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, bytes], Launcher] = {}
        self._lock = threading.Lock()

    def of(self, place: Placement) -> Launcher:
        """Return the launcher of a placement. Raises PluginError if it is missing or no Launcher,
        ConfigError for options that it does not take."""
        key = place.launcher, msgspec.json.encode(place.launcher_options, order="deterministic")
        with self._lock:
            if key not in self._made:
                self._made[key] = _make(place)
            return self._made[key]

    def close(self) -> None:
        """Close all launchers, after their workers have ended. New ones can be made."""
        with self._lock:
            made, self._made = self._made, {}
        for launcher in made.values():
            launcher.close()


def reaches_hosts(place: Placement) -> bool:
    """True if the launcher of a placement may start workers on other hosts."""
    return registry().declared("launcher", place.launcher, "hosts") == ("many",)


def _make(place: Placement) -> Launcher:
    name, options = place.launcher, place.launcher_options
    factory = registry().get("launcher", name).load()
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise ConfigError(f"launcher_options= of launcher {name!r}: {error}") from None
    made = factory(**options)
    if not isinstance(made, Launcher):
        raise PluginError(f"launcher {name!r} is a {type(made).__name__}, no asyncflow_sdk.interfaces.Launcher")
    return made
