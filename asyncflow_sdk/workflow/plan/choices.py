"""Choices: the transport of weights and the policy of loading them, by what engines and transports declare; and the
staleness policy.

They declare it in ``Capabilities`` and ``AdapterSpec.can``. Each choice has a reason. An impossible request is
refused with the reason: by the driver as far as it knows, else by the engine's worker before it takes a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...errors import ConfigError
from ...interfaces import StalenessPolicy
from ...ledger.staleness import make_policy
from ...plugins import import_name, registry
from ...queue.client import spec_of
from ...types import Staleness, Weights
from ...types.tasks import PolicySpec
from ...types.validation import check_types
from ...weights import AUTO

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


def choose_encoding(transport: str, weights: Weights) -> Choice | None:
    """Return how a transport encodes bytes; None if it does not declare it."""
    can = registry().declared("transport", transport, "encodings")
    if can is None:
        return None
    if can == ("mapped",):
        return Choice("encoding", "mapped", f"{transport} moves nothing")
    if "delta" not in can:
        return Choice("encoding", "full", f"{transport} has no other")
    if weights.keep < 2:
        return Choice("encoding", "full", "keep=1, and a delta is against the version before, which is not kept")
    if weights.options.get("delta_bytes") == 0:
        return Choice("encoding", "full", "delta_bytes=0")
    return Choice("encoding", "delta", "without loss, wherever it is smaller than the whole")


def choose_swap(
    name: str, can: Collection[str], asked: str = AUTO, *, token_versions: bool = True, verify: Sequence[str] = ()
) -> Choice:
    """Choose when an engine loads new weights. ``can``: ``Capabilities.swap``. Raises ConfigError for a policy the
    engine does not support."""
    can_do = ", ".join(sorted(can))
    if asked != AUTO:
        check_types(Weights, {"swap": asked})
        needed = asked if asked in ("partial", "in_flight") else "drain"
        if needed not in can:
            how = {"in_flight": "while requests run", "partial": "between the parts of a response"}
            raise ConfigError(
                f'{name} cannot load weights {how.get(asked, "after draining")}, which swap="{asked}" does; it can:'
                f" {can_do or 'nothing'}"
            )
        if asked == "in_flight" and not token_versions:
            raise ConfigError(f'{name} does not say which version drew which token, and swap="in_flight" needs that')
        return Choice("swap", asked, "as asked")
    if "drain" in can:
        return Choice("swap", "drain", f"{name} can, and each response is of one version then")
    if "partial" in can:
        return Choice("swap", "partial", f"{name} cannot load after draining")
    if "in_flight" in can and token_versions and "probe" not in verify:
        return Choice("swap", "in_flight", f"{name} can load in no other way")
    but = "" if token_versions else ", and does not say which version drew which token"
    but += ', and verify="probe" needs an engine in which nothing runs' if "probe" in verify else ""
    raise ConfigError(f"{name} cannot be given new weights: it can load them {can_do or 'never'}{but}")


# ---- staleness policies named by a driver: installed ones by name, others of its own process

Own: TypeAlias = dict[str, Callable[..., StalenessPolicy]]
Named: TypeAlias = str | Callable[..., StalenessPolicy]
Policy: TypeAlias = Named | tuple[Named, Mapping[str, Any]]
"""A name, "module:name", a class; or one of these and options."""


def find_policy(policy: Any) -> tuple[PolicySpec, Own]:
    """Return a policy's name and options for the ledger, and its factory unless it is installed.

    ``policy``: a name; "module:name", imported here and never in a server for a client; a class or another callable;
    or one of these and options. Raises ConfigError, and PluginError with the installed policies."""
    of, options = policy if isinstance(policy, tuple) and len(policy) == 2 else (policy, {})
    own: Own = {}
    if isinstance(of, str) and ":" in of:
        own[of] = import_name(of)
    elif callable(of):
        own[str(getattr(of, "__qualname__", type(of).__name__))] = of
        (of,) = own
    spec = spec_of("staleness policy", PolicySpec, (of, options) if options else of)
    if spec is None:
        raise ConfigError("no staleness policy is named; the default is 'wait'")
    make_policy(spec, own)
    return spec, own


def rule_of(staleness: Staleness) -> dict[str, Any]:
    """Return the properties of a policy before a run, as plain data."""
    spec, own = find_policy(staleness.policy)
    made = make_policy(spec, own)
    return {
        "max_staleness": staleness.max_staleness,
        "policy": spec.name,
        "options": spec.options,
        "promise": made.promise,
        "bounded": made.bounded,
    }


def rows_needed(staleness: Staleness, batch_rows: int) -> int:
    """Return the least capacity of a queue in rows. Raises ConfigError, PluginError."""
    return make_policy(*find_policy(staleness.policy)).least_rows(batch_rows, staleness.max_staleness)
