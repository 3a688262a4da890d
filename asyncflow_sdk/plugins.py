"""Plugins: one hook, through which engines, transports and everything else arrive.

    # mine/plugin.py, named in pyproject.toml under [project.entry-points.asyncflow_sdk]
    import asyncflow_sdk as af

    @af.hookimpl
    def asyncflow_adapters():
        return [af.AdapterSpec(kind="rollout", name="mine", factory="mine.engine:Mine", requires=["mylib>=2"])]

A plugin module is imported to list it, so it must not import its engine: the factory is a string.
"""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, get_args

import pluggy

from .errors import ConfigError, PluginError

GROUP = "asyncflow_sdk"
Kind = Literal["rollout", "train", "transport", "store", "sampler", "staleness", "algorithm", "launcher", "tracker"]
hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """One adapter of a plugin.

    ``factory``: "module:attribute", imported only when used. ``requires``: requirements of the engine
    behind it, as pip writes them. ``install``: the pip line that brings them. ``tested``: what versions
    it was tested with, for people to read.
    """

    kind: Kind
    name: str
    factory: str
    requires: list[str] = field(default_factory=list)
    install: str = ""
    tested: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"adapter {self.name!r}: kind {self.kind!r} is not one of {get_args(Kind)}")
        if ":" not in self.factory:
            raise ConfigError(f"adapter {self.name!r}: factory {self.factory!r} is not 'module:attribute'")


class HookSpecs:
    """The hook. Plugins implement what is here and nothing else."""

    @hookspec
    def asyncflow_adapters(self) -> Iterable[AdapterSpec]:
        """Return the adapters of this plugin. Called once; must not import an engine."""
        raise NotImplementedError("pluggy reads this signature and never calls it: plugins have bodies of their own")


@dataclass(frozen=True)
class Adapter:
    """An adapter as found: what it says of itself, and the distribution it came from."""

    spec: AdapterSpec
    source: str

    @property
    def missing(self) -> list[str]:
        """The requirements that are not installed, each with why."""
        return [problem for requirement in self.spec.requires if (problem := _unmet(requirement))]

    @property
    def cure(self) -> str:
        """The pip line that installs what is missing."""
        wanted = " ".join(f"'{r}'" for r in self.spec.requires)
        return self.spec.install or f"pip install {wanted}"

    def load(self) -> Callable[..., Any]:
        """Import the factory. Raises PluginError with the pip line when its engine is not installed."""
        kind = f"{self.spec.kind} engine" if self.spec.kind in ("rollout", "train") else self.spec.kind
        what = f"{kind} {self.spec.name!r} (from {self.source})"
        if self.missing:
            raise PluginError(f"{what} needs {'; '.join(self.missing)}. Install with: {self.cure}")
        module, _, attribute = self.spec.factory.partition(":")
        try:
            factory = getattr(importlib.import_module(module), attribute)
        except Exception as error:
            again = f". It needs {', '.join(self.spec.requires)}: {self.cure}" if self.spec.requires else ""
            raise PluginError(
                f"{what}: importing {self.spec.factory!r} failed: {type(error).__name__}: {error}{again}"
            ) from error
        return factory  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Registry:
    """All adapters found, and what was wrong with those that were not taken."""

    adapters: tuple[Adapter, ...]
    problems: tuple[str, ...]

    def get(self, kind: Kind, name: str) -> Adapter:
        """The adapter of a kind by name, or an engine by "module:attribute" that no plugin registers. Raises PluginError
        that lists the known ones and the problems."""
        if ":" in name and kind in (
            "rollout",
            "train",
        ):  # other names come from clients, who must not have anything imported
            return Adapter(AdapterSpec(kind=kind, name=name, factory=name), "its path")
        for adapter in self.adapters:
            if (adapter.spec.kind, adapter.spec.name) == (kind, name):
                return adapter
        known = ", ".join(a.spec.name for a in self.adapters if a.spec.kind == kind) or "none"
        broken = "".join(f"\n  not loaded: {problem}" for problem in self.problems)
        raise PluginError(
            f"no {kind} adapter is named {name!r}; installed: {known}. `asyncflow plugins` lists them{broken}"
        )


@lru_cache(maxsize=1)
def registry() -> Registry:
    """Find every plugin of this environment. A broken one is reported and does not stop the others."""
    adapters: dict[tuple[str, str], Adapter] = {}
    problems: list[str] = []
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda e: (e.name, e.value)):
        source = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
        try:
            found = _adapters_of(entry.load())
        except Exception as error:
            problems.append(f"plugin {entry.name!r} of {source}: {type(error).__name__}: {error}")
            continue
        for spec in found:
            known = adapters.get((spec.kind, spec.name))
            if known is not None:
                problems.append(
                    f"plugin {entry.name!r} of {source}: {spec.kind} adapter {spec.name!r} already comes from"
                    f" {known.source}; uninstall one of them"
                )
                continue
            adapters[spec.kind, spec.name] = Adapter(spec, source)
    return Registry(tuple(adapters.values()), tuple(problems))


def _adapters_of(plugin: object) -> list[AdapterSpec]:
    """What one plugin registers. A manager of its own, so that nothing it does wrong touches another."""
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(HookSpecs)
    manager.register(plugin)
    manager.check_pending()
    found = [spec for specs in manager.hook.asyncflow_adapters() for spec in specs]
    if not found:
        raise PluginError("it registers nothing: give it a function asyncflow_adapters with @asyncflow_sdk.hookimpl")
    for spec in found:
        if not isinstance(spec, AdapterSpec):
            raise PluginError(f"asyncflow_adapters returned {spec!r}, which is no AdapterSpec")
    return found


def _unmet(requirement: str) -> str:
    """Why a requirement such as "torch>=2.6" is not met; "" when it is."""
    from packaging.requirements import Requirement

    wanted = Requirement(requirement)
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{wanted.name}, which is not installed"
    if not wanted.specifier.contains(version, prereleases=True):
        return f"{requirement}, but {version} is installed"
    return ""


def import_path(function: Callable[..., Any]) -> str | None:
    """ "module:name" by which another process can import ``function``; None when it cannot."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<locals>")
    if module in (None, "__main__", "builtins") or "<" in name:
        return None
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    spec = importlib.util.find_spec(module)
    return f"{module}:{name}" if found is function and spec is not None else None


def import_name(path: str) -> Any:
    """What "module:name" names. Raises ConfigError saying which half was not found."""
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{path!r} cannot be imported: {error}") from error
    return found
