"""Step checkpoints: final steps, and steps to be trained again when a trainer resumes.

With checkpoints, rows of an acknowledged step stay live: done in every task, with their memory. They end, consumed or
filtered, when a checkpoint covers their step. So a row ends once, and never returns after its end.

    steps:      0 ... 39 | 40 ... 46 | 47          a checkpoint of step 40, 46 acknowledged, 47 being filled
    Resume(40):            40 ... 46   are leased again; 47 continues to fill. They train versions of new numbers."""

from __future__ import annotations

import numpy as np

from ..errors import ConfigError
from ..types import events as ev
from . import commands as cmd
from .completion import NO_GRADIENT, RowCompletion
from .payload_loss import PayloadLoss
from .publication import VersionPublication
from .state import LedgerState
from .state.rows import NONE
from .state.sessions import Session
from .terminations import FILTERED


class StepCheckpoints:
    """Covers steps, and resumes from a checkpoint."""

    def __init__(
        self, state: LedgerState, completion: RowCompletion, publication: VersionPublication, losses: PayloadLoss
    ) -> None:
        self._state, self._completion, self._publication, self._losses = state, completion, publication, losses

    def position(self) -> cmd.Reply:
        """Return the position of training."""
        steps, versions = self._state.steps, self._state.versions
        step = steps.next_to_train() if steps.declared else 0
        version = NONE if versions.current == NONE else versions.lineage.version(step)
        put, saves, restore = self._state.budget.put, self._state.limits.checkpoints, versions.to_restore
        return cmd.TrainingPosition(
            step=step, version=version, covered=steps.covered, put=put, checkpoints=saves, restore=restore
        )

    def add(self, command: cmd.AddCheckpoint) -> cmd.Reply:
        """Record a checkpoint."""
        self._check_resumable()
        steps, following = self._state.steps, self._state.steps.next_to_train()
        if not 0 <= command.covers <= command.step <= following:
            text = f"a checkpoint of step {command.step} cannot cover the steps before {command.covers}"
            raise ConfigError(f"{text}: step {following} is not acknowledged yet; do that first")
        steps.save(command.step, command.version, command.covers)
        if command.covers > steps.covered:
            rows, ids = self._state.rows, steps.cover(command.covers)
            at = rows.at(ids)
            self._state.budget.hold(-int(np.count_nonzero(rows.todo[at] == 0)))
            dropped = ids[rows.fate[at] == FILTERED]
            if len(dropped):
                self._completion.terminations.finish(dropped, FILTERED, NO_GRADIENT)
            self._completion.consume(ids, at)
        return cmd.Done()

    def resume(self, session: Session, command: cmd.Resume) -> cmd.Reply:
        """Continue with a step after a trainer has loaded its checkpoint."""
        steps, step = self._state.steps, command.step
        if self._state.limits.checkpoints and not steps.declared and step == 0:
            return cmd.Resumed(step=0, version=NONE, publish=False, again=0)
        self._check_resumable()
        self._check(step, command.version)
        for grant in self._state.leases.of_step(step):
            self._completion.void(grant, f"{session.name} resumes with step {step}", blame=False)
        versions = self._state.versions
        versions.restore()  # the checkpoint's version was not given up
        rows, again = self._state.rows, steps.requeue(step)
        self._state.budget.hold(-int(np.count_nonzero(rows.todo[rows.at(again)] == 1)))  # complete until now
        version, publish = self._continue_from(step, command.version, session.name)
        self._losses.end_holes()
        self._state.context.wake(steps.task.place)
        self._state.tasks.wake_replicas()
        return cmd.Resumed(step=step, version=version, publish=publish, again=len(again))

    def _check_resumable(self) -> None:
        if not self._state.limits.checkpoints:
            raise ConfigError("this run keeps no rows to resume from; serve it with checkpoints=True")
        if not self._state.steps.declared:
            raise ConfigError("no task with batch_rows (train) is declared, so there is no step to resume from")

    def _check(self, step: int, version: int) -> None:
        steps, versions = self._state.steps, self._state.versions
        following, covered = steps.next_to_train(), steps.covered
        cannot = f"training cannot resume with step {step}"
        if step < covered:
            raise ConfigError(f"{cannot}: a checkpoint covers the steps before {covered}, and their rows have ended")
        if step > following:
            text = "acknowledged here: the checkpoint is of another run, or newer than this one's last record"
            raise ConfigError(f"{cannot}: step {following} was not {text}")
        newest = version if versions.current == NONE and step == following else max(versions.current, 0)
        if not NONE <= version <= newest:  # the first version may be that of another run
            raise ConfigError(f"version {version} was never published; {versions.current} is the newest")
        if version != NONE and versions.lineage.rolled_back(version):
            text = f"the checkpoint of step {step} has the weights of version {version}, which was rolled back"
            raise ConfigError(f"{text}; resume from an older one")

    def _continue_from(self, step: int, parent: int, who: str) -> tuple[int, bool]:
        """Return the version trained by ``step`` now, and True if it must first be published."""
        versions, publication = self._state.versions, self._publication
        current = versions.current
        if current == NONE:
            return parent, parent != NONE
        there = current in versions.kept and not versions.lineage.given_up(current)
        if current == parent and there and versions.lineage.step(current) == step:
            return current, False  # no version was published since
        number = publication.next_number(current + 1)
        publication.discard(f"was withdrawn: {who} resumes with step {step}")
        versions.lineage.add(number, parent, step, lost=True)
        self._state.context.wake("swap")  # the version to load may be lost
        lost = f"versions {parent + 1} to {number - 1} are lost" if number - parent > 1 else "no version is lost"
        text = f"{who} resumes with step {step} as version {number}, after version {parent}; {lost}"
        self._state.context.publish(ev.Note(time_s=self._state.context.now, text=text, level="warning"))
        return number, True
