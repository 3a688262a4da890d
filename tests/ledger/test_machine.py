"""The ledger as a whole: Hypothesis says what happens next, the naive model says what is right.

``HYPOTHESIS_PROFILE=long pytest tests/ledger`` looks longer.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from ledger_harness import COLUMN
from machine_leases import LeaseRules
from machine_meetings import MeetingRules
from machine_run import ORDINARY, WRONG, one_in, small, waits, wheres
from machine_training import TrainingRules
from machine_versions import VersionRules

from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.ledger.commands import PolicySpec

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"


class LedgerMachine(LeaseRules, VersionRules, TrainingRules, MeetingRules):
    """What is rarer shares one rule, ``now_and_then``."""

    @rule(seconds=st.sampled_from([0.0, 1.0, 3.0, 5.0, 9.0, 21.0]))
    def pass_time(self, seconds: float) -> None:
        self.run.pass_time(seconds)

    @rule(
        groups=st.integers(1, 4),
        spoil=st.sampled_from(["no"] * 8 + ["dtype", "empty", "size", "zero", "complete", "values", "digest"]),
        key=st.sampled_from(["", "", "a", "b", "c"]),
        priority=st.sampled_from([0, 0, 0, 3, -2]),
        wait=waits,
        where=st.sampled_from(["", "", "eval"]),
        nbytes=st.sampled_from([0, 0, 7, 40]),
    )
    def put(self, groups: int, spoil: str, key: str, priority: int, wait: float, where: str, nbytes: int) -> None:
        columns = dict(ORDINARY)
        if spoil == "dtype":
            if "prompt" not in self.run.naive.schema:
                return
            columns = {"fresh": COLUMN, "prompt": WRONG}
        if spoil == "empty":
            columns = {}
        if spoil == "complete":
            columns |= {"response": COLUMN, "reward": COLUMN}
        size = {"size": self.size + 1, "zero": 0}.get(spoil, self.size)
        if "score" not in {task.name for task in self.tasks}:
            where = ""  # nobody would ever take them
        groups = {"a": 1, "b": 2}.get(key, groups)  # so that a key often comes again as it was
        digest = (b"\1" if spoil == "values" else b"\0") * 16 * len(columns) if key else b""
        if spoil == "digest":
            digest = b"\0" * (16 * len(columns) + 1)
        command = cmd.Put(
            groups=groups, group_size=size, columns=columns, key=key, timeout_s=wait, priority=priority,
            partition=where, nbytes=nbytes, digest=digest,
        )  # fmt: skip
        self.run.send(self.session(groups), command)

    # ---- what is rarer

    @rule(
        what=st.sampled_from(
            ["leave", "die", "declare", "configure", "forget", "wanted", "end", "cancel", "look", "dismiss"]
        ),
        at=small,
        wait=waits,
        data=st.data(),
    )
    def now_and_then(self, what: str, at: int, wait: float, data: Any) -> None:
        if what == "leave":
            self.run.send(self.session(at), cmd.Leave())
        elif what == "die":
            self.run.die(self.session(at))
        elif what == "declare":
            self._declare(
                at, data.draw(st.sampled_from(["no", "no", "no", "other", "attempts", "admits", "batch", "circle"]))
            )
        elif what == "configure":
            self._configure(at)
        elif what == "forget" and self.run.naive.parked:
            self.run.forget(self.run.naive.parked[at % len(self.run.naive.parked)].ticket)
        elif what == "wanted":
            self.run.send(self.session(at), cmd.Wanted(timeout_s=wait))
        elif what == "end" and data.draw(one_in(4)):
            self.run.send(self.session(0), cmd.End(cancel=bool(at % 2), partition=data.draw(wheres)))
        elif what == "cancel":
            self._cancel(at, data.draw(st.sampled_from(["rows", "rows", "key", "partition", "nothing"])))
        elif what == "dismiss" and data.draw(one_in(2)):
            name = self.run.naive.names[self.session(at)] if at % 2 else ""
            ended = data.draw(st.sampled_from(["", "its process ended"]))
            self.run.send(self.session(0), cmd.Dismiss(name=name, ended=ended))
            self.sessions[at % len(self.sessions)] = self.run.join(
                f"worker {at}"
            )  # the other may finish what it holds
        elif what == "look":
            self.run.send(self.session(at), cmd.GetAudit())
            self.run.send(self.session(at), cmd.GetStatus())
        if what in ("leave", "die") and data.draw(st.booleans(), "comes back"):
            self.sessions[at % len(self.sessions)] = self.run.join(f"worker {at}")

    def _declare(self, which: int, spoil: str) -> None:
        task = self.tasks[which % len(self.tasks)]
        changes: dict[str, dict[str, Any]] = {
            "no": {},
            "other": {"lease_s": 3.0},
            "attempts": {"name": "bad", "max_attempts": 0},
            "admits": {"name": "bad", "admits": True, "batch_rows": self.batch},
            "circle": {"name": "bad", "needs": (*task.needs, *task.gives), "gives": task.needs},
            "batch": {"name": "bad", "admits": False, "batch_rows": self.batch * self.size + 1},
        }
        if spoil == "other" and task.name not in self.run.naive.tasks:
            return
        if spoil == "batch" and (self.size == 1 or self.run.naive.last_group_size.get("") != self.size):
            return  # it could be right
        fields = {name: getattr(task, name) for name in task.__struct_fields__} | changes[spoil]
        self.run.send(self.session(0), cmd.Declare(task=TaskSpec(**fields)))

    def _cancel(self, at: int, how: str) -> None:
        which: dict[str, dict[str, Any]] = {
            "rows": {"ids": np.array([at, 3 * at], "<i8").tobytes()},
            "key": {"key": "ab"[at % 2]},
            "partition": {"partition": "eval"},
            "nothing": {},
        }
        self.run.send(self.session(at), cmd.Cancel(**which[how]))

    def _configure(self, at: int) -> None:
        limits = [
            cmd.Configure(steps=0, staleness=PolicySpec("drop")),
            cmd.Configure(max_staleness=-1, capacity_rows=7),
            cmd.Configure(capacity_rows=0),
            cmd.Configure(capacity_rows=3 * self.batch),
            cmd.Configure(capacity_rows=self.batch),
            cmd.Configure(quorum=0, max_swapping=1),
            cmd.Configure(quorum=1, keep_versions=3),
            cmd.Configure(quorum=2, max_swapping=0),
        ]
        self.run.send(self.session(0), limits[at % len(limits)])

    @rule(role=small, turns=st.integers(1, 3))
    def work(self, role: int, turns: int) -> None:
        """Fair turns, so that what is random starts from deeper states."""
        name = self.fair.roles[role % len(self.fair.roles)]
        if name == "feeder" or name in self.run.naive.tasks:
            for _ in range(turns):
                self.fair.turn(name)

    @rule(who=small, works=st.booleans(), turns=st.sampled_from([1, 2, 6]))
    def straggle(self, who: int, works: bool, turns: int) -> None:
        """One worker begins something, and the others go on without it as far as they may."""
        if not {"rollout", "train"} <= self.run.naive.tasks.keys():
            return
        if self.run.naive.version >= 0:
            self.run.send(self.session(who), cmd.Loaded(version=self.run.naive.version))
        held = self.run.send(self.session(who), cmd.Lease(task="rollout", count=1))
        roles = [role for role in self.fair.roles if role == "feeder" or role in self.run.naive.tasks]
        for _ in range(turns):
            moved = [self.fair.turn(name) for name in roles]
            if not any(moved):
                break
        if works and isinstance(held, cmd.Leased):
            columns = dict.fromkeys(self.run.naive.tasks["rollout"].gives, COLUMN)
            self.run.send(self.session(who), cmd.Complete(token=held.token, columns=columns))

    def teardown(self) -> None:
        if hasattr(self, "fair") and self.run.sound:
            self.fair.finish()


LedgerMachine.TestCase.settings = settings(
    max_examples=2000 if LONG else 200,
    stateful_step_count=80 if LONG else 40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestLedger = pytest.mark.timeout(3600 if LONG else 1800)(LedgerMachine.TestCase)
