"""What a naive ledger says of ranks that wait for each other."""

from __future__ import annotations

from typing import Any

from naive_leases import PARKED
from naive_rows import Parked
from naive_training import NaiveTraining

from asyncflow_sdk.errors import LeaseLost, SchemaError
from asyncflow_sdk.ledger import commands as cmd


class NaiveMeetings(NaiveTraining):
    def __init__(self) -> None:
        super().__init__()
        self.owed: dict[int, Any] = {}  # ticket → the answer that follows from another rank's request

    def _meet(self, session: int, c: cmd.Meet, outcome: Any) -> None:
        if self._is_error(outcome, [] if 0 <= c.rank < c.world_size else [SchemaError]):
            return
        own = next((p for p in self.parked if p.command is c), None)
        if own is not None and own.ticket in self.owed:
            assert type(outcome) is type(self.owed[own.ticket]), outcome
            assert isinstance(outcome, LeaseLost) or outcome == self.owed[own.ticket]
            del self.owed[own.ticket]
            return
        mine = [p for p in self._met_by(c) if p.command.rank == c.rank and p is not own]
        if self._is_error(outcome, [LeaseLost] if any(p.session > session for p in mine) else []):
            return
        here = {
            p.command.rank: p
            for p in self._met_by(c)
            if (p.command.what, p.command.world_size) == (c.what, c.world_size)
        }
        words = {rank: p.command.word for rank, p in here.items()} | {c.rank: c.word}
        if set(words) != set(range(c.world_size)):
            self._is(outcome, PARKED)
            return
        self._is(outcome, cmd.Met(words=tuple(words[rank] for rank in range(c.world_size))))
        self.owed |= {p.ticket: outcome for rank, p in here.items() if rank != c.rank}
        self._succeed(session, c)

    def take_over(self, session: int, command: Any) -> None:
        super().take_over(session, command)
        if isinstance(command, cmd.Meet):
            self._succeed(session, command)

    def _succeed(self, session: int, c: cmd.Meet) -> None:
        """Who waits under a rank and joined earlier than who comes now is told."""
        mine = [p for p in self._met_by(c) if p.command.rank == c.rank and p.session < session]
        self.owed |= {p.ticket: LeaseLost("it is another process now") for p in mine}

    def _met_by(self, c: cmd.Meet) -> list[Parked]:
        return [p for p in self.parked if isinstance(p.command, cmd.Meet) and p.command.team == c.team]
