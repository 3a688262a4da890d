"""Meeting: the ranks of a trainer wait for each other where a step, a checkpoint or a resume must be one for all of them.

A rank's request waits until the others have come to the same point; then all are answered, each with the words of all. There
is no state but the requests that wait, so a rank that dies has not come.
"""

from __future__ import annotations

from ..errors import LeaseLost, SchemaError
from . import commands as cmd
from .records import Session, Waiter
from .resuming import Resuming


def meeting_place(team: str) -> str:
    """Where ranks of a team wait for each other."""
    return f"meet {team}"


class Meeting(Resuming):
    """Lets ranks meet."""

    def _meet(self, session: Session, command: cmd.Meet) -> cmd.Reply | None:
        rank, size = command.rank, command.world_size
        who = f"rank {rank} of {size} of team {command.team!r}"
        if not 0 <= rank < size:
            raise SchemaError(f"{who}: ranks are 0 to world_size - 1")
        there: dict[int, Waiter] = {}
        for waiter in self.waiters.get(meeting_place(command.team), {}).values():
            if waiter.command.rank != rank:
                if (waiter.command.what, waiter.command.world_size) == (command.what, size):
                    there[waiter.command.rank] = waiter
            elif waiter.session > session.id:
                raise LeaseLost(f"{who} is {self._name(waiter.session)} now, which joined later than {session.name}")
        if len(there) + 1 < size:
            return None
        words = {each: waiter.command.word for each, waiter in there.items()} | {rank: command.word}
        met = cmd.Met(words=tuple(words[each] for each in range(size)))
        for waiter in there.values():
            self._unpark(waiter)
            self._answer(waiter.ticket, met)
        self._take_place(session, command)
        return met

    def _park(self, waiter: Waiter) -> None:
        super()._park(waiter)
        if isinstance(waiter.command, cmd.Meet):
            self._take_place(self.sessions[waiter.session], waiter.command)

    def _take_place(self, session: Session, command: cmd.Meet) -> None:
        """Earlier processes in a rank's name wait for nothing any more."""
        for waiter in list(self.waiters.get(meeting_place(command.team), {}).values()):
            if waiter.command.rank == command.rank and waiter.session < session.id:
                self._unpark(waiter)
                who = f"rank {command.rank} of {command.world_size} of team {command.team!r}"
                self._answer(waiter.ticket, LeaseLost(f"{who} is {session.name} now"))
