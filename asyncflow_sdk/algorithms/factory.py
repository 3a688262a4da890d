"""Serializable specs of algorithms: written by the driver, instantiated in the trainer's worker."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import ConfigError, PluginError
from ..interfaces import Algorithm
from ..plugins import import_path, registry
from ..types.validation import place_of


class AlgorithmSpec(msgspec.Struct, frozen=True):
    """``name``: the adapter's name or "module:Class". ``options``: fields set by the user."""

    name: str = "grpo"
    options: dict[str, Any] = {}

    @property
    def label(self) -> str:
        """The name without its module."""
        return self.name.rpartition(":")[2]


def algorithm_spec(given: Any) -> AlgorithmSpec:
    """Make a spec from a name, "module:Class", a class, one of these with options, as ("mine", {"beta": 0.1}), or an
    Algorithm dataclass; None: GRPO. Raises ConfigError if a worker could not instantiate it."""
    if given is None:
        return AlgorithmSpec()
    of, options = given if isinstance(given, (tuple, list)) and len(given) == 2 else (given, {})
    if isinstance(of, Algorithm) and of is given:
        if not dataclasses.is_dataclass(of):
            raise ConfigError(
                f"algorithm {of!r:.100} is not a dataclass, so its fields cannot be sent to a worker: make it one,"
                " or give (class, options)"
            )
        options = {f.name: getattr(of, f.name) for f in dataclasses.fields(of) if f.init}
        of = type(of)
    if isinstance(of, type):
        path = import_path(of)
        if path is None:
            raise ConfigError(
                f"algorithm {of.__qualname__} cannot be imported by the trainer's worker: put the class into a module"
            )
        of = path
    if not isinstance(of, str) or not of or not isinstance(options, Mapping):
        raise ConfigError(
            f"an algorithm must be a name, a class, either with options, or an Algorithm, not {given!r:.100}"
        )
    try:
        plain = msgspec.json.decode(msgspec.json.encode(dict(options)), type=dict[str, Any])
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"algorithm {of!r}: options must be JSON: {error}") from None
    return AlgorithmSpec(of, plain)


def make_algorithm(spec: AlgorithmSpec) -> Algorithm:
    """Instantiate the algorithm. Raises PluginError for an unknown name, ConfigError for refused options."""
    factory = registry().get("algorithm", spec.name).load()
    try:
        made = factory(**spec.options)
    except TypeError as error:
        known = list(inspect.signature(factory).parameters)
        odd = next((name for name in spec.options if name not in known), "")
        why = f"has no option {odd!r}; {place_of(factory, odd, known)}" if odd else f"cannot be made: {error}"
        raise ConfigError(f"algorithm {spec.label!r} {why}") from None
    if not isinstance(made, Algorithm):
        raise PluginError(f"algorithm {spec.name!r} is a {type(made).__name__}, not an asyncflow_sdk.Algorithm")
    return made
