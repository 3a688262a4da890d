"""Context shared by all parts: the time, the effects of the current input, and woken places."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from ...errors import AsyncFlowError, error_from_name
from ...types import events as ev
from ...types.blocks import Block
from .. import commands as cmd
from ..commands import Ids


class HomeLoss(NamedTuple):
    """A lost epoch of a home. ``reason``: for people."""

    home: int
    epoch: int
    name: str
    reason: str


class LostColumns(NamedTuple):
    """Columns of rows, with their only copy in lost memory."""

    ids: Ids
    columns: tuple[str, ...]


class Placed(msgspec.Struct, frozen=True):
    """Rows with new columns: ids[i] has entry entries[i] of a command's block."""

    ids: Ids
    block: Block
    entries: Ids


class Trained(msgspec.Struct, frozen=True):
    """Rows of an acknowledged step: their groups, and the version current when each was completed."""

    step: int
    ids: Ids
    groups: Ids
    completed_at: Ids


@dataclass
class Effects:
    """Results of inputs: answers by ticket in order, events, and rows with freed memory.

    ``over``: requests no longer waiting, by ticket; one without an answer was dropped. A block not ``placed`` by the
    end of its request is free again. ``homes_lost``: answer them with one ``Ledger.lose_homes`` before the next
    input, after all other effects are carried out."""

    answers: list[tuple[int, cmd.Reply | AsyncFlowError]] = field(default_factory=list)
    events: list[ev.Event] = field(default_factory=list)
    retired: list[Ids] = field(default_factory=list)
    homes_lost: list[HomeLoss] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    trained: list[Trained] = field(default_factory=list)
    over: dict[int, Any] = field(default_factory=dict)


class NondeterminismLog:
    """Results of user code and of the file system, recorded with each input. A replay returns them and calls nothing:
    all other decisions of a ledger follow from its inputs and times. Owned by the ledger's thread."""

    def __init__(self) -> None:
        self.active = False
        """True if results are recorded or replayed. Otherwise a caller need not compute them."""
        self._keep = False
        self._results: list[bytes] = []
        self._replay: deque[bytes] | None = None

    def record(self, produce: Callable[[], bytes]) -> bytes:
        """Call ``produce`` and record its result, but no error; or return the recorded one."""
        if self._replay is not None:
            return self._replay.popleft()
        result = produce()
        if self._keep:
            self._results.append(result)
        return result

    def record_or_raise(self, produce: Callable[[], bytes]) -> bytes:
        """Like ``record``, but an AsyncFlowError is recorded too, and raised again in a replay."""

        def attempt() -> bytes:
            try:
                return b"+" + produce()
            except AsyncFlowError as error:
                return b"-" + msgspec.msgpack.encode((type(error).__name__, str(error)))

        result = self.record(attempt)
        if result[:1] == b"-":
            raise error_from_name(*msgspec.msgpack.decode(result[1:], type=tuple[str, str]))
        return result[1:]

    def begin(self) -> None:
        """Keep results for ``take`` from now on."""
        self._keep = self.active = True

    def take(self) -> tuple[bytes, ...]:
        """Return the results recorded since the last call."""
        results, self._results = tuple(self._results), []
        return results

    def replay(self, results: tuple[bytes, ...] | None) -> bool:
        """Return these results from now on; None ends the replay. True if all before were used."""
        used = not self._replay
        self._replay = None if results is None else deque(results)
        self.active = self._keep or results is not None
        return used


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

    def begin(self, now: float) -> None:
        """Begin an input."""
        self.now = now

    def publish(self, *events: ev.Event) -> None:
        """Add events."""
        self.effects.events.extend(events)

    def wake(self, *places: str) -> None:
        """Retry the requests parked at these places."""
        self._woken.update(dict.fromkeys(places))

    def wake_all(self, places: Iterable[str]) -> None:
        """Retry the requests parked at these places, even if they wait for more than rows."""
        self.wake(*places)
        self.all_woken = True

    def wake_session(self, place: str, session: int) -> None:
        """Retry the requests of one session at a place."""
        sessions = self._woken.setdefault(place, set())
        if sessions is not None:
            sessions.add(session)

    def wake_puts(self) -> None:
        """Retry every parked put."""
        self.wake("put")
        self.every_put = True

    def next_woken(self) -> tuple[str, set[int] | None] | None:
        """Remove and return the first woken place by name, for a repeatable order, with its sessions (None: all)."""
        if self._woken:
            place = min(self._woken)
            return place, self._woken.pop(place)
        self.all_woken = self.every_put = False
        return None

    def drain(self) -> Effects:
        """Return the effects since the last call."""
        effects, self.effects = self.effects, Effects()
        return effects
