"""Check of staleness policies.

def test_my_policy():
    check_staleness_policy(lambda: Patient(share=0.25))
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ...interfaces import StalenessPolicy
from ...ledger import Window
from .check import checks
from .lab import PlainLab

STEPS, RUNS = 12, 100
PATIENCE = 400  # events without a step, in each of which something moved


def check_staleness_policy(factory: Callable[[], StalenessPolicy]) -> None:
    """Raise AssertionError with the fault and the state behind it.

    Answers are integers, equal from one object twice and from two; ``promise`` is text and ``bounded`` a bool. Runs
    under random schedules finish all their steps, in queues of ``least_rows``, with lagging replicas, filtered groups
    and heavy-tailed lengths. With ``bounded``, ``evict`` names all rows too old for any later step.
    """
    policy = factory()
    assert isinstance(policy, StalenessPolicy), f"{policy!r} is no asyncflow_sdk.interfaces.StalenessPolicy"
    assert isinstance(policy.promise, str) and policy.promise, (
        "promise says in a line what holds of every trained token"
    )
    assert isinstance(policy.bounded, bool), f"bounded must be a bool, not {policy.bounded!r}"
    for number in range(RUNS):
        draw = random.Random(number)
        size, max_staleness = draw.choice([1, 2, 4]), draw.choice([0, 1, 2, 4])
        batch = size * draw.randint(1, 4)
        least = policy.least_rows(batch, max_staleness)
        assert least >= batch, f"least_rows({batch}, {max_staleness}) gave {least}: a step alone has {batch}"
        capacity = least if number % 2 else max(least, (max_staleness + 3) * batch)
        _SimulatedRun(factory, draw, Window(batch, max_staleness), size, capacity).play()


@dataclass
class _SimulatedGroup:
    deadline: int
    done_at: float


@dataclass
class _SimulatedRun:
    """A run of ``STEPS`` steps, by the rules of the ledger."""

    factory: Callable[[], StalenessPolicy]
    draw: random.Random
    window: Window
    size: int
    capacity: int
    current: int = 0
    now: float = 0.0
    closed: int = 0  # full steps that are not trained
    running: list[_SimulatedGroup] = field(default_factory=list)
    ready: list[_SimulatedGroup] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy, self.twin = self.factory(), self.factory()
        self.loaded = [0] * self.draw.randint(1, 4)

    def play(self) -> None:
        """Run all steps. Raises AssertionError if the run stalls."""
        waited = 0
        while self.window.step < STEPS:
            before, moved = self.window.step, self.admit()
            if self.running and (not moved or self.draw.random() < 0.7):
                self.finish()
                moved = True
            if self.closed and (not moved or self.draw.random() < 0.5):
                self.closed, self.current, moved = self.closed - 1, self.current + 1, True
            assert moved, f"nothing can go on: {self}"
            waited = 0 if self.window.step > before else waited + 1
            assert waited < PATIENCE, f"no step has closed for a long time: {self}"

    def __str__(self) -> str:
        return (
            f"{self.window.filling(self.current)}, {len(self.running)} groups of {self.size} being generated,"
            f" {len(self.ready)} ready with deadlines {sorted(group.deadline for group in self.ready)}, replicas with"
            f" versions {self.loaded}, capacity_rows={self.capacity}"
        )

    def asked(self, name: str, *arguments: int | None) -> list[int]:
        """Call a method of the policy twice and of its twin once; return the common answer."""
        filling = self.window.filling(self.current)
        said = []
        for policy in (self.policy, self.policy, self.twin):
            answer = getattr(policy, name)(filling, *arguments)
            try:
                said.append([operator.index(one) for one in (answer if name == "evict" else [answer])])
            except TypeError:
                raise AssertionError(f"{name}{(filling, *arguments)} gave {answer!r}, no whole numbers") from None
        assert said[0] == said[1] == said[2], f"{name}{(filling, *arguments)} gave {said}: not the same each time"
        return said[0]

    def admit(self) -> bool:
        """Start the groups permitted to replicas; a blocked replica loads the newest version. True if one started."""
        began = False
        for replica, version in enumerate(self.loaded):
            room = self.room(version)
            if not room and version < self.current and (self.room(self.current) or self.draw.random() < 0.3):
                self.loaded[replica] = self.current
                room = self.room(self.current)
            if room:
                deadline = self.loaded[replica] + self.window.max_staleness
                self.window.admit(self.size, deadline)
                self.running.append(_SimulatedGroup(deadline, self.now + min(self.draw.paretovariate(1.1), 200.0)))
                began = True
        return began

    def room(self, version: int) -> bool:
        """True if a group of this version may start."""
        deadline = version + self.window.max_staleness
        there = self.window.batch_rows - self.window.free + self.closed * self.window.batch_rows
        if there + self.window.under_way + self.size > self.capacity:
            return False
        if self.policy.bounded and deadline < self.window.step:
            return False
        return self.asked("admit", deadline)[0] >= self.size

    def finish(self) -> None:
        """Complete or filter the next group, then select groups for the step."""
        group = min(self.running, key=lambda each: each.done_at)
        self.running.remove(group)
        self.now = group.done_at
        if self.draw.random() < 0.1:
            self.window.withdraw(self.size, group.deadline)
        else:
            self.ready.append(group)
        while self.select_one():
            pass

    def select_one(self) -> bool:
        """Select the first group the policy permits. True if there is one."""
        for group in sorted(self.ready, key=lambda each: each.deadline):
            late = group.deadline < self.window.step
            if (self.policy.bounded and late) or min(
                self.window.free, *self.asked("select", group.deadline)
            ) < self.size:
                continue
            self.ready.remove(group)
            self.window.select(self.size, group.deadline)
            if not self.window.free:
                self.window.close()
                self.closed += 1
                self.evict(self.asked("evict"))
            return True
        return False

    def evict(self, deadlines: Iterable[int]) -> None:
        """Remove the groups of these deadlines."""
        gone = set(deadlines)
        for groups in (self.running, self.ready):
            for group in [group for group in groups if group.deadline in gone]:
                groups.remove(group)
                self.window.withdraw(self.size, group.deadline)
        late = self.window.load(self.window.step - 1)
        assert not late or not self.policy.bounded, f"{late} rows are too late for any step and not evicted: {self}"


def schedules(lab: PlainLab) -> None:
    """Random schedules finish all their steps, in queues of least_rows, and rows too late for any
    step are evicted."""
    check_staleness_policy(lab.made)


CHECKS = checks("staleness", {
    schedules: ("basic", (), "the run stands still for ever, or trains tokens older than was promised",
        "admit(), select() and evict(): functions of the filling alone; in each state one of them must permit "
        "progress"),
})  # fmt: skip
