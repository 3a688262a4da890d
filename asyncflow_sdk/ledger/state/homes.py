"""Homes of payload: units open them, leave and return, and homes without a unit are given up.

Home 0 is the server's own memory. A storage unit serves each other one. A unit that dies loses nothing, because its
memory outlives it: the home is *absent* until another unit opens it. An epoch is lost once: when its home was absent
for ``home_silence_s``, when a person evicts it, or when its contents are known to be gone. The ledger does not know
the home of a block: each loss is an effect, answered by ``Ledger.lose_homes`` before the next input."""

from __future__ import annotations

from typing import Any

import msgspec

from ...errors import ConfigError
from ...interfaces.store import HomeOffer
from ...types import events as ev
from ...types.defaults import HOME_SILENCE_S
from ...types.reports import HomeStatus
from .. import commands as cmd
from .context import Context, HomeLoss
from .rows import NONE, QueueLimits
from .sessions import Session, Sessions, Timers

SERVER_HOME = 0
"""The number of the server's own memory. Its only epoch is 0, and it is never lost."""


class Homes:
    """``by_number``: all homes ever opened. ``absent``: homes that wait for their unit, by number."""

    def __init__(self, context: Context, limits: QueueLimits, sessions: Sessions) -> None:
        self._context, self._limits, self._sessions = context, limits, sessions
        self.by_number: dict[int, cmd.HomeInfo] = {}
        self.absent: dict[int, cmd.HomeInfo] = {}
        self.deadlines = Timers(self.absent)

    def is_live(self, number: int, epoch: int) -> bool:
        """True if blocks may be in this epoch of a home: it was opened and is not lost."""
        if number == SERVER_HOME:
            return epoch == 0
        home = self.by_number.get(number)
        return home is not None and epoch == home.epoch and not home.lost

    @property
    def expected(self) -> bool:
        """True if there are homes, or may be some: the limit of their silence is set."""
        return bool(self.by_number) or self._limits.home_silence_s is not None

    def open(self, session: Session, command: cmd.OpenHome) -> cmd.Reply:
        """Make a session the unit of a home. Repeated by the unit as a sign of life."""
        offer = command.offer
        if not (offer.store and offer.name and offer.identity):
            raise ConfigError("a home needs the name of its store, a name, and the identity of its contents")
        home = self._find(offer)
        if (own := self._of_unit(session.id)) is not None and own is not home:
            raise ConfigError(f"{session.name} is the unit of {_named(own)}; a unit serves one home")
        if home is None:
            opened = cmd.HomeInfo(number=len(self.by_number) + 1, epoch=1, offer=offer)
        elif home.offer.identity == offer.identity and not home.lost:
            opened = home
        else:
            self._end_epoch(session, home)
            opened = msgspec.structs.replace(home, epoch=home.epoch + 1, lost="")
        offer = msgspec.structs.replace(offer, name=opened.offer.name)
        opened = self._set(opened, unit=session.id, offer=offer)
        if opened != home:
            self._publish(opened, "opened", f"{session.name} at {offer.address}")
        return cmd.HomeOpened(home=opened.number, epoch=opened.epoch)

    def evict(self, session: Session, command: cmd.EvictHome) -> cmd.Reply:
        """Give up a home at once."""
        number, epoch = command.home, command.epoch
        if number == SERVER_HOME:
            raise ConfigError("home 0 is the memory of the queue server; it cannot be evicted")
        home = self.by_number.get(number)
        if home is None:
            known = ", ".join(map(_named, self.by_number.values())) or "none"
            raise ConfigError(f"home {number} was never opened; opened are: {known}")
        if not self.is_live(number, epoch):
            newest = f"the newest epoch is {home.epoch}, which is {f'lost: {home.lost}' if home.lost else 'live'}"
            raise ConfigError(f"epoch {epoch} of {_named(home)} cannot be evicted: {newest}")
        self._lose(home, f"evicted by {session.name}{f': {command.reason}' if command.reason else ''}")
        return cmd.Done()

    def listed(self) -> cmd.HomeList:
        """Return all homes, without their identities: whoever knows one may open the home. Thread-safe."""
        replace = msgspec.structs.replace
        homes = [replace(home, offer=replace(home.offer, identity="")) for home in list(self.by_number.values())]
        return cmd.HomeList(homes=tuple(homes))

    def statuses(self) -> tuple[HomeStatus, ...]:
        """Return the state and the losses of all homes; empty if there is only home 0."""
        homes = self.by_number.values()
        own = [HomeStatus(SERVER_HOME, 0, "server", "served")] if homes else []
        return (*own, *map(self._status, homes))

    def session_closed(self, session: Session, reason: str) -> None:
        """Note the end of a session. If it was a unit, its home is absent."""
        if (home := self._of_unit(session.id)) is not None:
            now = self._context.now
            self._set(home, unit=NONE, absent_since=now, expires=now + self._silence_s)
            self._publish(home, "absent", reason)

    def give_up_silent(self) -> None:
        """Give up homes absent for too long."""
        now = self._context.now
        for home in self.deadlines.due(now):
            self._lose(home, f"silent for {now - home.absent_since:g} s")

    def set_silence(self) -> None:
        """Apply the limit of silence to absent homes."""
        for home in list(self.absent.values()):
            self._set(home, expires=home.absent_since + self._silence_s)

    def count_lost(self, number: int, failed: int) -> None:
        """Add rows failed with a home."""
        home = self.by_number[number]
        self._set(home, rows_failed=home.rows_failed + failed)

    @property
    def _silence_s(self) -> float:
        set_s = self._limits.home_silence_s
        return HOME_SILENCE_S if set_s is None else set_s

    def _find(self, offer: HomeOffer) -> cmd.HomeInfo | None:
        """Return the home with these contents or, if it is lost or unknown, the one with this name."""
        mine = [home for home in self.by_number.values() if home.offer.store == offer.store]
        same = (home for home in mine if home.offer.identity == offer.identity and not home.lost)
        return next(same, next((home for home in mine if home.offer.name == offer.name), None))

    def _of_unit(self, session: int) -> cmd.HomeInfo | None:
        return next((home for home in self.by_number.values() if home.unit == session), None)

    def _set(self, home: cmd.HomeInfo, **changes: Any) -> cmd.HomeInfo:
        """Set fields of a home, as one: other threads read the homes."""
        home = self.by_number[home.number] = msgspec.structs.replace(home, **changes)
        self.absent.pop(home.number, None)
        if home.unit == NONE and not home.lost:
            self.absent[home.number] = home
            self.deadlines.add(home.number)
        return home

    def _end_epoch(self, session: Session, home: cmd.HomeInfo) -> None:
        """Give up an epoch before one with other contents. Raises ConfigError if another unit serves the old ones."""
        unit = self._sessions.by_id.get(home.unit)
        if unit is not None and unit is not session:
            text = f"{_named(home)} has other contents, served by {unit.name} (session {unit.id}): rename this one"
            raise ConfigError(f"{text}; if it replaces that one, end its unit or evict home {home.number}")
        if not home.lost:
            self._lose(home, "its contents are gone: it was opened with others")

    def _lose(self, home: cmd.HomeInfo, reason: str) -> None:
        self._set(home, unit=NONE, lost=reason)
        self._context.effects.homes_lost.append(HomeLoss(home.number, home.epoch, home.offer.name, reason))

    def _status(self, home: cmd.HomeInfo) -> HomeStatus:
        unit = self._sessions.by_id.get(home.unit)
        served = ("served", home.offer.address, unit.name) if unit is not None else ("absent", "", "")
        state, address, detail = ("lost", "", home.lost) if home.lost else served
        away_s = self._context.now - home.absent_since if state == "absent" else 0.0
        return HomeStatus(home.number, home.epoch, home.offer.name, state, address, detail, away_s, home.rows_failed)

    def _publish(self, home: cmd.HomeInfo, state: str, detail: str) -> None:
        now, name = self._context.now, home.offer.name
        event = ev.HomeState(time_s=now, home=home.number, epoch=home.epoch, name=name, state=state, detail=detail)
        self._context.publish(event)


def _named(home: cmd.HomeInfo) -> str:
    return f"home {home.number} ({home.offer.name})"
