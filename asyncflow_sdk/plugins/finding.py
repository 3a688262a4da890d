"""Finding plugins: every one of this environment, and what is wrong with those that cannot be used.

None stops the others. What is wrong is said with package, version and cure: in ``Registry.problems``, in the log of each process
that looks ("asyncflow_sdk.plugins", a warning), by ``asyncflow plugins``, and wherever a name is not found.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata as metadata
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pluggy

from .._version import __version__
from ..errors import PluginError
from .choice import CORE, ONLY, WITHOUT, Choice, plain, read_choice
from .requirements import first, other_sdk, unmet
from .spec import GROUP, AdapterSpec, HookSpecs, Kind

_log = logging.getLogger("asyncflow_sdk.plugins")
_BY_PATH = ("rollout", "train", "algorithm", "tracker")
"""Kinds that a driver may name by "module:attribute". Other names come from clients, who must not have anything imported."""
_OURS = "asyncflow-sdk"


@dataclass(frozen=True)
class Adapter:
    """An adapter as found: what it says of itself, and the distribution it came from."""

    spec: AdapterSpec
    source: str

    @property
    def missing(self) -> list[str]:
        """The requirements that are not met, each with why."""
        return [problem for requirement in self.spec.requires if (problem := unmet(requirement))]

    @property
    def cure(self) -> str:
        """The pip line that installs what is missing."""
        wanted = " ".join(f"'{first(r)}'" for r in self.spec.requires)
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
        except (Exception, SystemExit) as error:
            lacks = isinstance(error, ImportError) and self.spec.requires
            again = f". It needs {', '.join(self.spec.requires)}: {self.cure}" if lacks else ""
            raise PluginError(
                f"{what}: importing {self.spec.factory!r} failed: {type(error).__name__}: {error}{again}"
            ) from error
        return factory  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Registry:
    """All adapters found, and what was wrong with those that were not taken. ``blocked``: plugins that were not looked into."""

    adapters: tuple[Adapter, ...]
    problems: tuple[str, ...]
    blocked: tuple[str, ...] = ()

    def find(self, kind: Kind, name: str) -> Adapter | None:
        """The adapter of a kind by name; None where there is none."""
        return next((a for a in self.adapters if (a.spec.kind, a.spec.name) == (kind, name)), None)

    def get(self, kind: Kind, name: str) -> Adapter:
        """The adapter of a kind by name; of engines, algorithms and trackers also by "module:attribute", which no plugin
        registers. Raises PluginError that lists the known ones and the problems."""
        if ":" in name and kind in _BY_PATH:
            return Adapter(AdapterSpec(kind=kind, name=name, factory=name), "its path")
        found = self.find(kind, name)
        if found is not None:
            return found
        names = [a.spec.name for a in self.adapters if a.spec.kind == kind]
        known = f"{', '.join(names) or 'none'}.{_near(name, names)}"
        lines = [f"\n  not loaded: {problem}" for problem in self.problems]
        lines += [f"\n  blocked: {blocked}" for blocked in self.blocked]
        raise PluginError(
            f"no {kind} adapter is named {name!r}; installed: {known} `asyncflow plugins` lists them{''.join(lines)}"
        )


def registry() -> Registry:
    """Every plugin of this environment that may be loaded, looked for once. What is wrong with others is logged."""
    return _registry(read_choice())


@lru_cache(maxsize=4)
def _registry(choice: Choice) -> Registry:
    found = find_plugins(choice)
    for problem in found.problems:
        _log.warning("%s", problem)
    return found


def find_plugins(choice: Choice | None = None) -> Registry:
    """Look for plugins now."""
    finding = _Finding(choice or read_choice())
    for entry in finding.entries():
        finding.take(entry)
    finding.check_names()
    return Registry(tuple(finding.adapters.values()), tuple(finding.problems), tuple(finding.blocked))


@dataclass
class _Finding:
    choice: Choice
    adapters: dict[tuple[str, str], Adapter] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def entries(self) -> list[metadata.EntryPoint]:
        """All that are installed; the SDK's own first, so that nobody else's has one of its names."""
        try:
            entries = list(metadata.entry_points(group=GROUP))
        except Exception:  # one distribution's list cannot be read: ask each by itself
            entries = list(self._one_by_one())
        return sorted(entries, key=lambda e: (_package(e) != _OURS, e.name, e.value))

    def _one_by_one(self) -> Iterator[metadata.EntryPoint]:
        seen: set[str] = set()
        for distribution in metadata.distributions():
            try:
                name = plain(distribution.name)
                if name not in seen:
                    yield from distribution.entry_points.select(group=GROUP)
                seen.add(name)
            except Exception as error:
                self.problems.append(
                    f"a distribution at {getattr(distribution, '_path', '?')} cannot be read:"
                    f" {type(error).__name__}: {error}; install it again"
                )

    def take(self, entry: metadata.EntryPoint) -> None:
        package = _package(entry)
        source = f"{package} {entry.dist.version}" if entry.dist else entry.value
        self.names |= {plain(entry.name), plain(package)}
        core = package == _OURS and entry.name == CORE
        if not core and not self.choice.allows((entry.name, package)):
            self.blocked.append(f"plugin {entry.name!r} of {source}")
            return
        cure = f"pip install -U {package}, or leave it out: --no-plugin {entry.name}"
        newer = f"it is for another SDK than {__version__}: pip install -U {_OURS}, or another version of {package}"

        def tell(what: str, cure: str = cure) -> None:
            self.problems.append(f"plugin {entry.name!r} of {source}: {what}; {cure}")

        needs = other_sdk(entry.dist, __version__) if entry.dist else ""
        if needs:
            tell(f"it needs {needs}, and {__version__} is installed", newer)
            return
        try:
            specs = _specs_of(entry.load())
        except KeyboardInterrupt:
            raise
        except pluggy.PluginValidationError as error:
            tell(str(error).replace("\n", " "), newer)
            return
        except BaseException as error:  # SystemExit, and what test runners raise to skip
            tell(f"{type(error).__name__}: {error}")
            return
        for spec in specs:
            self._add(spec, source, tell, newer)

    def _add(self, spec: Any, source: str, tell: Callable[..., None], newer: str) -> None:
        if not isinstance(spec, AdapterSpec):
            tell(f"asyncflow_adapters returned {spec!r:.100}, which is no AdapterSpec")
            return
        try:
            odd = spec.problem()
        except Exception as error:
            odd = f"{type(error).__name__}: {error}"
        if odd:
            tell(f"adapter {spec.name!r} is left out: {odd}", newer)
            return
        known = self.adapters.setdefault((spec.kind, spec.name), Adapter(spec, source))
        if known.spec is not spec:
            tell(
                f"{spec.kind} adapter {spec.name!r} comes from {known.source} already, and that one is taken",
                "uninstall one of them, or leave one out with --no-plugin",
            )

    def check_names(self) -> None:
        """Names that block or allow nothing are mistakes."""
        blocking = f"--no-plugin, or {WITHOUT},"  # the option sets the variable, which is all that workers hear of
        for who, named in ((blocking, self.choice.without), (ONLY, self.choice.only or ())):
            for name in named:
                if plain(name) not in self.names:
                    self.problems.append(
                        f"{who} names {name!r}, and no plugin has that name in this environment;"
                        f" there are: {', '.join(sorted(self.names))}.{_near(plain(name), self.names)}"
                    )
                elif who == blocking and plain(name) == CORE:
                    self.problems.append(f"{who} names {name!r}, without which nothing works: it was loaded")


def _near(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _package(entry: metadata.EntryPoint) -> str:
    return str(entry.dist.name) if entry.dist else entry.value.partition(":")[0]


def _specs_of(plugin: object) -> list[Any]:
    """What one plugin registers. A manager of its own, so that nothing it does wrong touches another."""
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(HookSpecs)
    manager.register(plugin)
    manager.check_pending()
    if not manager.hook.asyncflow_adapters.get_hookimpls():
        folder = next(iter(getattr(plugin, "__path__", ())), "?")
        at = getattr(plugin, "__file__", None) or folder  # a folder of that name, where another plugin was meant
        raise PluginError(
            f"it registers nothing: give it a function asyncflow_adapters with @asyncflow_sdk.hookimpl; it is {at}"
        )
    returned = manager.hook.asyncflow_adapters(sdk=__version__)
    specs = [spec for given in returned if not isinstance(given, (str, bytes, dict, AdapterSpec)) for spec in given]
    if not specs:
        said = f"{returned[0]!r:.100}" if returned else "None"
        raise PluginError(f"asyncflow_adapters returned {said}; a list of AdapterSpec is expected")
    return specs
