"""Policing: asking the staleness policy, and doing what it says. What it said is noted, so that a replay asks none."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from ..errors import AsyncFlowError, PluginError
from ..interfaces import Filling, StalenessPolicy
from ..types import events as ev
from .commands import PolicySpec
from .ending import Ending
from .making import make_policy
from .records import Rule
from .rows import NONE
from .state import EXPIRED, MAX_NUMBER


class Policing(Ending):
    """Admits, selects and evicts as the policy says, within what no policy may say otherwise."""

    TRANSIENT = Ending.TRANSIENT | {"make_policy", "_policy"}

    def __init__(self) -> None:
        super().__init__()
        self.make_policy: Callable[[PolicySpec], StalenessPolicy] = make_policy
        self._policy: StalenessPolicy | None = None  # made when first needed

    def _set_policy(self, spec: PolicySpec) -> None:
        """Of the steps to come. Raises PluginError, ConfigError; then it is what it was."""
        before = self._policy
        self._policy = None
        try:
            self.rule = self._look_at(spec)
        except AsyncFlowError:
            self._policy = before
            raise

    def _rule_for(self, batch_rows: int) -> Rule:
        """What the ledger must know of the policy beside its answers. Raises PluginError, ConfigError."""
        return self._look_at(self.rule.spec, batch_rows)

    def _look_at(self, spec: PolicySpec, batch_rows: int = 1) -> Rule:
        def look() -> bytes:
            policy = self._made(spec)
            try:
                least = operator.index(policy.least_rows(batch_rows, self.max_staleness))
            except Exception as error:
                raise _failed(spec, error) from error
            return msgspec.msgpack.encode((str(policy.promise), bool(policy.bounded), min(least, MAX_NUMBER)))

        said = msgspec.msgpack.decode(self.outside.guarded(look), type=tuple[str, bool, int])
        return Rule(spec, *said)

    def _made(self, spec: PolicySpec) -> StalenessPolicy:
        if self._policy is None:
            self._policy = self.make_policy(spec)
        return self._policy

    def _filling(self) -> Filling:
        assert self.steps is not None
        return self.steps.window.filling(self.lineage.step(self.version))

    def _admittable(self, deadline: int) -> int:
        """How many rows with this deadline may begin. Raises PluginError."""
        assert self.steps is not None
        window = self.steps.window
        if window.finished or (self.rule.bounded and deadline < window.step):
            return 0
        (room,) = self._asked(lambda policy, filling: [policy.admit(filling, deadline)])
        if window.slots is not None:
            room = min(room, window.slots - window.under_way)
        return max(0, room)

    def _selectable(self, deadline: int | None) -> int:
        """How many ready rows with this deadline may join the step; none once the policy has failed."""
        assert self.steps is not None
        window = self.steps.window
        if window.finished or (self.rule.bounded and deadline is not None and deadline < window.step):
            return 0
        (room,) = self._safely(lambda policy, filling: [policy.select(filling, deadline)]) or [0]
        return max(0, min(window.free, room))

    def _evict(self) -> None:
        """A step has closed: what is too late for the next one expires, with whoever generates it."""
        steps, rows = self.steps, self.rows
        self._stepped = False
        if steps is None or steps.window.finished or not steps.window.under_way:
            return
        late = [due for due in self._safely(lambda policy, filling: policy.evict(filling)) if steps.window.has(due)]
        if not late:
            return
        live = rows.live_ids()
        at = rows.at(live)
        open_ones = (rows.step[at] == NONE) & (rows.deadline[at] != NONE)
        gone = live[open_ones & np.isin(rows.deadline[at], late)]
        if max(late) < steps.window.step:
            reason = f"older than max_staleness {self.max_staleness} (policy {self.rule.spec.name!r})"
        else:
            reason = f"given up by staleness policy {self.rule.spec.name!r}"
        self._end_groups(gone, EXPIRED, reason)

    def _safely(self, question: Callable[[StalenessPolicy, Filling], Any]) -> list[int]:
        """Answers to what no request can fail for. When there is none, all who lease hear of it."""
        if self.policy_failed:
            return []
        try:
            return self._asked(question)
        except PluginError as error:
            self.policy_failed = str(error)
            self._effects.events.append(ev.Note(time_s=self._now, text=self.policy_failed, level="error"))
            self._wake_all()
            return []

    def _asked(self, question: Callable[[StalenessPolicy, Filling], Any]) -> list[int]:
        """What the policy answers, as numbers that can be reckoned with. Raises PluginError."""

        def look() -> bytes:
            try:
                answers = question(self._made(self.rule.spec), self._filling())
                numbers = [operator.index(answer) for answer in answers]
            except Exception as error:
                raise _failed(self.rule.spec, error) from error
            return msgspec.msgpack.encode([max(-MAX_NUMBER, min(MAX_NUMBER, number)) for number in numbers])

        return msgspec.msgpack.decode(self.outside.guarded(look), type=list[int])

    def _check_policy(self) -> None:
        if self.policy_failed:
            raise PluginError(self.policy_failed)


def _failed(spec: PolicySpec, error: Exception) -> PluginError:
    if isinstance(error, PluginError):
        return error
    return PluginError(f"staleness policy {spec.name!r} failed: {type(error).__name__}: {error}")
