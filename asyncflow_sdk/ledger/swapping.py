"""Swapping: which replica may load a version now, and when enough have it staged."""

from __future__ import annotations

from ..errors import ConfigError, VersionGone
from . import commands as cmd
from .state import Session
from .versioning import Versioning


class Swapping(Versioning):
    """Permits replicas to load what they have staged."""

    def _swap(self, session: Session, command: cmd.Swap) -> cmd.Reply | None:
        version = command.version
        if session.replica is None or session.replica.staged != version:
            raise ConfigError(f"{session.name} has not staged version {version}, so it cannot load it")
        if version != self.version:
            raise VersionGone(f"version {version} was replaced by {self.version}; stage that")
        if self.max_swapping and session.id not in self.swapping and len(self.swapping) >= self.max_swapping:
            return None
        self.swapping.setdefault(session.id, self._now)
        self._does(session, version, "swapping")
        return cmd.Done()

    def _loaded(self, session: Session, command: cmd.Loaded) -> cmd.Reply:
        reply = super()._loaded(session, command)
        self._end_swap(session.id)
        return reply

    def _not_loaded(self, session: Session, command: cmd.NotLoaded) -> cmd.Reply:
        reply = super()._not_loaded(session, command)
        self._end_swap(session.id)
        return reply

    def _end_swap(self, session: int) -> None:
        if self.swapping.pop(session, None) is not None:
            self._dirty.add("swap")

    def _drop_session(self, session: int, reason: str, blame: bool) -> None:
        super()._drop_session(session, reason, blame)
        self._end_swap(session)
