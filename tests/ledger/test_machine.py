"""The ledger as a whole: Hypothesis says what happens next, the naive model says what is right.

``HYPOTHESIS_PROFILE=long pytest tests/ledger`` looks longer.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from ledger_harness import COLUMN, Fair, Harness

from asyncflow_sdk.errors import LeaseLost
from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types import ColumnSpec

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
WRONG = ColumnSpec("fixed", "float32")
small = st.integers(0, 7)
waits = st.sampled_from([0.0, 0.0, 4.0, 40.0])


def make_tasks(draw: Any, batch_rows: int, offline: bool) -> list[TaskSpec]:
    """A pipeline: rollout, perhaps a reward and a side task, and train (or, without steps, a plain end)."""
    trains = draw(st.integers(0, 5)) > 0
    scored = draw(st.booleans())
    side = draw(st.sampled_from([None, (), ("score",)]))
    attempts = draw(st.sampled_from([1, 2, 3]))
    tasks = [
        TaskSpec(
            name="rollout", needs=("prompt",), gives=("response",), lease_s=10, max_attempts=attempts,
            admits=trains and draw(st.integers(0, 5)) > 0,
        )
    ]  # fmt: skip
    if scored:
        tasks.append(TaskSpec(name="reward", needs=("response",), gives=("reward",), lease_s=6, max_attempts=2))
    if side is not None:
        tasks.append(TaskSpec(name="side", needs=("prompt",), gives=side, lease_s=8, max_attempts=attempts))
    needs = ("response", "reward") if scored else ("response",)
    tasks.append(TaskSpec(name="train", needs=needs, lease_s=20, batch_rows=batch_rows if trains else None))
    return tasks


class LedgerMachine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def begin(self, data: Any) -> None:
        draw = data.draw
        self.run = Harness()
        self.size = draw(st.sampled_from([1, 2, 3]), "group size")
        self.batch = self.size * draw(st.sampled_from([1, 2, 3]), "groups in a batch")
        self.offline = draw(st.integers(0, 5), "offline") == 0
        self.tasks = make_tasks(draw, self.batch, self.offline)
        self.fair = Fair(self.run, self.tasks, self.size)
        self.sessions = [self.run.join(f"worker {i}") for i in range(3)]
        limits = cmd.Configure(
            capacity_rows=draw(st.sampled_from([None, self.batch, self.batch + 1, 2 * self.batch + self.size])),
            max_staleness=draw(st.sampled_from([0, 1, 2, 4])),
            steps=draw(st.sampled_from([None, 1, 2, 4])),
        )
        self.run.send(self.sessions[0], limits)
        order = draw(st.permutations(self.tasks), "order of declaration")
        if draw(st.integers(0, 3), "starts from nothing") == 0:
            order = order[: draw(small)]
        for task in order:
            self.run.send(self.sessions[0], cmd.Declare(task=task))
        if len(order) == len(self.tasks):  # a run that is under way
            self.run.send(self.sessions[0], cmd.Publish(version=0, manifest=b"", transport="t", where=b""))
            for session in self.sessions[: draw(st.integers(0, 3))]:
                self.run.send(session, cmd.Loaded(version=0))
            for _ in range(draw(st.integers(0, 4))):
                put = cmd.Put(groups=1, group_size=self.size, columns={"prompt": COLUMN})
                self.run.send(self.sessions[0], put)

    def session(self, at: int) -> int:
        return self.sessions[at % len(self.sessions)]

    @rule(who=small, how=st.sampled_from(["leave", "die"]), back=st.booleans())
    def go(self, who: int, how: str, back: bool) -> None:
        """A session ends; its worker may come back with another, or go on with a dead one."""
        if how == "leave":
            self.run.send(self.session(who), cmd.Leave())
        else:
            self.run.die(self.session(who))
        if back:
            self.sessions[who % len(self.sessions)] = self.run.join(f"worker {who}")

    @rule(which=small, spoil=st.sampled_from(["no", "no", "no", "other", "attempts", "admits", "batch"]))
    def declare(self, which: int, spoil: str) -> None:
        task = self.tasks[which % len(self.tasks)]
        changes: dict[str, dict[str, Any]] = {
            "no": {},
            "other": {"lease_s": 3.0},
            "attempts": {"name": "bad", "max_attempts": 0},
            "admits": {"name": "bad", "admits": True, "batch_rows": self.batch},
            "batch": {"name": "bad", "admits": False, "batch_rows": self.batch * self.size + 1},
        }
        if spoil == "other" and task.name not in self.run.naive.tasks:
            return
        if spoil == "batch" and (self.size == 1 or self.run.naive.last_group_size != self.size):
            return  # it could be right
        fields = {name: getattr(task, name) for name in task.__struct_fields__} | changes[spoil]
        self.run.send(self.session(0), cmd.Declare(task=TaskSpec(**fields)))

    @rule(spoil=st.sampled_from(["steps", "staleness", "capacity", "more", "less"]))
    def configure(self, spoil: str) -> None:
        limits = {
            "steps": cmd.Configure(steps=0),
            "staleness": cmd.Configure(max_staleness=-1, capacity_rows=7),
            "capacity": cmd.Configure(capacity_rows=0),
            "more": cmd.Configure(capacity_rows=3 * self.batch),
            "less": cmd.Configure(capacity_rows=self.batch),
        }
        self.run.send(self.session(0), limits[spoil])

    @rule(
        groups=st.integers(1, 4),
        spoil=st.sampled_from(["no"] * 8 + ["dtype", "empty", "size", "zero", "offline"]),
        key=st.sampled_from(["", "", "a", "b", "c"]),
        wait=waits,
    )
    def put(self, groups: int, spoil: str, key: str, wait: float) -> None:
        columns = {"prompt": COLUMN}
        if spoil == "dtype":
            columns = {"fresh": COLUMN, "prompt": WRONG}
        if spoil == "empty":
            columns = {}
        if spoil == "offline" and self.offline:
            columns |= {"response": COLUMN, "reward": COLUMN}
        if spoil == "dtype" and "prompt" not in self.run.naive.schema:
            return
        size = {"size": self.size + 1, "zero": 0}.get(spoil, self.size)
        command = cmd.Put(groups=groups, group_size=size, columns=columns, key=key, timeout_s=wait)
        self.run.send(self.session(groups), command)

    @rule(who=small, which=small, count=st.sampled_from([0, 1, 1, 2, 3, 6, 9]), wait=waits)
    def lease(self, who: int, which: int, count: int, wait: float) -> None:
        task = self.tasks[which % len(self.tasks)].name
        self.run.send(self.session(who), cmd.Lease(task=task, count=count, timeout_s=wait))

    def _held(self, at: int) -> tuple[int, cmd.Lease, Any] | None:
        leases = list(self.run.ledger.leases.items())
        if not leases:
            return None
        token, lease = leases[at % len(leases)]
        return token, lease, self.run.naive.tasks[lease.task]

    @rule(at=small)
    def complete_all(self, at: int) -> None:
        held = self._held(at)
        if held is not None:
            token, lease, task = held
            self.run.send(lease.session, cmd.Complete(token=token, columns=dict.fromkeys(task.gives, COLUMN)))

    @rule(
        at=small,
        part=st.none() | st.lists(small, max_size=4, unique=True),
        filtered=st.none() | st.lists(st.integers(0, 3), max_size=2, unique=True),
        spoil=st.sampled_from(["no"] * 8 + ["lacks", "dtype", "twice", "odd", "range", "again", "thief"]),
    )
    def complete(self, at: int, part: list[int] | None, filtered: list[int] | None, spoil: str) -> None:
        held = self._held(at)
        if held is None:
            return
        token, lease, task = held
        if part is not None:
            part = sorted({p % len(lease.ids) for p in part})
        count = len(lease.ids) if part is None else len(part)
        if filtered is not None:
            filtered = sorted({f for f in filtered if f < count})
        columns = dict.fromkeys(task.gives, COLUMN)
        if spoil == "lacks":
            columns.pop(next(iter(columns), None), None)
        elif spoil == "dtype":
            columns = {"fresh": COLUMN, "prompt": WRONG, **columns}
        elif spoil == "twice":
            columns["prompt"] = COLUMN
        elif spoil == "range":
            part = [*(part or []), len(lease.ids)]
        elif spoil == "again":
            part = [0, 0]
        index = None if part is None else np.array(part, "<i4").tobytes()
        command = cmd.Complete(
            token=token,
            columns=columns,
            index=b"\0\0\0" if spoil == "odd" else index,
            filtered=None if filtered is None else np.array(filtered, "<i4").tobytes(),
        )
        owner = lease.session
        if spoil == "thief":
            owner = next((s for s in reversed(self.run.naive.loaded) if s != owner), 10**6)
        self.run.send(owner, command)

    @rule(at=st.integers(0, 30), what=st.sampled_from(["complete", "filter", "give back", "renew"]))
    def use_any_token(self, at: int, what: str) -> None:
        """One that ever was; stale, more often than not."""
        if not self.run.tokens:
            return
        session, token = self.run.tokens[at % len(self.run.tokens)]
        commands = {
            "complete": cmd.Complete(token=token, columns={"response": COLUMN}),
            "filter": cmd.Complete(token=token, columns={}, filtered=np.zeros(1, "<i4").tobytes()),
            "give back": cmd.GiveBack(token=token),
            "renew": cmd.Renew(token=token),
        }
        stale = token not in self.run.ledger.leases
        outcome = self.run.send(session, commands[what])  # the harness sees to it that an error has no effect
        assert not stale or isinstance(outcome, LeaseLost)

    @rule(who=small, which=small, count=st.integers(1, 9))
    def lease_at_once(self, who: int, which: int, count: int) -> None:
        """Once more, as nothing happens without leases; by a worker that loads what it is told to."""
        task = self.tasks[which % len(self.tasks)].name
        outcome = self.run.send(self.session(who), cmd.Lease(task=task, count=count))
        if isinstance(outcome, cmd.LoadFirst):
            self.run.send(self.session(who), cmd.Loaded(version=outcome.version))
            self.run.send(self.session(who), cmd.Lease(task=task, count=count))

    @rule(at=small, part=st.none() | st.lists(small, max_size=3, unique=True), blame=st.booleans())
    def give_back(self, at: int, part: list[int] | None, blame: bool) -> None:
        held = self._held(at)
        if held is None:
            return
        token, lease, _ = held
        index = None
        if part is not None:
            index = np.array(sorted({p % len(lease.ids) for p in part}), "<i4").tobytes()
        self.run.send(lease.session, cmd.GiveBack(token=token, index=index, blame=blame))

    @rule(seconds=st.sampled_from([0.0, 1.0, 3.0, 5.0, 9.0, 21.0]))
    def pass_time(self, seconds: float) -> None:
        self.run.pass_time(seconds)

    @rule(who=small, by=st.sampled_from([0, 1, 1, 1, 2, 5]))
    def publish(self, who: int, by: int) -> None:
        version = max(self.run.naive.version + by, 0)
        self.run.send(
            self.session(who), cmd.Publish(version=version, manifest=b"m%d" % version, transport="t", where=b"")
        )

    @rule(who=small, lag=st.sampled_from([-1, 0, 0, 0, 1, 2]))
    def loaded(self, who: int, lag: int) -> None:
        self.run.send(self.session(who), cmd.Loaded(version=self.run.naive.version - lag))

    @rule(who=small, lag=st.sampled_from([0, 0, 1]), wait=waits)
    def await_version(self, who: int, lag: int, wait: float) -> None:
        after = self.run.naive.version - lag
        self.run.send(self.session(who), cmd.AwaitVersion(after=after, timeout_s=wait))

    @rule(who=small, wait=waits)
    def wanted(self, who: int, wait: float) -> None:
        self.run.send(self.session(who), cmd.Wanted(timeout_s=wait))

    @rule(cancel=st.booleans(), really=st.integers(0, 9))
    def end(self, cancel: bool, really: int) -> None:
        if really == 0:
            self.run.send(self.session(0), cmd.End(cancel=cancel))

    @rule(at=small)
    def forget(self, at: int) -> None:
        if self.run.naive.parked:
            self.run.forget(self.run.naive.parked[at % len(self.run.naive.parked)].ticket)

    @rule()
    def look(self) -> None:
        self.run.send(self.session(0), cmd.GetAudit())
        self.run.send(self.session(0), cmd.GetStatus())

    @rule(role=small, turns=st.integers(1, 5))
    def work(self, role: int, turns: int) -> None:
        """Fair turns, so that what is random starts from deeper states."""
        name = self.fair.roles[role % len(self.fair.roles)]
        if name == "feeder" or name in self.run.naive.tasks:
            for _ in range(turns):
                self.fair.turn(name)

    @rule(turns=st.integers(1, 4))
    @precondition(lambda self: len(self.run.naive.tasks) == len(self.tasks))
    def work_together(self, turns: int) -> None:
        for _ in range(turns):
            for role in self.fair.roles:
                self.fair.turn(role)

    def teardown(self) -> None:
        if hasattr(self, "fair"):
            self.fair.finish()


LedgerMachine.TestCase.settings = settings(
    max_examples=3000 if LONG else 150,
    stateful_step_count=80 if LONG else 30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestLedger = LedgerMachine.TestCase
