"""Resuming: what a checkpoint makes final, and what is trained again when a trainer goes on from one.

With checkpoints, rows of an acknowledged step live on: they are done in every task, hold their memory, and end, consumed or
filtered, when a checkpoint covers their step. Until then the step can be trained again: it is full and unleased once more,
with the very same rows in the same order. So a row still ends once, and what has ended never comes back.

    steps:      0 ... 39 | 40 ... 46 | 47          a checkpoint of step 40, 46 acknowledged, 47 being filled
    Resume(40):            40 ... 46   are leased again; 47 goes on filling

The steps that are trained again train versions of new numbers, the first of which has the checkpoint's weights.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from ..errors import ConfigError
from ..types import events as ev
from . import commands as cmd
from .commands import Ids
from .finishing import NO_GRADIENT
from .losing import Losing
from .records import Session, Steps
from .rows import DONE, LIVE, NONE, SELECTED
from .state import FILTERED

GONE = "payload lost"


class Resuming(Losing):
    """Covers steps, and takes them up again."""

    def _get_cut(self, session: Session, command: cmd.GetCut) -> cmd.Reply:
        step = self._next_to_train() if self.steps is not None else 0
        version = NONE if self.version == NONE else self.lineage.version(step)
        return cmd.Cut(
            step=step, version=version, covered=self.covered, put=self.put_total, checkpoints=self.checkpoints,
            restore=self.to_restore,
        )  # fmt: skip

    def _checkpoint(self, session: Session, command: cmd.Checkpoint) -> cmd.Reply:
        steps = self._kept_steps()
        following = self._next_to_train()
        if not 0 <= command.covers <= command.step <= following:
            raise ConfigError(
                f"a checkpoint of step {command.step} cannot cover the steps before {command.covers}: step {following} is"
                " the first that is not acknowledged; acknowledge a step before a checkpoint that has trained it is made"
            )
        self.checkpoint = max(self.checkpoint, command.step)
        self.saved[command.step] = command.version
        self.saved = {step: version for step, version in self.saved.items() if step >= command.covers}
        if command.covers > self.covered:
            self._cover(steps, command.covers)
        return cmd.Done()

    def _kept_steps(self) -> Steps:
        if not self.checkpoints:
            raise ConfigError(
                "this run keeps no rows that a trainer could go on with; serve it with checkpoints=True"
            )
        if self.steps is None:
            raise ConfigError("no task with batch_rows (train) is declared, so there is no step to go on from")
        return self.steps

    def _cover(self, steps: Steps, covers: int) -> None:
        """Steps before this one are final."""
        parts = [steps.whole.pop(step) for step in sorted(steps.whole) if step < covers]
        self.covered = covers
        if not parts:
            return
        ids = np.concatenate(parts)
        at = self.rows.at(ids)
        self.held -= int(np.count_nonzero(self.rows.todo[at] == 0))
        self.holes = np.setdiff1d(self.holes, ids)
        dropped = ids[self.rows.fate[at] == FILTERED]
        if len(dropped):
            self._finish(dropped, FILTERED, NO_GRADIENT)
        self._consume(ids, at)

    def acknowledged_steps(self) -> list[tuple[int, Ids]]:
        """Those that no checkpoint covers, with their rows."""
        if self.steps is None:
            return []
        task, rows = self.steps.task.spec.name, self.rows
        return [
            (step, ids) for step, ids in self.steps.whole.items() if (rows.task(task, "state")[rows.at(ids)] == DONE).all()
        ]  # fmt: skip

    def _resume(self, session: Session, command: cmd.Resume) -> cmd.Reply:
        if self.checkpoints and self.steps is None and command.step == 0:
            return cmd.Resumed(step=0, version=NONE, publish=False, again=0)
        steps = self._kept_steps()
        step = command.step
        self._check_resume(step, command.version)
        for lease in [lease for lease in self.leases.values() if lease.step >= step]:
            self._void(lease, f"{session.name} goes on with step {step}", blame=False)
        self.to_restore = self.restore_step = NONE  # its weights are of a version that was not given up
        self.saved = {saved: version for saved, version in self.saved.items() if saved <= step}
        again = self._take_up(steps, step)
        version, publish = self._go_on_from(step, command.version, session.name)
        if len(holes := self.holes):
            self.holes = holes[:0]
            self._lose(holes, GONE)
        self._dirty.add(f"task {steps.task.spec.name}")
        self._wake_replicas()
        return cmd.Resumed(step=step, version=version, publish=publish, again=again)

    def _check_resume(self, step: int, version: int) -> None:
        following = self._next_to_train()
        if step < self.covered:
            raise ConfigError(
                f"training cannot go on with step {step}: a checkpoint covers the steps before {self.covered}, and their rows"
                " have ended"
            )
        if step > following:
            raise ConfigError(
                f"training cannot go on with step {step}: step {following} is the first that this queue has not seen"
                " acknowledged, so the checkpoint is of another run, or newer than what is left of this one"
            )
        if not NONE <= version <= max(self.version, 0):
            raise ConfigError(f"version {version} was never published; {self.version} is the newest")
        if version != NONE and self.lineage.rolled_back(version):
            raise ConfigError(
                f"the checkpoint of step {step} has the weights of version {version}, which was rolled back: go on from an"
                " older one"
            )

    def _take_up(self, steps: Steps, first: int) -> int:
        """Full steps from this one on wait for a trainer again, those acknowledged too. Returns how many rows were."""
        rows, task = self.rows, steps.task
        whole = {step: ids for step, ids in sorted(steps.whole.items()) if step >= first}
        steps.closed = deque([*((step, ids) for step, ids in steps.closed if step < first), *whole.items()])
        if not whole:
            return 0
        ids: Ids = np.concatenate(list(whole.values()))
        done = ids[rows.task(task.spec.name, "state")[rows.at(ids)] == DONE]
        at = rows.at(done)
        assert (rows.state[at] == LIVE).all(), "what is not covered lives"
        self.held -= int(np.count_nonzero(rows.todo[at] == 0))
        rows.task(task.spec.name, "state")[at] = SELECTED
        rows.todo[at] += 1
        rows.fate[at] = LIVE
        task.move(len(done), DONE, SELECTED)
        for partition, part in self._by_partition(done):
            task.undone[partition] += len(part)
        return len(done)

    def _go_on_from(self, step: int, parent: int, who: str) -> tuple[int, bool]:
        """The version that ``step`` trains from now on, and whether it has to be published."""
        current = self.version
        if current == NONE:
            return NONE, False
        there = current in self.versions and not self.lineage.given_up(current)
        if current == parent and there and self.lineage.step(current) == step:
            return current, False  # nothing was published since
        number = current + 1
        if self.announced is not None:
            number = max(number, self.announced.version + 1)
            self._forget_announced(f"was withdrawn: {who} goes on with step {step}")
        self.lineage.roll_back(number, parent, step, lost=True)
        self._dirty.add("swap")  # what a replica waits to load may be lost
        lost = f"versions {parent + 1} to {number - 1} are lost" if number - parent > 1 else "no version is lost"
        text = f"{who} goes on with step {step} as version {number}, after version {parent}; {lost}"
        self._effects.events.append(ev.Note(time_s=self._now, text=text, level="warning"))
        return number, True
