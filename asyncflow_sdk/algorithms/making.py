"""Which algorithm a driver means, as data that travels to the trainer's worker, where it is made."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import ConfigError, PluginError
from ..interfaces import Algorithm
from ..plugins import import_path, registry
from ..types.typed import meant


class AlgorithmSpec(msgspec.Struct, frozen=True):
    """``name``: of its adapter, or "module:Class". ``options``: its fields, those that were said."""

    name: str = "grpo"
    options: dict[str, Any] = {}

    @property
    def label(self) -> str:
        """What people call it."""
        return self.name.rpartition(":")[2]


def algorithm_spec(given: Any) -> AlgorithmSpec:
    """``given``: a name; "module:Class"; a class; one of these with options, ("mine", {"beta": 0.1}); an Algorithm that is a
    dataclass; None for GRPO. Raises ConfigError for what a worker could not make again."""
    if given is None:
        return AlgorithmSpec()
    of, options = given if isinstance(given, (tuple, list)) and len(given) == 2 else (given, {})
    if isinstance(of, Algorithm) and of is given:
        if not dataclasses.is_dataclass(of):
            raise ConfigError(
                f"algorithm {of!r:.100} is no dataclass, whose fields could travel to a worker: make it one, or say (class, options)"
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
            f"an algorithm is a name, a class, either with options, or an Algorithm, not {given!r:.100}"
        )
    try:
        plain = msgspec.json.decode(msgspec.json.encode(dict(options)), type=dict[str, Any])
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"algorithm {of!r}: options travel as JSON: {error}") from None
    return AlgorithmSpec(of, plain)


def make_algorithm(spec: AlgorithmSpec) -> Algorithm:
    """The algorithm, in this environment. Raises PluginError where there is none of this name, ConfigError for options it
    does not have or refuses."""
    factory = registry().get("algorithm", spec.name).load()
    try:
        made = factory(**spec.options)
    except TypeError as error:
        known = list(inspect.signature(factory).parameters)
        odd = next((name for name in spec.options if name not in known), "")
        why = f"has no option {odd!r}; {meant(odd, known)}" if odd else f"cannot be made: {error}"
        raise ConfigError(f"algorithm {spec.label!r} {why}") from None
    if not isinstance(made, Algorithm):
        raise PluginError(f"algorithm {spec.name!r} is a {type(made).__name__}, which is no asyncflow_sdk.Algorithm")
    return made
