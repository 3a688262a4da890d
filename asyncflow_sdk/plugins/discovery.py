"""Discovery of the plugins of this environment, and of their faults.

A faulty plugin does not stop the others. Each fault is reported with package, version and remedy: in
``Registry.problems``, as a warning of the logger "asyncflow_sdk.plugins", by ``asyncflow plugins``, and in errors
about unknown names.

All plugins of the environment are loaded, unless these variables restrict them. Names are separated by commas. A
plugin answers to the name of its entry point and of its distribution.

    ASYNCFLOW_PLUGINS=mine,torch           only these, and "core"
    ASYNCFLOW_NO_PLUGINS=broken            all but these
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata as metadata
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import pluggy
from packaging.utils import canonicalize_name

from .._version import __version__
from ..errors import ConfigError, PluginError
from .spec import GROUP, AdapterSpec, HookSpecs, Kind, other_sdk, unmet

_log = logging.getLogger("asyncflow_sdk.plugins")
_BY_PATH = ("rollout", "train", "algorithm", "tracker")
"""Kinds found by "module:attribute" too. Names of other kinds come from clients, which must not trigger imports."""
ONLY, WITHOUT = "ASYNCFLOW_PLUGINS", "ASYNCFLOW_NO_PLUGINS"
CORE = "core"
"""The SDK's own plugin. It cannot be blocked."""
_OURS = "asyncflow-sdk"
OWN_PACKAGES = "accelerate ctranslate2 mlflow mooncake otel prometheus ray slurm tensorboard trackio wandb"
"""Adapters of contrib/, each in a package named after it."""


class PluginChoice(NamedTuple):
    """Names to load and names to block, as the user wrote them. ``only`` None: load all."""

    only: tuple[str, ...] | None
    without: tuple[str, ...]

    def allows(self, names: Iterable[str]) -> bool:
        """True if a plugin with these names may be loaded."""
        known = set(map(canonicalize_name, names))
        if not known.isdisjoint(map(canonicalize_name, self.without)):
            return False
        return self.only is None or not known.isdisjoint(map(canonicalize_name, self.only))


def read_choice() -> PluginChoice:
    """Read the choice from this process's environment."""
    only, without = (tuple(re.findall(r"[^,\s]+", os.environ.get(name, ""))) for name in (ONLY, WITHOUT))
    return PluginChoice(only if ONLY in os.environ else None, without)


def plugin_variables() -> dict[str, str]:
    """Return the variables set here, for processes with the same plugins."""
    return {name: os.environ[name] for name in (ONLY, WITHOUT) if name in os.environ}


def block_plugins(names: Iterable[str]) -> None:
    """Block further plugins, in this process and in processes started by it."""
    os.environ[WITHOUT] = ",".join(dict.fromkeys((*read_choice().without, *names)))


@dataclass(frozen=True)
class Adapter:
    """A registered adapter: its spec, and the distribution of its plugin."""

    spec: AdapterSpec
    source: str

    @property
    def missing(self) -> list[str]:
        """Unmet requirements, each with the reason."""
        return [problem for requirement in self.spec.requires if (problem := unmet(requirement))]

    @property
    def install_command(self) -> str:
        """The pip command to install its requirements."""
        wanted = " ".join(f"'{each.partition('|')[0].strip()}'" for each in self.spec.requires)
        return self.spec.install or f"pip install {wanted}"

    def load(self) -> Callable[..., Any]:
        """Import and return the factory. Raises PluginError, with the pip command if its engine is not installed."""
        kind = f"{self.spec.kind} engine" if self.spec.kind in ("rollout", "train") else self.spec.kind
        what = f"{kind} {self.spec.name!r} (from {self.source})"
        if self.missing:
            raise PluginError(f"{what} needs {'; '.join(self.missing)}. Install with: {self.install_command}")
        try:
            return _resolve(self.spec.factory)  # type: ignore[no-any-return]
        except (Exception, SystemExit) as error:
            lacks = isinstance(error, ImportError) and self.spec.requires
            again = f". It needs {', '.join(self.spec.requires)}: {self.install_command}" if lacks else ""
            raise PluginError(
                f"{what}: importing {self.spec.factory!r} failed: {type(error).__name__}: {error}{again}"
            ) from error


@dataclass(frozen=True)
class Registry:
    """All adapters found, faults of rejected ones, and plugins ``blocked`` by the user."""

    adapters: tuple[Adapter, ...]
    problems: tuple[str, ...]
    blocked: tuple[str, ...] = ()

    def find(self, kind: Kind, name: str) -> Adapter | None:
        """Return the adapter of a kind by name; None if there is none."""
        return next((a for a in self.adapters if (a.spec.kind, a.spec.name) == (kind, name)), None)

    def declared(self, kind: Kind, name: str, key: str) -> tuple[str, ...] | None:
        """Return what an adapter declares by ``can[key]``; None if it does not, or is not installed here."""
        found = self.find(kind, name)
        return None if found is None else found.spec.declared(key)

    def get(self, kind: Kind, name: str) -> Adapter:
        """Return an adapter by kind and name; engines, algorithms and trackers also by
        "module:attribute", without a plugin. Raises PluginError, listing known names and faults."""
        if ":" in name and kind in _BY_PATH:
            return Adapter(AdapterSpec(kind=kind, name=name, factory=name), "its path")
        found = self.find(kind, name)
        if found is not None:
            return found
        names = [a.spec.name for a in self.adapters if a.spec.kind == kind]
        known = f"{', '.join(names) or 'none'}.{_near(name, names)}"
        if name in OWN_PACKAGES.split():
            known += (
                f" It is a package of its own: pip install asyncflow-{name}, in a clone contrib/asyncflow_{name}."
            )
        lines = [f"\n  not loaded: {problem}" for problem in self.problems]
        lines += [f"\n  blocked: {blocked}" for blocked in self.blocked]
        raise PluginError(
            f"no {kind} adapter is named {name!r}; installed: {known} `asyncflow plugins` lists them{''.join(lines)}"
        )


def registry() -> Registry:
    """Return this environment's adapters, discovered once per ``PluginChoice``. Logs faults."""
    return _registry(read_choice())


@lru_cache(maxsize=4)
def _registry(choice: PluginChoice) -> Registry:
    found = find_plugins(choice)
    for problem in found.problems:
        _log.warning("%s", problem)
    return found


def find_plugins(choice: PluginChoice | None = None) -> Registry:
    """Discover plugins now, without the cache. ``choice``: default ``read_choice()``."""
    discovery = _Discovery(choice or read_choice())
    for entry in discovery.entries():
        discovery.load(entry)
    discovery.check_names()
    return Registry(tuple(discovery.adapters.values()), tuple(discovery.problems), tuple(discovery.blocked))


@dataclass
class _Discovery:
    choice: PluginChoice
    adapters: dict[tuple[str, str], Adapter] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def entries(self) -> list[metadata.EntryPoint]:
        """Return the entry points, the SDK's first: no other plugin can claim its names."""
        try:
            entries = list(metadata.entry_points(group=GROUP))
        except Exception:  # the metadata of one distribution are unreadable: read them one by one
            entries = list(self._one_by_one())
        return sorted(entries, key=lambda e: (_package(e) != _OURS, e.name, e.value))

    def _one_by_one(self) -> Iterator[metadata.EntryPoint]:
        seen: set[str] = set()
        for distribution in metadata.distributions():
            try:
                name = canonicalize_name(distribution.name)
                if name not in seen:
                    yield from distribution.entry_points.select(group=GROUP)
                seen.add(name)
            except Exception as error:
                self.problems.append(
                    f"a distribution at {getattr(distribution, '_path', '?')} cannot be read:"
                    f" {type(error).__name__}: {error}; install it again"
                )

    def load(self, entry: metadata.EntryPoint) -> None:
        """Load one entry point and add its adapters, or record its fault."""
        package = _package(entry)
        source = f"{package} {entry.dist.version}" if entry.dist else entry.value
        self.names |= {canonicalize_name(entry.name), canonicalize_name(package)}
        core = package == _OURS and entry.name == CORE
        if not core and not self.choice.allows((entry.name, package)):
            self.blocked.append(f"plugin {entry.name!r} of {source}")
            return
        update = f"pip install -U {package}, or leave it out: --no-plugin {entry.name}"
        newer = f"it is for another SDK than {__version__}: pip install -U {_OURS}, or another version of {package}"

        def report(fault: str, remedy: str = update) -> None:
            self.problems.append(f"plugin {entry.name!r} of {source}: {fault}; {remedy}")

        needs = other_sdk(entry.dist, __version__) if entry.dist else ""
        if needs:
            report(f"it needs {needs}, and {__version__} is installed", newer)
            return
        try:
            specs = _specs_of(entry.load())
        except KeyboardInterrupt:
            raise
        except pluggy.PluginValidationError as error:
            report(str(error).replace("\n", " "), newer)
            return
        except BaseException as error:  # SystemExit, and the exceptions of test runners
            report(f"{type(error).__name__}: {error}")
            return
        for spec in specs:
            self._add(spec, source, report, newer)

    def _add(self, spec: Any, source: str, report: Callable[..., None], newer: str) -> None:
        if not isinstance(spec, AdapterSpec):
            report(f"asyncflow_adapters returned {spec!r:.100}, which is no AdapterSpec")
            return
        try:
            fault = spec.problem()
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        if fault:
            report(f"adapter {spec.name!r} is left out: {fault}", newer)
            return
        known = self.adapters.setdefault((spec.kind, spec.name), Adapter(spec, source))
        if known.spec is not spec:
            report(
                f"{spec.kind} adapter {spec.name!r} is already registered by {known.source}, which is used",
                "uninstall one of them, or leave one out with --no-plugin",
            )

    def check_names(self) -> None:
        """Record a fault for each name in the choice without a plugin."""
        blocking = f"--no-plugin, or {WITHOUT},"  # the option sets the variable, for workers
        for source, named in ((blocking, self.choice.without), (ONLY, self.choice.only or ())):
            for name in named:
                if canonicalize_name(name) not in self.names:
                    self.problems.append(
                        f"{source} names {name!r}, and no plugin has that name in this environment;"
                        f" installed: {', '.join(sorted(self.names))}.{_near(canonicalize_name(name), self.names)}"
                    )
                elif source == blocking and canonicalize_name(name) == CORE:
                    self.problems.append(f"{source} names {name!r}, which cannot be blocked: it was loaded")


def _near(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _package(entry: metadata.EntryPoint) -> str:
    return str(entry.dist.name) if entry.dist else entry.value.partition(":")[0]


def _specs_of(plugin: object) -> list[Any]:
    """Return one plugin's specs, by a manager of its own: its faults cannot affect others."""
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(HookSpecs)
    manager.register(plugin)
    manager.check_pending()
    if not manager.hook.asyncflow_adapters.get_hookimpls():
        folder = next(iter(getattr(plugin, "__path__", ())), "?")
        at = getattr(plugin, "__file__", None) or folder  # a folder of the same name may shadow the plugin
        raise PluginError(
            f"it registers nothing: give it a function asyncflow_adapters with @asyncflow_sdk.hookimpl; it is {at}"
        )
    returned = manager.hook.asyncflow_adapters(sdk=__version__)
    specs = [spec for given in returned if not isinstance(given, (str, bytes, dict, AdapterSpec)) for spec in given]
    if not specs:
        value = f"{returned[0]!r:.100}" if returned else "None"
        raise PluginError(f"asyncflow_adapters returned {value}; a list of AdapterSpec is expected")
    return specs


def import_path(function: Callable[..., Any]) -> str | None:
    """Return "module:name" for a function or class; None if another process cannot import it."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<locals>")
    if module in (None, "__main__", "builtins") or "<" in name:
        return None
    path = f"{module}:{name}"
    try:
        found = _resolve(path)
    except (ImportError, AttributeError):
        return None
    return path if found is function and importlib.util.find_spec(module) is not None else None


def import_name(path: str) -> Any:
    """Import the object at "module:name". Raises ConfigError with the reason."""
    try:
        return _resolve(path)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{path!r} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:  # raised by the module's own code, such as a script that exits
        raise ConfigError(f"importing {path!r} failed: {type(error).__name__}: {error}") from error


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
