"""Homes: places of payload blocks. Home 0 is the server's own memory; a storage unit serves each other one."""

from __future__ import annotations

from dataclasses import dataclass

from ...types.defaults import HOME_SILENCE_S
from .context import HomeLoss
from .rows import NONE, QueueLimits
from .sessions import Timers

SERVER_HOME = 0
"""The number of the server's own memory. Its only epoch is 0, and it is never lost."""


@dataclass
class Home:
    """A home served by a unit. ``identity``: of the contents of this epoch. ``unit``: its session; NONE while it is
    absent, since ``absent_since``, or lost. ``lost``: why this epoch is lost; "" if it is not. ``expires``: when an
    absent home is given up, ledger seconds. ``rows_failed``: in all lost epochs."""

    number: int
    store: str
    name: str
    identity: str
    address: str
    key: str
    directory: str
    owner: str
    epoch: int = 1
    unit: int = NONE
    absent_since: float = 0.0
    expires: float = 0.0
    lost: str = ""
    rows_failed: int = 0

    def place(self, address: str, key: str, directory: str, owner: str) -> bool:
        """Note its place. True for a new one."""
        before = self.address, self.key, self.directory, self.owner
        self.address, self.key, self.directory, self.owner = address, key, directory, owner
        return before != (address, key, directory, owner)

    def begin(self, identity: str) -> None:
        """Begin an epoch."""
        self.identity, self.lost = identity, ""
        self.epoch += 1  # last: see ``HomeRegistry.listed``

    def serve(self, unit: int) -> None:
        """Have a unit."""
        self.unit = unit

    def leave(self, now: float, silence_s: float) -> None:
        """Have no unit since ``now``."""
        self.unit, self.absent_since, self.expires = NONE, now, now + silence_s

    def lose(self, reason: str) -> None:
        """End the epoch."""
        self.unit, self.lost = NONE, reason

    def count_lost(self, failed: int) -> None:
        """Add rows that failed with it."""
        self.rows_failed += failed


class Homes:
    """``by_number``: all homes ever opened. ``absent``: homes that wait for their unit, by number."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self.by_number: dict[int, Home] = {}
        self.absent: dict[int, Home] = {}
        self.deadlines = Timers(self.absent)

    def __getitem__(self, number: int) -> Home:
        return self.by_number[number]

    def is_live(self, number: int, epoch: int) -> bool:
        """True if blocks may be in this epoch of a home: it was opened and is not lost."""
        if number == SERVER_HOME:
            return epoch == 0
        home = self.by_number.get(number)
        return home is not None and epoch == home.epoch and not home.lost

    def find(self, store: str, name: str, identity: str) -> Home | None:
        """Return the home with these contents or, if it is lost or unknown, the one with this name."""
        mine = [home for home in self.by_number.values() if home.store == store]
        same = (home for home in mine if home.identity == identity and not home.lost)
        return next(same, next((home for home in mine if home.name == name), None))

    def of_unit(self, session: int) -> Home | None:
        """Return the home served by a session."""
        return next((home for home in self.by_number.values() if home.unit == session), None)

    def add(self, home: Home) -> None:
        """Add a home."""
        self.by_number[home.number] = home

    @property
    def expected(self) -> bool:
        """True if there are homes, or may be some: the limit of their silence is set."""
        return bool(self.by_number) or self._limits.home_silence_s is not None

    @property
    def _silence_s(self) -> float:
        set_s = self._limits.home_silence_s
        return HOME_SILENCE_S if set_s is None else set_s

    def leave(self, home: Home, now: float) -> None:
        """Note that the unit of a home is gone."""
        home.leave(now, self._silence_s)
        self.absent[home.number] = home
        self.deadlines.add(home.number)

    def serve(self, home: Home, unit: int) -> None:
        """Note the unit of a home."""
        self.absent.pop(home.number, None)
        home.serve(unit)

    def lose(self, home: Home, reason: str) -> HomeLoss:
        """Give up the epoch of a home."""
        self.absent.pop(home.number, None)
        home.lose(reason)
        return HomeLoss(home.number, home.epoch, home.name, reason)

    def set_silence(self) -> None:
        """Apply the limit of silence to absent homes."""
        for number, home in self.absent.items():
            home.leave(home.absent_since, self._silence_s)
            self.deadlines.add(number)
