"""Swapping: which replica may load a version now, and when enough have it staged.

Permissions go to whoever asked first, ``max_swapping`` at a time. With a ``quorum``, a version is *decided* once so many
live replicas have it staged or loaded: until then none loads it, and from then on those that have not are granted no
prompts. What is decided may still be loaded when a newer version is current that is not.
"""

from __future__ import annotations

from ..errors import ConfigError, VersionGone
from ..types import events as ev
from . import commands as cmd
from .records import Session, Waiter
from .rows import NONE
from .versioning import Versioning
from .versions import Kept


class Swapping(Versioning):
    """Permits replicas to load what they have staged."""

    def _swap(self, session: Session, command: cmd.Swap) -> cmd.Reply | None:
        version = command.version
        if self.lineage.given_up(version):
            raise VersionGone(f"version {version} was rolled back; {self.version} is current: stage that")
        if version < 0 or session.replica is None or session.replica.staged != version:
            raise ConfigError(f"{session.name} has not staged version {version}, so it cannot load it")
        if version != self.version and not (self.quorum and version == self.committed):
            since = self._now - self.version_since
            raise VersionGone(
                f"version {version} was replaced by {self.version}, current since {since:.1f} s: stage that"
            )
        if self.quorum and version > self.committed:
            return None
        if self.max_swapping and session.id not in self.swapping and len(self.swapping) >= self.max_swapping:
            return None
        self.swapping.setdefault(session.id, self._now)
        self._does(session, version, "swapping")
        return cmd.Permitted(version=version)

    def _park(self, waiter: Waiter) -> None:
        super()._park(waiter)
        if isinstance(waiter.command, cmd.Swap):
            replica = self._replica(self.sessions[waiter.session])
            replica.version, replica.doing, replica.since, replica.why = (
                waiter.command.version,
                "waits",
                self._now,
                "",
            )
            self.failing.pop(waiter.session, None)

    def _staged(self, session: Session, command: cmd.Staged) -> cmd.Reply:
        reply = super()._staged(session, command)
        self._ask_again(session)
        self._decide()
        return reply

    def _loaded(self, session: Session, command: cmd.Loaded) -> cmd.Reply:
        reply = super()._loaded(session, command)
        self._end_swap(session.id)
        self._decide()
        return reply

    def _not_loaded(self, session: Session, command: cmd.NotLoaded) -> cmd.Reply:
        reply = super()._not_loaded(session, command)
        self._ask_again(session)
        self._end_swap(session.id)
        return reply

    def _retire(self, session: Session, command: cmd.Retire) -> cmd.Reply:
        self._give_up_swap(session, "it is a replica no more")
        return super()._retire(session, command)

    def _configure(self, session: Session, command: cmd.Configure) -> cmd.Reply:
        reply = super()._configure(session, command)
        if not self.quorum:
            self.committed = NONE  # nothing is decided any more
        self._decide()
        return reply

    def _make_current(self, kept: Kept, worker: str, reason: str = "") -> None:
        lost = self.lineage.given_up(self.version)
        super()._make_current(kept, worker, reason)
        if lost:
            self._decide(at_once=True)  # whoever is on what is given up is granted nothing anyhow

    def _ready_replicas(self) -> list[Session]:
        """Those that have the current version staged or loaded."""
        replicas = [self.sessions[number] for number in self.replicas]
        return [r for r in replicas if r.replica and self.version in (r.replica.staged, r.loaded)]

    def _decide(self, at_once: bool = False) -> None:
        if not self.quorum or self.committed == self.version:
            return
        ready = len(self._ready_replicas())
        if ready >= self.quorum or at_once:
            self.committed = self.version
            self._effects.events.append(ev.Committed(time_s=self._now, version=self.version, staged=ready))
            self._dirty.add("swap")
            self._wake_replicas()

    def _ask_again(self, session: Session) -> None:
        """It may wait for permission to load what it has staged no longer."""
        if any(isinstance(self.parked[ticket].command, cmd.Swap) for ticket in session.parked):
            self._dirty.add("swap")

    def _take_back(self, session: int, version: int) -> None:
        """Nobody heard that this version may be loaded: it is staged, as before."""
        replica = self.sessions[session].replica
        if session in self.swapping and replica is not None and replica.version == version:
            self._give_up_swap(self.sessions[session], "it asks no longer")
            replica.doing, replica.since = "staged", self._now

    def _give_up_swap(self, session: Session, why: str) -> None:
        """A replica that may load a version will not: another may."""
        if session.id in self.swapping and session.replica is not None:
            self._effects.events.append(
                ev.WeightState(
                    time_s=self._now,
                    worker=session.name,
                    version=session.replica.version,
                    state="released",
                    detail=why,
                )
            )
        self._end_swap(session.id)

    def _end_swap(self, session: int) -> None:
        if self.swapping.pop(session, None) is not None:
            self._dirty.add("swap")
            self._wake_replicas()  # this one is given rows again

    def _drop_session(self, session: int, reason: str, blame: bool) -> None:
        if session in self.sessions:
            self._give_up_swap(self.sessions[session], reason)
        super()._drop_session(session, reason, blame)
