"""Versions of the weights: which is current, and what each replica has loaded."""

from __future__ import annotations

from ..errors import ConfigError, Ended
from ..types import events as ev
from . import commands as cmd
from .intake import Intake
from .rows import NONE
from .state import MAX_NUMBER, Session


class Versioning(Intake):
    """Keeps versions."""

    def _publish(self, session: Session, command: cmd.Publish) -> cmd.Reply:
        if command.version <= self.version:
            raise ConfigError(
                f"version {command.version} cannot be published: {self.version} is already current, and a number"
                " is never used again"
            )
        if command.version > MAX_NUMBER:
            raise ConfigError(f"version {command.version} is past the largest number, {MAX_NUMBER}")
        self.version, self.version_since = command.version, self._now
        self.versions[command.version] = command
        for old in [v for v in self.versions if v < command.version - 1]:
            del self.versions[old]  # the ledger names the newest two; senders keep no more
        self._effects.events.append(
            ev.Published(
                time_s=self._now,
                worker=session.name,
                version=command.version,
                nbytes=command.nbytes,
                root=command.root,
            )
        )
        self._dirty.add("version")
        self._dirty.update(f"task {t}" for t, task in self.tasks.items() if task.spec.admits)
        return cmd.Done()

    def _await_version(self, session: Session, command: cmd.AwaitVersion) -> cmd.Reply | None:
        if self.version <= max(command.after, NONE):
            if self.ended and all(self._exhausted(t) for t in self.tasks.values() if t.spec.admits):
                raise Ended("no rollout will need another version")
            return None
        newest = self.versions[self.version]
        return cmd.Version(
            version=newest.version, manifest=newest.manifest, transport=newest.transport, where=newest.where
        )

    def _loaded(self, session: Session, command: cmd.Loaded) -> cmd.Reply:
        if not 0 <= command.version <= max(self.version, 0):
            raise ConfigError(f"version {command.version} was never published; {self.version} is the newest")
        session.loaded = command.version
        self._dirty.update(f"task {t}" for t, task in self.tasks.items() if task.spec.admits)
        lag = max(self.version - command.version, 0)
        self._effects.events.append(
            ev.Loaded(time_s=self._now, worker=session.name, version=command.version, lag=lag)
        )
        return cmd.Done()
