"""What a naive ledger knows of checkpoints: what they cover, and what is trained again after one."""

from __future__ import annotations

from typing import Any

from naive_versions import NaiveVersions

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.ledger import commands as cmd


class NaiveTraining(NaiveVersions):
    def _getcut(self, session: int, c: cmd.GetCut, outcome: Any) -> None:
        step = self.next_to_train() if self.train() is not None else 0
        version = -1 if self.version < 0 else step + self.shift()
        cut = cmd.Cut(
            step=step, version=version, covered=self.covered, put=len(self.rows), checkpoints=self.checkpoints,
            restore=self.to_restore,
        )  # fmt: skip
        self._is(outcome, cut)

    def _checkpoint(self, session: int, c: cmd.Checkpoint, outcome: Any) -> None:
        wrong = not self.checkpoints or self.train() is None
        if self._is_error(
            outcome, [ConfigError] if wrong or not 0 <= c.covers <= c.step <= self.next_to_train() else []
        ):
            return
        self._is(outcome, cmd.Done())
        self.covered = max(self.covered, c.covers)
        self.saved[c.step] = c.version
        self.saved = {step: version for step, version in self.saved.items() if step >= c.covers}
        for i, row in self.live().items():
            if row.fate is not None and not self.may_train_again(row):
                self.end(i, row.fate)

    def _resume(self, session: int, c: cmd.Resume, outcome: Any) -> None:
        train, errors = self.train(), []
        if self.checkpoints and train is None and c.step == 0:
            self._is(outcome, cmd.Resumed(step=0, version=-1, publish=False, again=0))
            return
        if not self.checkpoints or train is None or not self.covered <= c.step <= self.next_to_train():
            errors.append(ConfigError)
        if not -1 <= c.version <= max(self.version, 0) or (c.version >= 0 and self.rolled_back(c.version)):
            errors.append(ConfigError)
        if self._is_error(outcome, errors):
            return
        assert train is not None
        self.to_restore = self.restore_step = -1
        self.saved = {step: version for step, version in self.saved.items() if step <= c.step}
        again = {i: row for i, row in self.live().items() if row.step is not None and c.step <= row.step < self.step}
        for token, lease in self.leases.items():
            if lease.task == train.name and set(self.held(token)) & again.keys():
                if lease.crew is None:
                    self._return(token, self.held(token), blame=False)
                else:
                    self.void(token, blame=False)
        done = [row for row in again.values() if row.state[train.name] == "done"]
        for row in done:
            row.state[train.name], row.fate = "open", None
        version, publish = self._number_for(c)
        self._is(outcome, cmd.Resumed(step=c.step, version=version, publish=publish, again=len(done)))

    def _number_for(self, c: cmd.Resume) -> tuple[int, bool]:
        """What the step trains, and whether it is yet to be published."""
        current = self.version
        if current < 0:
            return -1, False
        there = any(each.version == current for each in self.kept) and not self.given_up(current)
        if c.version == current and there and self.trains[current] == c.step:
            return current, False
        number = max(current, self.coming.version if self.coming else -1) + 1
        if self.coming is not None:
            self.end_coming()
        self.plan(number, c.step, c.version)
        return number, True
