"""Conformance: run the checks of an engine, with or without pytest.

kit = Conformance("rollout", "mine.engine:Mine", options={"threads": 1})

@kit.parametrize                     # under pytest: one test a check
def test_contract(check):
    check()

report = kit.run(print)              # without pytest
report.causes                        # the failures by probable cause
report.level                         # "full": no applicable check of the tiers basic and full failed
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

from ..._version import __version__
from ...errors import ConfigError, PluginError
from ...plugins import Kind, import_name, registry
from ...types.defaults import CHECK_S
from ...types.dtypes import check_floating
from .check import TIERS, Check, CheckFailed, CheckResult, DoesNotApply, NotAsked, ProbableCause, probable_causes
from .lab import Lab, PlainLab
from .policy import Policy
from .precision import dtype_of, tolerance_of
from .ranks import RankProcesses
from .rollout.lab import RolloutLab
from .train.lab import TrainLab

HUGGING_FACE = "asyncflow_torch.reference:HuggingFacePolicy"
_MODULES = {
    "rollout": (
        "rollout.basic", "rollout.restrictions", "rollout.loads", "rollout.full", "rollout.swaps", "rollout.machine", "rollout.chaos",
    ),
    "train": ("train.basic", "train.full", "train.parts", "train.inputs", "train.chaos"),
    "transport": ("transport_checks",),
    "sampler": ("sampler_checks",),
    "staleness": ("staleness_checks",),
    "algorithm": ("algorithm_checks",),
    "launcher": ("launcher_checks",),
    "tracker": ("tracker_checks",),
    "store": ("store_checks",),
}  # fmt: skip
KINDS = tuple(_MODULES)
"""Kinds of plugins with checks."""

_LABS: dict[str, Callable[..., Lab]] = {"rollout": RolloutLab, "train": TrainLab}
"""Kinds with a model; others have a `PlainLab`."""


@dataclass(frozen=True)
class Report:
    """The results of all checks of an engine. ``asked``: the settings, as from `Conformance.asked`."""

    kind: str
    engine: str
    results: tuple[CheckResult, ...]
    asked: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if nothing failed unexpectedly."""
        return not any(result.bad for result in self.results)

    @property
    def level(self) -> str:
        """The highest tier reached: all its checks, and those of the tiers below, passed or do not apply.

        "" is none. Expected failures and checks that were not asked count against it.
        """
        reached = ""
        for tier in TIERS:
            asked = [result for result in self.results if result.check.tier == tier]
            whole = {each.name for each in checks_of(self.kind) if each.tier == tier}
            short = any(result.outcome not in ("passed", "does not apply") for result in asked)
            if not asked or short or whole != {each.check.name for each in asked}:
                return reached
            reached = tier
        return reached

    @property
    def causes(self) -> list[ProbableCause]:
        """The failures grouped by probable cause, the cause of most failures first."""
        return probable_causes(self.results, checks_of(self.kind))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        results = [result.to_dict() for result in self.results]
        return {
            "sdk": __version__,
            "kind": self.kind,
            "engine": self.engine,
            "level": self.level,
            "ok": self.ok,
            "causes": [cause.title for cause in self.causes],
            **self.asked,
            "results": results,
        }


class Conformance:
    """The checks of one engine. Not thread-safe. Raises ConfigError and PluginError.

    ``engine``: an adapter's name, "module:attribute", or the factory; ``options``: its options. ``policy``: the
    source of correct answers, a `Policy` or "module:attribute"; by default the factory's ``conformance_policy`` ("":
    correct answers are unknown), else a small Hugging Face model (``model``: another folder; ``dtype``: of its
    weights, by default the folder's).

    ``tiers``, ``only``: the checks to run, by tier or name. ``expected``: checks expected to fail, with reasons;
    passing is then a failure. ``tolerance``: of log-probs, nats; by default suitable for the dtype of the policy's
    weights. ``limit_s``: the limit of each check. ``seed``: of randomised checks; None: a fixed one. ``world_size``:
    the processes of one train engine, each with a rank's environment.
    """

    def __init__(
        self,
        kind: Kind,
        engine: str | Callable[..., Any],
        *,
        options: Mapping[str, Any] | None = None,
        policy: Policy | str | None = None,
        model: str | None = None,
        dtype: str | None = None,
        tiers: Sequence[str] = ("basic", "full"),
        only: Sequence[str] = (),
        expected: Mapping[str, str] | None = None,
        tolerance: float | None = None,
        limit_s: float = CHECK_S,
        seed: int | None = None,
        world_size: int = 1,
    ) -> None:
        checks = checks_of(kind)
        self.kind, self.engine = kind, engine if isinstance(engine, str) else _name_of(engine)
        self.expected = dict(expected or {})
        _check_known("tier", tiers, TIERS)
        for names in (only, self.expected):
            _check_known(f"check of {kind} engines", names, [each.name for each in checks])
        for name, reason in self.expected.items():
            if not reason:
                raise ConfigError(f"check {name!r} is expected to fail, and no reason is given")
        self.checks = tuple(each for each in checks if (each.name in only if only else each.tier in tiers))
        if not self.checks:
            raise ConfigError(f"no check is left: there is none of {kind} engines in {', '.join(only or tiers)}")
        if tolerance is not None and not tolerance > 0:
            raise ConfigError(f"tolerance is above 0, not {tolerance}")
        if dtype is not None:
            check_floating(dtype)
        if world_size != 1 and (kind != "train" or world_size < 1):
            raise ConfigError(f"world_size={world_size} is not for {kind} engines: train engines have 1 rank or more")
        self._named, self._policy, self._options = engine, policy, dict(options or {})
        self._given: dict[str, Any] = {
            "options": {name: _plain(value) for name, value in self._options.items()},
            "model": model,
            "policy": None,
            "dtype": dtype,
            "tolerance": tolerance,
            "limit_s": limit_s,
            "seed": seed,
            "world_size": world_size,
        }
        self._known: dict[str, Any] = {}
        self._ranks: RankProcesses | None = None
        self._lab: Lab | None = None
        self.waits: Callable[[float], Any] = lambda _: None
        """Called before each wait for the engine, with its limit in seconds."""

    @property
    def unknowable(self) -> str:
        """The reason if correct answers are unknown, else "". Raises PluginError if it cannot be loaded."""
        empty = (
            self.kind in _LABS and self._policy is None and getattr(self._factory(), "conformance_policy", None) == ""
        )
        return "it answers as no model does: its conformance_policy is empty" if empty else ""

    def run(self, on_result: Callable[[CheckResult], Any] = lambda _: None) -> Report:
        """Run all checks in turn; ``on_result`` is called with each result."""
        results: list[CheckResult] = []
        try:
            for each in self.checks:
                results.append(self.ask(each))
                on_result(results[-1])
            return Report(self.kind, self.engine, tuple(results), self.asked())
        finally:
            self.close()

    def ask(self, check: Check, *, renew: bool = True) -> CheckResult:
        """Run one check. ``renew``: use a new engine after a failure. Raises ConfigError and
        PluginError if there can be no engine."""
        if self._lab is None:
            self._lab = self._make_lab()
            self._lab.seed, self._lab.waits = self._given["seed"], self.waits
        began = time.monotonic()
        try:
            said = self._lab.ask(check.body, f"check {check.name!r}")
        except DoesNotApply as why:
            return CheckResult(check, "does not apply", str(why))
        except NotAsked as why:
            return CheckResult(check, "not asked", str(why))
        except Exception as error:
            spent, text = time.monotonic() - began, _said(error)
            cause, hint = (error.cause, error.hint) if isinstance(error, CheckFailed) else ("", "")
            if not self._lab.ever_made:
                cause = f"the engine cannot be made: {text}"
            if renew:
                self._lab.renew()
            return self.judged(CheckResult(check, "failed", text, spent, cause, hint))
        return self.judged(CheckResult(check, "passed", said or "", time.monotonic() - began))

    def judged(self, result: CheckResult) -> CheckResult:
        """Return a result with the expectation for its check applied."""
        reason = self.expected.get(result.check.name)
        if reason is None or result.outcome not in ("passed", "failed"):
            return result
        if result.outcome == "failed":
            return replace(result, outcome="failed as expected", detail=reason, cause="", hint="")
        text = f"it was expected to fail ({reason}); take the expectation out"
        return replace(result, outcome="passed unexpectedly", detail=text)

    @property
    def ever_made(self) -> bool:
        """True once there was an engine."""
        return self._lab is not None and self._lab.ever_made

    def asked(self) -> dict[str, Any]:
        """Return the settings behind the results as plain values: options, model, dtype, tolerance,
        versions of loaded packages."""
        machine = {"python": platform.python_version(), "platform": platform.platform()}
        return {**self._given, **self._known, **machine, "packages": _packages()}

    def __iter__(self) -> Iterator[BoundCheck]:
        return (BoundCheck(self, each) for each in self.checks)

    @property
    def parametrize(self) -> Any:
        """A mark for a pytest function with the parameter ``check``, to be called by it."""
        import pytest

        atexit.register(self._close_late)
        return pytest.mark.parametrize("check", list(self), ids=str)

    def close(self) -> None:
        """Free the engine. Idempotent; another check makes another engine."""
        lab, self._lab = self._lab, None
        try:
            if lab is not None:
                lab.close()
        finally:
            ranks, self._ranks = self._ranks, None
            if ranks is not None:
                ranks.close()

    def _close_late(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter ends: no thread can be started any more
            self.close()

    def _make_lab(self) -> Lab:
        factory, limit_s, size = self._factory(), self._given["limit_s"], self._given["world_size"]
        if self.kind not in _LABS:
            return PlainLab(self.engine, factory, self._options, limit_s=limit_s)
        if self.unknowable:
            raise ConfigError(f"{self.engine}: {self.unknowable}")
        policy = self._find_policy(factory)
        dtype = dtype_of(policy.tensors(0))
        tolerance = tolerance_of(dtype) if self._given["tolerance"] is None else self._given["tolerance"]
        self._known = {"policy": _name_of(type(policy)), "dtype": dtype, "tolerance": tolerance}
        if size > 1:
            factory = self._ranks = RankProcesses(factory, size)
            self._ranks.begin()
        return _LABS[self.kind](factory, policy, self._options, tolerance=tolerance, limit_s=limit_s)

    def _factory(self) -> Callable[..., Any]:
        return registry().get(self.kind, self._named).load() if isinstance(self._named, str) else self._named

    def _find_policy(self, factory: Any) -> Policy:
        model, dtype = self._given["model"], self._given["dtype"]
        policy = self._policy or (None if model else getattr(factory, "conformance_policy", None))
        if policy is None:
            try:
                made = import_name(HUGGING_FACE)(model, dtype=dtype or "auto")
            except ConfigError as error:
                raise PluginError(
                    f"to know right answers the kit computes them with transformers: {error}. Install it with: pip"
                    " install 'asyncflow-sdk[torch]'; or give an engine of another kind of model a policy of its own"
                ) from error
        else:
            if dtype is not None:
                raise ConfigError(
                    f"dtype={dtype!r} is of a Hugging Face model, and {self.engine} has a policy of its own"
                )
            made = import_name(policy) if isinstance(policy, str) else policy
            made = made() if isinstance(made, type) else made
        if not isinstance(made, Policy):
            raise ConfigError(f"{policy!r} is {made!r}, no asyncflow_sdk.testing.Policy")
        return made


class BoundCheck:
    """One check of one engine, callable."""

    def __init__(self, kit: Conformance, check: Check) -> None:
        self.kit, self.check = kit, check

    def __call__(self) -> None:
        """Run it. Raises CheckFailed with observation, impact and hint.

        Under pytest a check that does not apply is skipped, and an expected failure is an xfail.
        """
        result = self.kit.ask(self.check)
        if self.check is self.kit.checks[-1]:
            self.kit.close()
        if result.bad:
            asks, hint = f"asks: {self.check.question}", f"hint: {result.hint or self.check.hint}"
            said = f"{result.detail}\n  {asks}\n  impact: {self.check.impact}\n  {hint}"
            raise CheckFailed(said, result.cause)
        ends = {"does not apply": "skip", "not asked": "skip", "failed as expected": "xfail"}
        if result.outcome in ends and "_pytest" in sys.modules:
            getattr(importlib.import_module("pytest"), ends[result.outcome])(result.detail)

    def __str__(self) -> str:
        return self.check.name


@functools.cache
def checks_of(kind: str) -> tuple[Check, ...]:
    """Return all checks of a kind, by tier. Raises ConfigError for a kind without checks."""
    if kind not in _MODULES:
        raise ConfigError(f"there are no checks of kind {kind!r}; there are of {', '.join(_MODULES)}")
    modules = [importlib.import_module(f"{__package__}.{module}") for module in _MODULES[kind]]
    found = [each for module in modules for each in module.CHECKS]
    assert len({each.name for each in found}) == len(found), f"two checks of {kind} engines have one name"
    return tuple(sorted(found, key=lambda each: TIERS.index(each.tier)))


def _check_known(what: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"no {what} is named {name!r}; there are {', '.join(known)}")


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"


def _plain(value: Any) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return repr(value)
    return value


def _packages() -> dict[str, str]:
    loaded = {name.partition(".")[0] for name in tuple(sys.modules)}
    found = {each for top, names in _distributions().items() if top in loaded for each in names}
    return {name: _version(name) for name in sorted(found, key=str.lower)}


_distributions, _version = functools.cache(metadata.packages_distributions), functools.cache(metadata.version)


def _name_of(factory: Callable[..., Any]) -> str:
    return f"{getattr(factory, '__module__', '?')}:{getattr(factory, '__qualname__', repr(factory))}"
