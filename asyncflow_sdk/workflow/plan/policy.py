"""Staleness policies named by a driver: installed ones by name, others from its own process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ...errors import ConfigError
from ...interfaces import StalenessPolicy
from ...ledger.staleness import make_policy
from ...plugins import import_name
from ...queue.client import policy_spec
from ...types import Staleness
from ...types.tasks import PolicySpec

Own: TypeAlias = dict[str, Callable[..., StalenessPolicy]]
Named: TypeAlias = str | Callable[..., StalenessPolicy]
Policy: TypeAlias = Named | tuple[Named, Mapping[str, Any]]
"""A name, "module:name", a class; or one of these and options."""


def find_policy(policy: Any) -> tuple[PolicySpec, Own]:
    """Return a policy's name and options for the ledger, and its factory unless it is installed.

    ``policy``: a name; "module:name", imported here and never in a server for a client; a class or
    another callable; or one of these and options. Raises ConfigError, and PluginError with the
    installed policies.
    """
    of, options = policy if isinstance(policy, tuple) and len(policy) == 2 else (policy, {})
    own: Own = {}
    if isinstance(of, str) and ":" in of:
        own[of] = import_name(of)
    elif callable(of):
        own[str(getattr(of, "__qualname__", type(of).__name__))] = of
        (of,) = own
    spec = policy_spec((of, options) if options else of)
    if spec is None:
        raise ConfigError("no staleness policy is named; the default is 'wait'")
    make_policy(spec, own)
    return spec, own


def rule_of(staleness: Staleness) -> dict[str, Any]:
    """Return the properties of a policy before a run, as plain data."""
    spec, own = find_policy(staleness.policy)
    made = make_policy(spec, own)
    return {
        "max_staleness": staleness.max_staleness, "policy": spec.name, "options": spec.options,
        "promise": made.promise, "bounded": made.bounded,
    }  # fmt: skip


def rows_needed(staleness: Staleness, batch_rows: int) -> int:
    """Return the least capacity of a queue in rows. Raises ConfigError, PluginError."""
    return make_policy(*find_policy(staleness.policy)).least_rows(batch_rows, staleness.max_staleness)
