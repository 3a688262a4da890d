"""The kit for authors of policies: the SDK's own pass it, and it finds each thing that is wrong with others."""

from __future__ import annotations

import itertools

import pytest

from asyncflow_sdk.interfaces import StalenessPolicy, StepWindow
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.testing import check_staleness_policy

pytestmark = pytest.mark.fast

Wait, Drop, Count = (registry().get("staleness", name).load() for name in ("wait", "drop", "count"))


@pytest.mark.parametrize("policy", [Wait, Drop, Count])
def test_the_sdks_own_policies_pass(policy: type[StalenessPolicy]) -> None:
    check_staleness_policy(policy)


class Unsaid(Drop):
    promise = ""


class Moody(Drop):
    turns = itertools.count()

    def select(self, window: StepWindow, deadline: int | None) -> int:
        return window.free - next(self.turns) % 2


class Words(Drop):
    def admit(self, window: StepWindow, deadline: int) -> int:
        return "some"  # type: ignore[return-value]


class Stingy(Drop):
    def admit(self, window: StepWindow, deadline: int) -> int:
        return super().admit(window, deadline) - window.batch_rows


class Stubborn(Wait):
    def select(self, window: StepWindow, deadline: int | None) -> int:
        return 0


class Forgetful(Drop):
    def evict(self, window: StepWindow) -> tuple[int, ...]:
        return ()


class Hoarding(Drop):
    """Trains only while a whole further step is under way, and does not say that this needs room."""

    def select(self, window: StepWindow, deadline: int | None) -> int:
        return window.free if window.total > window.batch_rows or not window.max_staleness else 0


class Tiny(Drop):
    def least_rows(self, batch_rows: int, max_staleness: int) -> int:
        return 1


@pytest.mark.parametrize(
    ("policy", "finding"),
    [
        (Unsaid, "promise says"),
        (Moody, "not the same each time"),
        (Words, "no whole numbers"),
        (Stingy, "nothing can go on"),
        (Stubborn, "nothing can go on"),
        (Forgetful, "too late for any step and not evicted"),
        (Hoarding, "nothing can go on: .*capacity_rows="),
        (Tiny, "a step alone has"),
        (object, "is no asyncflow_sdk.interfaces.StalenessPolicy"),
    ],
)
def test_it_finds_what_is_wrong(policy: type[StalenessPolicy], finding: str) -> None:
    with pytest.raises(AssertionError, match=finding):
        check_staleness_policy(policy)
