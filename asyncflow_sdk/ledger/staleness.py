"""Staleness control: ask the policy how many rows to admit and select, and which are too late.

Policies are user code. Their answers are recorded, so a replay does not call them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from ..errors import AsyncFlowError, PluginError
from ..interfaces import StalenessPolicy, StepWindow
from ..types import events as ev
from ..types.tasks import PolicySpec
from .state import LedgerState
from .state.budget import MAX_NUMBER


@dataclass
class StalenessRule:
    """A policy and its properties, see ``StalenessPolicy``. ``least_rows``: least capacity."""

    spec: PolicySpec
    promise: str = ""
    bounded: bool = True
    least_rows: int = 1


class StalenessControl:
    """``rule``: the policy. ``failed``: its error, which stops all selection; "" if none."""

    TRANSIENT = frozenset({"make_policy", "_policy"})

    def __init__(self, state: LedgerState, make_policy: Callable[[PolicySpec], StalenessPolicy]) -> None:
        self._state, self.make_policy = state, make_policy
        self.rule = StalenessRule(PolicySpec("wait"))
        self.failed = ""
        self._policy: StalenessPolicy | None = None  # made when first needed

    def set_policy(self, spec: PolicySpec) -> None:
        """Use another policy for steps to come. Raises PluginError, ConfigError, with no effect."""
        before = self._policy
        self._policy = None
        try:
            self.rule = self._describe(spec)
        except AsyncFlowError:
            self._policy = before
            raise

    def rule_for(self, batch_rows: int) -> StalenessRule:
        """Return the rule for steps of this size. Raises PluginError, ConfigError."""
        return self._describe(self.rule.spec, batch_rows)

    def use(self, rule: StalenessRule) -> None:
        """Use the rule for the steps being declared."""
        self.rule = rule
        text = f"staleness policy {rule.spec.name!r} with max_staleness {self._state.limits.max_staleness}: {rule.promise}"
        level = "info" if rule.bounded else "warning"
        self._state.context.publish(ev.Note(time_s=self._state.context.now, text=text, level=level))

    def check_available(self) -> None:
        """Raise PluginError or ConfigError if the policy cannot be created in this process."""
        self.make_policy(self.rule.spec)

    def check(self) -> None:
        """Raise PluginError if the policy has failed."""
        if self.failed:
            raise PluginError(self.failed)

    def admittable(self, deadline: int) -> int:
        """Return how many rows with this deadline may start. Raises PluginError."""
        window = self._state.steps.window
        if window.finished or (self.rule.bounded and deadline < window.step):
            return 0
        (room,) = self._call_policy(lambda policy, filling: [policy.admit(filling, deadline)])
        if window.slots is not None:
            room = min(room, window.slots - window.under_way)
        return max(0, room)

    def selectable(self, deadline: int | None) -> int:
        """Return how many ready rows with this deadline may join; 0 once the policy has failed."""
        window = self._state.steps.window
        if window.finished or (self.rule.bounded and deadline is not None and deadline < window.step):
            return 0
        (room,) = self._try_policy(lambda policy, filling: [policy.select(filling, deadline)]) or [0]
        return max(0, min(window.free, room))

    def late(self) -> list[int]:
        """Return the deadlines of rows too late for the open step."""
        window = self._state.steps.window
        return [due for due in self._try_policy(lambda policy, filling: policy.evict(filling)) if window.has(due)]

    def _describe(self, spec: PolicySpec, batch_rows: int = 1) -> StalenessRule:
        def describe() -> bytes:
            policy = self._made(spec)
            try:
                least = operator.index(policy.least_rows(batch_rows, self._state.limits.max_staleness))
            except Exception as error:
                raise _failed(spec, error) from error
            return msgspec.msgpack.encode((str(policy.promise), bool(policy.bounded), min(least, MAX_NUMBER)))

        described = self._state.context.log.record_or_raise(describe)
        return StalenessRule(spec, *msgspec.msgpack.decode(described, type=tuple[str, bool, int]))

    def _made(self, spec: PolicySpec) -> StalenessPolicy:
        if self._policy is None:
            self._policy = self.make_policy(spec)
        return self._policy

    def _try_policy(self, question: Callable[[StalenessPolicy, StepWindow], Any]) -> list[int]:
        """Call the policy. If it fails, note it, fail all parked requests and return []."""
        if self.failed:
            return []
        try:
            return self._call_policy(question)
        except PluginError as error:
            self.failed = str(error)
            self._state.context.publish(ev.Note(time_s=self._state.context.now, text=self.failed, level="error"))
            self._state.parked.wake_all()
            return []

    def _call_policy(self, question: Callable[[StalenessPolicy, StepWindow], Any]) -> list[int]:
        """Return the policy's answers, clipped to ±MAX_NUMBER. Raises PluginError."""

        def ask() -> bytes:
            versions = self._state.versions
            try:
                filling = self._state.steps.window.filling(versions.lineage.step(versions.current))
                numbers = [operator.index(answer) for answer in question(self._made(self.rule.spec), filling)]
            except Exception as error:
                raise _failed(self.rule.spec, error) from error
            return msgspec.msgpack.encode([max(-MAX_NUMBER, min(MAX_NUMBER, number)) for number in numbers])

        return msgspec.msgpack.decode(self._state.context.log.record_or_raise(ask), type=list[int])


def _failed(spec: PolicySpec, error: Exception) -> PluginError:
    if isinstance(error, PluginError):
        return error
    return PluginError(f"staleness policy {spec.name!r} failed: {type(error).__name__}: {error}")
