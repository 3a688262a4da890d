"""RoundServer: the publishing end of the transport ``dist``, in a thread of its own, so that
training never waits for it.

Receivers of one version are served together: those that request it during a round, and those that
request it within ``gather_s`` of each other, since all learn of a version at about the same time.
If a member dies or stops, its round ends for all members with an error that names it; they request
the version again, and the next round is without it. A round ends when the deadlines of all its
members have passed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asyncflow_sdk.errors import AsyncFlowError, DeadlineExceeded, ProtocolError, ServerLost, WireError
from asyncflow_sdk.interfaces.weights import Bytes
from asyncflow_sdk.types import Manifest
from asyncflow_sdk.weights.transports import Service

from .dist_group import BroadcastGroup, flat
from .dist_messages import (
    CLOSING,
    GO_ON,
    UNWANTED,
    EndRound,
    GetKeys,
    JoinRound,
    LeaveRound,
    PutKey,
    RoundStart,
    asked,
    bucket_batches,
    encode,
)
from .dist_store import KeyValueStore

REMEMBERED = 8
"""Rounds whose end is told to members that were away."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Joined:
    peer: str
    ticket: int
    join: JoinRound
    since: float

    @property
    def until(self) -> float:
        """Its deadline."""
        return self.since + self.join.wait_s


@dataclass
class _Round:
    """``members``: names by peer. ``asks``: their request numbers. ``until``: the last of their
    deadlines. ``told``: their reports at the end. ``parked``: tickets of members that wait for the
    verdict."""

    number: int
    version: int
    members: dict[str, str]
    asks: dict[str, int]
    until: float
    told: dict[str, str] = field(default_factory=dict)
    parked: dict[str, int] = field(default_factory=dict)
    unwanted: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)

    @property
    def silent(self) -> list[str]:
        return [peer for peer in self.members if peer not in self.told and peer not in self.dead]

    def blame(self, own: str) -> str:
        """Return the fault of the round; "" if none. ``own``: the error seen by the publisher.
        Silent members are the cause of the errors of others."""
        if self.dead:
            return f"{_names(self.members[p] for p in self.dead)} died or left"
        if self.silent:
            return f"{_names(self.members[p] for p in self.silent)} stopped answering"
        seen = [f"{self.members[peer]} saw: {error}" for peer, error in self.told.items() if error]
        return "; ".join(seen[:3]) or (f"the publisher saw: {own}" if own else "")


class RoundServer:
    """A handler of ``Service``. ``manifest``, ``chunks``: return manifest and bytes of a version;
    both raise VersionGone."""

    service: Service

    def __init__(
        self, name: str, address: str, backend: str, manifest: Callable[[int], Manifest],
        chunks: Callable[[int], list[Bytes]], *, stall_s: float, gather_s: float,
    ) -> None:  # fmt: skip
        self._name, self._address, self._backend = name, address, backend
        self._manifest, self._chunks = manifest, chunks
        self._stall_s, self._gather_s = stall_s, gather_s
        self._changed = threading.Condition()
        self._asking: dict[str, _Joined] = {}
        self._expected: dict[str, int] = {}  # receivers likely to ask for what others do → the version they had last
        self._left: dict[str, int] = {}
        self._round: _Round | None = None
        self._ended: dict[int, str] = {}
        self._group: BroadcastGroup | None = None
        self._group_of: tuple[str, ...] = ()
        self._groups = self._rounds = 0
        self._newest = -1
        self._board = KeyValueStore()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="weights dist rounds", daemon=True)

    def start(self, service: Service) -> None:
        self.service = service
        self._thread.start()

    def close(self) -> None:
        """End the running round at its next batch. Waits for it, but not longer than a member may
        stall it."""
        with self._changed:
            self._closed = True
            self._board.fail(self._closing(0))
            for asking in self._asking.values():
                self.service.fail(asking.ticket, ServerLost(self._closing(asking.join.version)))
            self._asking.clear()
            self._changed.notify_all()
        self._thread.join(3 * self._stall_s)

    # ---- called by the service, in its thread

    def request(self, peer: str, ticket: int, body: bytes) -> None:
        said = asked.decode(body)
        if isinstance(said, PutKey):
            self._board_of(said.group, peer).put(said.key, said.value)
            self.service.answer(ticket, b"")
        elif isinstance(said, GetKeys):
            board = self._board_of(said.group, peer)
            board.look(
                said.keys,
                lambda values: (
                    self.service.answer(ticket, encode(values))
                    if values is not None
                    else self.service.fail(ticket, WireError(board.failed))
                ),
            )
        else:
            with self._changed:
                if isinstance(said, JoinRound):
                    self._join(peer, ticket, said)
                elif isinstance(said, LeaveRound):
                    self._leave(peer, ticket, said)
                else:
                    self._over(peer, ticket, said)
                self._changed.notify_all()

    def gone(self, peer: str) -> None:
        with self._changed:
            self._asking.pop(peer, None)
            self._left.pop(peer, None)
            self._expected.pop(peer, None)
            if self._round is not None and peer in self._round.members and peer not in self._round.told:
                self._round.dead.add(peer)
                self._board.fail(f"{self._round.members[peer]} died or left")
            self._changed.notify_all()

    def _join(self, peer: str, ticket: int, join: JoinRound) -> None:
        if self._closed:
            raise ServerLost(self._closing(join.version))
        if join.ask <= self._left.get(peer, 0):
            raise WireError(f"version {join.version}: interrupted")
        if self._manifest(join.version).root != join.root:
            raise ProtocolError(f"version {join.version}: {join.name} has another manifest of it than its publisher")
        if not join.wait_s >= 0:
            raise ProtocolError(f"version {join.version}: {join.name} waits {join.wait_s} s for it")
        self._asking[peer] = _Joined(peer, ticket, join, time.monotonic())
        self._expected.setdefault(peer, -1)

    def _leave(self, peer: str, ticket: int, leave: LeaveRound) -> None:
        self._left[peer] = max(leave.ask, self._left.get(peer, 0))
        asking = self._asking.get(peer)
        if asking is not None and asking.join.ask <= leave.ask:
            del self._asking[peer]
            self.service.fail(asking.ticket, WireError(f"version {asking.join.version}: interrupted"))
        elif self._round is not None and self._round.asks.get(peer, leave.ask + 1) <= leave.ask:
            self._round.unwanted.add(peer)
        self.service.answer(ticket, b"")

    def _over(self, peer: str, ticket: int, over: EndRound) -> None:
        if self._round is None or self._round.number != over.round or peer not in self._round.members:
            self.service.answer(ticket, self._ended.get(over.round, "it ended long ago").encode())
            return
        self._round.told[peer] = over.error
        if over.error:
            self._round.parked[peer] = ticket
        else:
            self._expected[peer] = self._round.version
            self.service.answer(ticket, b"")

    def _board_of(self, group: int, peer: str) -> KeyValueStore:
        """Return the store of the running round, for its members only: anyone may connect to the
        port."""
        with self._changed:
            if self._round is None or group != self._groups:
                raise WireError("that round is over")
            if peer not in self._round.members:
                raise ProtocolError(f"who is no member of round {self._round.number} has no word in its group")
            return self._board

    def _closing(self, version: int) -> str:
        return f"{f'version {version}: ' if version else ''}its publisher {self._name} has closed"

    # ---- the thread of rounds

    def _run(self) -> None:
        while (chosen := self._gather()) is not None:
            try:
                self._serve(*chosen)
            except Exception:  # whatever it was, the next ones are served
                _log.exception("a round of weights failed")
        self._drop_group()

    def _gather(self) -> tuple[_Round, list[_Joined]] | None:
        """Return the next round and its requests; None when closed."""
        with self._changed:
            while not self._closed:
                if not self._asking:
                    self._changed.wait()
                    continue
                self._drop_late()
                if not self._asking:
                    continue
                first = min(self._asking.values(), key=lambda asking: asking.since)
                left = first.since + self._gather_s - time.monotonic()
                version = first.join.version
                others = [peer for peer, had in self._expected.items() if had != version and peer not in self._asking]
                if left > 0 and (others or not self._rounds):
                    self._changed.wait(left)
                    continue
                chosen = [a for a in self._asking.values() if a.join.version == version]
                if version > self._newest:
                    self._newest = version
                    for peer in others:  # who did not ask for it in time is not waited for again
                        del self._expected[peer]
                for asking in chosen:
                    del self._asking[asking.peer]
                chosen.sort(key=lambda asking: asking.peer)
                self._rounds += 1
                names = {asking.peer: asking.join.name for asking in chosen}
                asks = {asking.peer: asking.join.ask for asking in chosen}
                self._round = _Round(self._rounds, version, names, asks, max(asking.until for asking in chosen))
                return self._round, chosen
        return None

    def _drop_late(self) -> None:
        """Remove requests whose deadline has passed."""
        now = time.monotonic()
        for asking in [asking for asking in self._asking.values() if asking.until <= now]:
            del self._asking[asking.peer]
            late = DeadlineExceeded(
                f"version {asking.join.version}: no round of it began in {asking.join.wait_s:.3g} s"
            )
            self.service.fail(asking.ticket, late)

    def _serve(self, round_: _Round, chosen: list[_Joined]) -> None:
        try:
            manifest, chunks = self._manifest(round_.version), self._chunks(round_.version)
        except AsyncFlowError as error:
            with self._changed:
                self._round = None
            for asking in chosen:
                self.service.fail(asking.ticket, error)
            return

        def limit_s() -> float:
            return min(self._stall_s, round_.until - time.monotonic())

        why, group_of = "", tuple(round_.members)
        fresh = self._group is None or self._group_of != group_of
        if fresh:
            self._drop_group()
            with self._changed:
                self._groups, self._board = self._groups + 1, KeyValueStore()
                if round_.dead:
                    self._board.fail(f"{_names(round_.members[peer] for peer in round_.dead)} died or left")
        names = (self._name, *round_.members.values())
        for rank, asking in enumerate(chosen, 1):
            self.service.answer(asking.ticket, encode(RoundStart(round_.number, self._groups, rank, names)))
        try:
            if fresh:
                store = self._board.store(limit_s)
                self._group = BroadcastGroup(self._backend, store, 0, len(names), self._address, limit_s)
                self._group_of = group_of
            assert self._group is not None
            self._group.limit_s = limit_s
            self._send(self._group, round_, manifest, [flat(chunk) for chunk in chunks])
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            traceback.clear_frames(error.__traceback__)  # they hold works, and those the connections
            self._drop_group()  # first of all, so that the others see it
        self._end(round_, why)

    def _send(self, group: BroadcastGroup, round_: _Round, manifest: Manifest, chunks: list[Any]) -> None:
        for batch in bucket_batches(manifest):
            with self._changed:
                unwanted = round_.unwanted | round_.dead >= round_.members.keys()
                word = CLOSING if self._closed else UNWANTED if unwanted else GO_ON
            if group.word(word) != GO_ON:
                return
            group.stream(chunks, batch, lambda bucket: None)

    def _end(self, round_: _Round, why: str) -> None:
        """Wait for the reports of all members, and answer those that wait for the verdict."""
        with self._changed:
            if why:
                self._board.fail(why)
            until = min(time.monotonic() + 1.5 * self._stall_s, round_.until)
            while round_.silent and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            verdict = round_.blame(why)
            for peer in (*round_.silent, *round_.dead):
                self._expected.pop(peer, None)
            self._ended[round_.number] = verdict or "it ended well"
            self._ended.pop(round_.number - REMEMBERED, None)
            for ticket in round_.parked.values():
                self.service.answer(ticket, verdict.encode())
            self._round = None
        if verdict or why:
            _log.warning(
                "version %d: a round with %s failed: %s", round_.version, _names(round_.members.values()), verdict
            )
            self._drop_group()

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(Exception):
                group.close()


def _names(names: Any) -> str:
    return ", ".join(sorted(names))
