"""Create samplers and staleness policies by name, from plugins or from the server's own process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..errors import AsyncFlowError, ConfigError, PluginError
from ..interfaces import Sampler, StalenessPolicy
from ..plugins import registry
from ..types.tasks import PolicySpec, SamplerSpec

Made = TypeVar("Made")


def make_sampler(spec: SamplerSpec, own: Mapping[str, Callable[..., Sampler]] | None = None) -> Sampler:
    """Create a sampler: from ``own``, else from the plugins. Raises PluginError, ConfigError."""
    factory = (own or {}).get(spec.name) or registry().get("sampler", spec.name).load()
    return _made(f"sampler {spec.name!r}", factory, spec.options, Sampler)


def make_policy(spec: PolicySpec, own: Mapping[str, Callable[..., StalenessPolicy]] | None = None) -> StalenessPolicy:
    """Create a policy: from ``own``, else from the plugins. Raises PluginError, ConfigError."""
    factory = (own or {}).get(spec.name) or registry().get("staleness", spec.name).load()
    return _made(f"staleness policy {spec.name!r}", factory, spec.options, StalenessPolicy)  # type: ignore[type-abstract]


def _made(what: str, factory: Callable[..., Any], options: Mapping[str, Any], of: type[Made]) -> Made:
    try:
        made = factory(**options)
    except AsyncFlowError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} cannot be created with {options}: {type(error).__name__}: {error}") from error
    if not isinstance(made, of):
        raise PluginError(f"{what} is a {type(made).__name__}, not a {of.__name__}")
    return made
