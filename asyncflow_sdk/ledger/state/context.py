"""Context shared by all parts: the time, the effects of the current input, and woken places."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...errors import AsyncFlowError
from ...types import events as ev
from .. import commands as cmd
from ..commands import Ids
from .homes import HomeLoss, Replacement
from .nondeterminism import NondeterminismLog


@dataclass
class Effects:
    """Results of inputs: answers by ticket in order, events, and rows with freed memory.

    ``remade``: groups replaced by their children; place the children's blocks before the parents'
    are freed. ``homes_lost``: answer them with one ``Ledger.lose_homes`` before the next input, after
    all other effects are carried out."""

    answers: list[tuple[int, cmd.Reply | AsyncFlowError]] = field(default_factory=list)
    events: list[ev.Event] = field(default_factory=list)
    retired: list[Ids] = field(default_factory=list)
    remade: list[Replacement] = field(default_factory=list)
    homes_lost: list[HomeLoss] = field(default_factory=list)


class Context:
    """``now``: ledger seconds, never falling. A *place* names the resource that a parked request waits for ("put",
    "task train", "version"). ``all_woken``: True while every parked request is retried, even if it waits for more
    than rows. ``every_put``: True while every parked put is retried, even behind one that keeps waiting."""

    TRANSIENT = frozenset({"log"})

    def __init__(self) -> None:
        self.now = 0.0
        self.effects = Effects()
        self.log = NondeterminismLog()
        self.all_woken = False
        self.every_put = False
        self._woken: dict[str, set[int] | None] = {}  # with the sessions; None: all

    def answer(self, ticket: int, reply: cmd.Reply | AsyncFlowError) -> None:
        """Add the answer to a ticket."""
        self.effects.answers.append((ticket, reply))

    def publish(self, event: ev.Event) -> None:
        """Add an event."""
        self.effects.events.append(event)

    def wake(self, *places: str) -> None:
        """Retry the requests parked at these places."""
        self._woken.update(dict.fromkeys(places))

    def wake_session(self, place: str, session: int) -> None:
        """Retry the requests that one session has parked at a place."""
        sessions = self._woken.setdefault(place, set())
        if sessions is not None:
            sessions.add(session)

    def wake_puts(self) -> None:
        """Retry every parked put."""
        self.wake("put")
        self.every_put = True

    def next_woken(self) -> tuple[str, set[int] | None] | None:
        """Remove and return the first woken place by name, for a repeatable order, and the woken
        sessions, None for all of them. Return None if no place is woken."""
        if not self._woken:
            return None
        place = min(self._woken)
        return place, self._woken.pop(place)

    def drain(self) -> Effects:
        """Return the effects since the last call."""
        effects, self.effects = self.effects, Effects()
        return effects
