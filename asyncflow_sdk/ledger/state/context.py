"""Shared by all parts of a ledger: the time, the effects of the current command, and the requests to try again."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...errors import AsyncFlowError
from ...types import events as ev
from .. import commands as cmd
from ..commands import Ids
from .nondeterminism import NondeterminismLog


@dataclass
class Effects:
    """Results of the commands since the last ``drain``: answers by ticket in order, events, and rows whose memory is free."""

    answers: list[tuple[int, cmd.Reply | AsyncFlowError]] = field(default_factory=list)
    events: list[ev.Event] = field(default_factory=list)
    retired: list[Ids] = field(default_factory=list)


class Context:
    """``now``: ledger seconds, never falling. A *place* names what a parked request waits for ("put", "task train", "version")."""

    TRANSIENT = frozenset({"log"})

    def __init__(self) -> None:
        self.now = 0.0
        self.effects = Effects()
        self.log = NondeterminismLog()
        self.all_woken = False
        """True while every parked request is tried again, also one that waits for more than rows."""
        self.every_put = False
        """True while every parked put is tried again, also one behind a put that goes on waiting."""
        self._woken: set[str] = set()

    def answer(self, ticket: int, reply: cmd.Reply | AsyncFlowError) -> None:
        self.effects.answers.append((ticket, reply))

    def publish(self, event: ev.Event) -> None:
        self.effects.events.append(event)

    def wake(self, *places: str) -> None:
        """Try the requests parked at these places again."""
        self._woken.update(places)

    def wake_puts(self) -> None:
        """Try every parked put again."""
        self._woken.add("put")
        self.every_put = True

    def next_woken(self) -> str | None:
        """Remove and return the first woken place in alphabetical order, which a replay repeats; None if there is none."""
        if not self._woken:
            return None
        place = min(self._woken)
        self._woken.remove(place)
        return place

    def drain(self) -> Effects:
        """Return the effects since the last call."""
        effects, self.effects = self.effects, Effects()
        return effects
