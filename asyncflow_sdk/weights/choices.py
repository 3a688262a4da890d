"""Choices: the transport of weights, by what engines and transports declare. Each choice has a reason."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, PluginError
from ..interfaces import WeightTransport
from ..plugins import registry

AUTO = "auto"
TRANSPORTS = ("shm", "tcp")
"""Candidates of "auto", the best first. Others are candidates only if an engine accepts no other."""


@dataclass(frozen=True)
class Choice:
    """``what``: the setting. ``chosen``: its value. ``reason``: for people."""

    what: str
    chosen: str
    reason: str

    def __str__(self) -> str:
        return f"{self.chosen}: {self.reason}"


def make_transport(name: str, **options: Any) -> WeightTransport:
    """Make a transport by its registered name. Raises PluginError, and ConfigError for odd options."""
    adapter = registry().get("transport", name)
    try:
        factory = adapter.load()
    except PluginError as error:
        plain = [a.spec.name for a in registry().adapters if a.spec.kind == "transport" and not a.spec.requires]
        raise PluginError(f"{error}. Transports that need nothing more: {', '.join(plain)}") from error
    known = inspect.signature(factory).parameters
    odd = options.keys() - known.keys()
    if odd and not any(each.kind is each.VAR_KEYWORD for each in known.values()):
        has = f"its options: {', '.join(known)}" if known else "it has none"
        raise ConfigError(f"transport {name!r} has no option {', '.join(map(repr, sorted(odd)))}; {has}")
    try:
        made: WeightTransport = factory(**options)
    except TypeError as error:
        raise ConfigError(f"transport {name!r} cannot be made with options {options}: {error}") from error
    return made


def choose_transport(elsewhere: str, only: Mapping[str, Collection[str]], *, asked: str = AUTO) -> Choice:
    """Choose the transport. ``elsewhere``: why some members cannot see this host's memory; "" if all can. ``only``:
    by engine, the transports it accepts, for engines that do not accept all. Raises ConfigError with the reason for
    each candidate; PluginError if ``asked`` is not installed."""
    if asked != AUTO:
        registry().get("transport", asked)
        why_not = _why_unfit(asked, "", only)  # the user knows the hosts
        if why_not:
            raise ConfigError(f"transport={asked!r} cannot work: {why_not}")
        return Choice("transport", asked, "as asked")
    wanted = [name for names in only.values() for name in names]
    refused: list[str] = []
    for name in dict.fromkeys((*TRANSPORTS, *wanted)):
        if registry().find("transport", name) is None:
            refused.append(f"{name}: it is not installed")
            continue
        why_not = _why_unfit(name, elsewhere, only)
        if not why_not:
            return Choice("transport", name, "; ".join(refused) or "everything is on this host, so nothing is moved")
        refused.append(f"{name}: {why_not}")
    raise ConfigError(f"no transport can work: {'; '.join(refused)}")


def _why_unfit(name: str, elsewhere: str, only: Mapping[str, Collection[str]]) -> str:
    """Return why a transport cannot be used; "" if it can."""
    if elsewhere and registry().declared("transport", name, "hosts") == ("one",):
        return f"it works on one host, and {elsewhere}"
    for engine, names in only.items():
        if name not in names:
            return f"{engine} cannot take weights by {name}, only by {', '.join(sorted(names)) or 'nothing'}"
    return ""
