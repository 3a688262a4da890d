"""The registry of homes: units open them, leave and return, and homes without a unit are given up.

A unit that dies loses nothing, because its memory outlives it. The home is *absent* until another unit opens it with
the same identity. An epoch is lost once: when its home was absent for ``home_silence_s``, when a person evicts it, or
when its contents are known to be gone. It never becomes live again; the home may begin a new epoch.

The ledger does not know the home of a block. Each loss is an effect, and the server answers it with
``Ledger.lose_homes`` before the next input.
"""

from __future__ import annotations

from ..errors import ConfigError
from ..types import events as ev
from ..types.reports import HomeStatus
from . import commands as cmd
from .state import LedgerState
from .state.homes import SERVER_HOME, Home
from .state.rows import NONE
from .state.sessions import Session


class HomeRegistry:
    """Opens and gives up homes."""

    def __init__(self, state: LedgerState) -> None:
        self._state = state

    def open(self, session: Session, command: cmd.OpenHome) -> cmd.Reply:
        """Make a session the unit of a home. Repeated by the unit as a sign of life."""
        homes = self._state.homes
        if not (command.store and command.name and command.identity):
            raise ConfigError("a home needs the name of its store, a name, and the identity of its contents")
        home = homes.find(command.store, command.name, command.identity)
        begins = home is not None and (home.identity != command.identity or home.lost != "")
        if (own := homes.of_unit(session.id)) is not None and own is not home:
            raise ConfigError(f"{session.name} is the unit of {_named(own)}; a unit serves one home")
        if home is None:
            home = Home(len(homes.by_number) + 1, command.store, command.name, command.identity, "", "", "", "")
            homes.add(home)
        elif begins:
            self._end_epoch(session, home)
        moved = home.place(command.address, command.key, command.directory, command.owner)
        repeated = home.unit == session.id and not moved
        homes.serve(home, session.id)
        if begins:
            home.begin(command.identity)
        if not repeated:
            self._publish(home, "opened", f"{session.name} at {command.address}")
        return cmd.HomeOpened(home=home.number, epoch=home.epoch)

    def evict(self, session: Session, command: cmd.EvictHome) -> cmd.Reply:
        """Give up a home at once."""
        home = self._live(command.home, command.epoch)
        because = f": {command.reason}" if command.reason else ""
        self._lose(home, f"evicted by {session.name}{because}")
        return cmd.Done()

    def _live(self, number: int, epoch: int) -> Home:
        if number == SERVER_HOME:
            raise ConfigError("home 0 is the memory of the queue server; it cannot be evicted")
        home = self._state.homes.by_number.get(number)
        if home is None:
            raise ConfigError(f"home {number} was never opened; opened are: {self._known()}")
        if not self._state.homes.is_live(number, epoch):
            state = f"lost: {home.lost}" if home.lost else "live"
            raise ConfigError(
                f"epoch {epoch} of {_named(home)} cannot be evicted: the newest epoch is {home.epoch}, which is {state}"
            )
        return home

    def listed(self) -> cmd.Reply:
        """Return all homes. May be called in any thread: an epoch is listed with its own fields or those of
        a later one, because it is written last and read first."""
        now = self._state.context.now
        return cmd.HomeList(
            homes=tuple(
                cmd.HomeInfo(
                    home=home.number, epoch=home.epoch, store=home.store, name=home.name, address=home.address, key=home.key,
                    directory=home.directory, owner=home.owner, lost=home.lost,
                    absent_s=-1.0 if home.lost or home.unit != NONE else now - home.absent_since,
                )
                for home in list(self._state.homes.by_number.values())
            )
        )  # fmt: skip

    def statuses(self) -> tuple[HomeStatus, ...]:
        """Return the state and the losses of all homes; empty if there is only home 0."""
        homes = self._state.homes.by_number.values()
        own = [HomeStatus(SERVER_HOME, 0, "server", "served")] if homes else []
        return (*own, *map(self._status, homes))

    def _status(self, home: Home) -> HomeStatus:
        unit = self._state.sessions.by_id.get(home.unit)
        absent_s = 0.0 if unit is not None or home.lost else self._state.context.now - home.absent_since
        return HomeStatus(
            home.number, home.epoch, home.name,
            state="lost" if home.lost else "served" if unit is not None else "absent",
            address=home.address if unit is not None else "", detail=home.lost or (unit.name if unit is not None else ""),
            absent_s=absent_s, rows_failed=home.rows_failed,
        )  # fmt: skip

    def session_closed(self, session: Session, reason: str) -> None:
        """Note that a session has ended. If it was a unit, its home is absent."""
        if (home := self._state.homes.of_unit(session.id)) is not None:
            self._state.homes.leave(home, self._state.context.now)
            self._publish(home, "absent", reason)

    def give_up_silent(self) -> None:
        """Give up homes that were absent for too long."""
        now = self._state.context.now
        for home in self._state.homes.deadlines.due(now):
            self._lose(home, f"silent for {now - home.absent_since:g} s")

    def _end_epoch(self, session: Session, home: Home) -> None:
        """Give up an epoch before one with other contents. Raises ConfigError if another unit serves the
        old ones: two hosts may have the same name."""
        unit = self._state.sessions.by_id.get(home.unit)
        if unit is not None and unit is not session:
            raise ConfigError(
                f"{_named(home)} has other contents, served by {unit.name} (session {unit.id}): give this home another"
                f" name; if it takes the place of the other one, end that unit, or evict home {home.number}"
            )
        if not home.lost:
            self._lose(home, "its contents are gone: it was opened with others")

    def _lose(self, home: Home, reason: str) -> None:
        self._state.context.effects.homes_lost.append(self._state.homes.lose(home, reason))

    def _known(self) -> str:
        return ", ".join(_named(home) for home in self._state.homes.by_number.values()) or "none"

    def _publish(self, home: Home, state: str, detail: str) -> None:
        self._state.context.publish(
            ev.HomeState(
                time_s=self._state.context.now, home=home.number, epoch=home.epoch, name=home.name, state=state, detail=detail
            )
        )  # fmt: skip


def _named(home: Home) -> str:
    return f"home {home.number} ({home.name})"
