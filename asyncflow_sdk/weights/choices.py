"""Choices: the transport of weights, and the policy of loading them, by what engines and transports declare.

They declare it in ``Capabilities`` and ``AdapterSpec.can``. Each choice has a reason. An impossible request is
refused with the reason: by the driver as far as it knows, else by the engine's worker before it takes a prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, PluginError
from ..interfaces import Capabilities, Host, WeightReceiver, WeightTransport
from ..plugins import registry
from ..types import Weights
from ..types.validation import check_types

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


def choose_encoding(transport: str, keep: int, options: Mapping[str, Any]) -> Choice | None:
    """Return how a transport encodes bytes; None if it does not declare it."""
    can = registry().declared("transport", transport, "encodings")
    if can is None:
        return None
    if can == ("mapped",):
        return Choice("encoding", "mapped", f"{transport} moves nothing")
    if "delta" not in can:
        return Choice("encoding", "full", f"{transport} has no other")
    if keep < 2:
        return Choice("encoding", "full", "keep=1, and a delta is against the version before, which is not kept")
    if options.get("delta_bytes") == 0:
        return Choice("encoding", "full", "delta_bytes=0")
    return Choice("encoding", "delta", "without loss, wherever it is smaller than the whole")


def choose_swap(
    name: str, can: Set[str], asked: str = AUTO, *, token_versions: bool = True, verify: Sequence[str] = ()
) -> Choice:
    """Choose when an engine loads new weights. ``can``: ``Capabilities.swap``. Raises ConfigError
    for a policy the engine does not support."""
    if asked != AUTO:
        check_swap(name, Capabilities(swap=frozenset(can), token_versions=token_versions), asked)  # type: ignore[arg-type]
        return Choice("swap", asked, "as asked")
    if "drain" in can:
        return Choice("swap", "drain", f"{name} can, and each response is of one version then")
    if "partial" in can:
        return Choice("swap", "partial", f"{name} cannot load after draining")
    if "in_flight" in can and token_versions and "probe" not in verify:
        return Choice("swap", "in_flight", f"{name} can load in no other way")
    but = {True: "", False: ", and does not say which version drew which token"}[token_versions]
    but += ', and verify="probe" needs an engine in which nothing runs' if "probe" in verify else ""
    raise ConfigError(
        f"{name} cannot be given new weights: it can load them {', '.join(sorted(can)) or 'never'}{but}"
    )


def check_swap(name: str, can: Capabilities, swap: str) -> None:
    """Raise ConfigError with the reason unless an engine supports this swap policy."""
    check_types(Weights, {"swap": swap})
    can_do = ", ".join(sorted(can.swap)) or "nothing"
    if (swap if swap in ("partial", "in_flight") else "drain") not in can.swap:
        how = {"in_flight": "while requests run", "partial": "between the parts of a response"}.get(
            swap, "after draining"
        )
        raise ConfigError(f'{name} cannot load weights {how}, which swap="{swap}" does; it can: {can_do}')
    if swap == "in_flight" and not can.token_versions:
        raise ConfigError(f'{name} does not say which version drew which token, and swap="in_flight" needs that')


def check_verify(name: str, can: Capabilities, verify: Sequence[str], *, running: bool) -> None:
    """Raise ConfigError with the reason unless an engine can give these proofs. ``running``:
    requests run during a load."""
    check_types(Weights, {"verify": verify})
    if "probe" in verify and not can.logprobs:
        raise ConfigError(f'{name} cannot score given responses, which verify="probe" asks for')
    if "probe" in verify and running:
        raise ConfigError(
            'verify="probe" needs an engine in which nothing runs: it does not go with swap="in_flight"'
        )
    if "held" in verify and not can.held_weights:
        raise ConfigError(f'{name} does not hold weights as they were published, which verify="held" asks for')


def check_fetching(name: str, can: Capabilities, transport: str, host: Host) -> None:
    """Raise ConfigError or PluginError unless this engine can fetch by ``transport`` here."""
    if can.transports is not None and transport not in can.transports:
        takes = ", ".join(sorted(can.transports)) or "nothing"
        raise ConfigError(f"{name} cannot take weights by {transport}, only by {takes}; say Weights(transport=...)")
    receiver: WeightReceiver = make_transport(transport).receiver(host)
    receiver.close()
