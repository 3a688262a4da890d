"""Staleness control: ask the policy how many rows to admit and select, and which are too late. Policies are user
code: their answers are recorded, so a replay does not call them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from ..errors import PluginError
from ..interfaces import StalenessPolicy, StepWindow
from ..types import events as ev
from ..types.tasks import PolicySpec
from .samplers import Factories, make
from .state import LedgerState
from .state.rows import MAX_NUMBER


class Wait(StalenessPolicy):
    """No row expires: steps wait for stragglers.

    k is the step being filled (it trains version k), s its free slots of B, L_j the rows under way with deadline j or
    earlier. Invariant H: for all j >= k, L_j <= s + (j - k)·B. Both methods preserve it, so no row passes its
    deadline unselected, and no row can block a step for ever. Example: k = 5, s = 8 of B = 16, 12 rows under way with
    deadline 6. Then 8 more with deadline 5 may start, or 8 + 16 - 12 = 12 with deadline 6, or 28 with deadline 7."""

    promise = "no trained token is older than max_staleness, and no row is given up: steps wait for stragglers"

    def admit(self, filling: StepWindow, deadline: int) -> int:
        """Return how many rows with ``deadline`` may start."""
        # slack grows between admitted deadlines: check only these
        return min(filling.slack(j) for j in {deadline, *filling.admitted} if j >= deadline)

    def select(self, filling: StepWindow, deadline: int | None) -> int:
        """Return how many ready rows may join, less the room that earlier deadlines need."""
        due = {filling.step, *filling.admitted}
        earlier = [j for j in due if j >= filling.step and (deadline is None or j < deadline)]
        return min([filling.free, *(filling.slack(j) for j in earlier)])


class Drop(StalenessPolicy):
    """Nothing waits for stragglers: a step takes complete groups, earliest deadline first; late ones expire.

    Rows under way are bounded in all: with deadline d, n more may start while L + n <= s + (d - k)·B. So when a step
    closes, at most max_staleness·B rows are under way and can expire: at most max_staleness / (max_staleness + 1) of
    all rows, none at 0. Long rows expire first: watch the lengths of trained rows."""

    promise = "no trained token is older than max_staleness: rows that take too long expire and are replaced"

    def admit(self, filling: StepWindow, deadline: int) -> int:
        """Return how many rows with ``deadline`` may start."""
        return filling.free + (deadline - filling.step) * filling.batch_rows - filling.total


class Count(StalenessPolicy):
    """Bounds the number of rows under way, not the age of a token: AReaL's capacity (arXiv 2505.24298, section 5.1).

    While version v is the newest, (max_staleness + v + 1)·B rows may have started. Accepted rows and rows under way
    count; filtered and failed ones do not. Tokens are no older than max_staleness on average, but a single one may
    be: a slow row is trained whenever it is complete, and a lagging replica continues."""

    promise = "only the number of rows under way is bounded: a trained token may be older than max_staleness"
    bounded = False

    def admit(self, filling: StepWindow, deadline: int) -> int:
        """Return how many rows may start, whatever their deadline."""
        steps = filling.max_staleness + filling.current + 1 - filling.step  # after the open one
        taken = filling.batch_rows - filling.free
        return steps * filling.batch_rows - taken - filling.total


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
        self.rule, self._policy = self.describe(spec), None

    def describe(self, spec: PolicySpec, batch_rows: int = 1) -> StalenessRule:
        """Return the rule of a policy for steps of this size. Raises PluginError, ConfigError."""

        def describe() -> bytes:
            policy = self.make_policy(spec)
            try:
                least = operator.index(policy.least_rows(batch_rows, self._state.limits.max_staleness))
            except Exception as error:
                raise _failed(spec, error) from error
            return msgspec.msgpack.encode((str(policy.promise), bool(policy.bounded), min(least, MAX_NUMBER)))

        described = self._state.context.log.record_or_raise(describe)
        return StalenessRule(spec, *msgspec.msgpack.decode(described, type=tuple[str, bool, int]))

    def use(self, rule: StalenessRule) -> None:
        """Use the rule for the steps being declared."""
        self.rule, limits = rule, self._state.limits
        text = f"staleness policy {rule.spec.name!r} with max_staleness {limits.max_staleness}: {rule.promise}"
        self._note(text, "info" if rule.bounded else "warning")

    def _note(self, text: str, level: str) -> None:
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

    def _try_policy(self, question: Callable[[StalenessPolicy, StepWindow], Any]) -> list[int]:
        """Call the policy. If it fails, note it, fail all parked requests and return []."""
        if self.failed:
            return []
        try:
            return self._call_policy(question)
        except PluginError as error:
            self.failed = str(error)
            self._note(self.failed, "error")
            self._state.parked.wake_all()
            return []

    def _call_policy(self, question: Callable[[StalenessPolicy, StepWindow], Any]) -> list[int]:
        """Return the policy's answers, clipped to ±MAX_NUMBER. Raises PluginError."""

        def ask() -> bytes:
            versions, spec = self._state.versions, self.rule.spec
            try:
                if self._policy is None:
                    self._policy = self.make_policy(spec)
                filling = self._state.steps.window.filling(versions.lineage.step(versions.current))
                numbers = [operator.index(answer) for answer in question(self._policy, filling)]
            except Exception as error:
                raise _failed(spec, error) from error
            return msgspec.msgpack.encode([max(-MAX_NUMBER, min(MAX_NUMBER, number)) for number in numbers])

        return msgspec.msgpack.decode(self._state.context.log.record_or_raise(ask), type=list[int])


def make_policy(spec: PolicySpec, own: Factories = None) -> StalenessPolicy:
    """Create a policy: from ``own``, else from the plugins. Raises PluginError, ConfigError."""
    return make("staleness", "staleness policy", spec, own, StalenessPolicy)  # type: ignore[type-abstract]


def _failed(spec: PolicySpec, error: Exception) -> PluginError:
    if isinstance(error, PluginError):
        return error
    return PluginError(f"staleness policy {spec.name!r} failed: {type(error).__name__}: {error}")
