"""Version pins: one exact version generates all rows of a partition, as for an evaluation.

The pin is bound in the command making its version current, before any replica can load it or a later one. Until the
rows are generated, a replica of the partition's task fetches the pinned version first, may load no later one, and
gets rows of the partition only while it generates with it. The version is kept until the partition's next rows are
put. A partition stays pinned until it ends: the trainer keeps its last version until then (``AwaitPins``)."""

from __future__ import annotations

from dataclasses import replace

from ..errors import ConfigError, Ended
from . import commands as cmd
from .state import LedgerState
from .state.rows import NONE, Pin
from .state.sessions import Session
from .terminations import EXPIRED, Terminations


class VersionPins:
    """Binds partitions to versions, and holds replicas at them."""

    def __init__(self, state: LedgerState, terminations: Terminations) -> None:
        self._state, self._terminations, self._versions = state, terminations, state.versions
        self._pins = state.partitions.pins

    def check(self, command: cmd.AddRows) -> None:
        """Raise ConfigError for a wrong pin, Ended after the last version."""
        number, steps = self._state.partitions.number(command.partition), self._state.steps
        pin, name = self._pins.get(number), repr(command.partition)
        if command.version == NONE and pin is None:
            return
        if command.version == NONE:
            raise ConfigError(f"partition {name} is pinned to one version at a time: say version= of these rows")
        if steps.declared and steps.task.spec.takes(command.partition):
            raise ConfigError(f"rows of partition {name} are trained, and their versions follow the staleness rule")
        if self._live(number):
            raise ConfigError(f"partition {name} has rows of another version: put these once they have ended")
        if pin is not None and self._training_over and pin.version == self._versions.current:
            raise Ended(f"version {pin.version} was the last one, and its rows have ended")

    def add(self, command: cmd.AddRows) -> None:
        """Pin the partition of new rows."""
        number = self._state.partitions.number(command.partition)
        before = self._pins.get(number, Pin(NONE))
        self._pins[number] = Pin(command.version, last=max(before.version, before.last), keep=command.keep)
        self.bind(last=self._training_over)

    def await_end(self) -> cmd.Reply | None:
        """Bind all pins to the current version, the trainer's last one. None until no partition is pinned any more,
        or until the trainer must load a version after a rollback."""
        if self._versions.to_restore != NONE or not self._pins:
            return cmd.Done()
        self.bind(last=True)
        return None

    def end(self, partition: int | None) -> bool:
        """Unpin an ended partition, or all. Return True if it was the last one."""
        before = len(self._pins)
        for number in list(self._pins) if partition is None else [partition]:
            self._pins.pop(number, None)
        return before > len(self._pins) == 0

    def holds(self, name: str) -> int:
        """Return the version to load next and keep, for replicas of a task; NONE without one."""
        task = self._state.tasks.by_name.get(name)
        if task is None:
            return NONE
        held = [pin.version for number, pin in self._pins.items() if pin.version != NONE and task.left(number)]
        return min(held, default=NONE)

    def idles(self, name: str) -> bool:
        """True if a task's replicas generate only rows of pinned partitions, and now there are none."""
        task = self._state.tasks.by_name.get(name)
        if task is None or task.spec.admits or self.holds(name) != NONE:
            return False
        numbers = self._state.partitions.numbers
        return all(numbers.get(name, NONE) in self._pins for name in task.spec.partitions)

    def allows(self, session: Session, partition: int) -> bool:
        """True if a session may lease rows of a partition."""
        pin = self._pins.get(partition)
        return pin is None or session.loaded is None or session.loaded == pin.version

    def keeps(self, version: int) -> bool:
        """True if a version is kept for a partition."""
        return any(version in (pin.version, pin.keep) for pin in self._pins.values())

    def drop(self) -> None:
        """Expire rows of versions rolled back, and unfinished rows of versions without bytes."""
        versions = self._versions
        for number, pin in self._pins.items():
            if pin.version == NONE:
                continue
            if versions.lineage.rolled_back(pin.version):
                self._terminations.end_live(number, EXPIRED, f"version {pin.version} was rolled back")
            elif pin.version not in versions.kept and self._live(number, giving=True):
                self._terminations.end_live(number, EXPIRED, f"version {pin.version} can no longer be fetched")
        self._state.context.wake("pins", "swap", "version")

    def bind(self, *, last: bool = False) -> None:
        """Bind pins to the current version, if they wait for it. ``last``: True if no other one comes."""
        versions = self._versions
        if versions.newest is None:  # none, or its bytes are gone: the next one
            return
        for number, pin in self._pins.items():
            if pin.version == NONE and (last or versions.current >= pin.first):
                pin = self._pins[number] = replace(pin, version=versions.current)
                self._state.parked.wake_all()
                if pin.version == pin.last:
                    self._terminations.end_live(number, EXPIRED, f"no version after {pin.last} was published")

    def _live(self, number: int, *, giving: bool = False) -> bool:
        """True if a task has uncompleted rows of a partition; ``giving``: a task giving columns."""
        return any(task.left(number) for task in self._state.tasks if task.spec.gives or not giving)

    @property
    def _training_over(self) -> bool:
        return self._state.parked.first("pins") is not None
