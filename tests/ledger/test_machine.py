"""The ledger as a whole: Hypothesis says what happens next, the naive model says what is right.

``HYPOTHESIS_PROFILE=long pytest tests/ledger`` looks longer.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from ledger_harness import COLUMN, Fair, Harness
from ledger_queue import part, publishing
from naive import PARKED

from asyncflow_sdk.errors import LeaseLost
from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.ledger.commands import SamplerSpec
from asyncflow_sdk.types import ColumnSpec

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
WRONG = ColumnSpec("fixed", "float32")
small = st.integers(0, 7)
waits = st.sampled_from([0.0, 0.0, 4.0, 40.0])
wheres = st.sampled_from([None, None, None, None, "", "eval"])
ORDINARY = {"prompt": COLUMN}


def one_in(n: int) -> st.SearchStrategy[bool]:
    return st.integers(0, n - 1).map(lambda drawn: drawn == n - 1)


def samplers(column: str) -> st.SearchStrategy[SamplerSpec | None]:
    known = [
        SamplerSpec("whole_groups"),
        SamplerSpec("shuffled", {"seed": 1, "window": 3}),
        SamplerSpec("length_bucketed", {"column": column, "window": 4}),
        SamplerSpec("token_balanced", {"column": column}),
    ]
    return st.sampled_from([None, None, None, *known])


def make_tasks(draw: Any, batch_rows: int) -> list[TaskSpec]:
    """A pipeline: rollout, perhaps a reward and a side task, and train (or, without steps, a plain end)."""
    trains = not draw(one_in(6), "without steps")
    reward_of = draw(st.sampled_from([None, "response", "prompt"]), "what is rewarded")
    side = draw(st.sampled_from([None, (), ("score",)]), "side task gives")
    attempts = draw(st.sampled_from([1, 2, 3]), "attempts")
    admits = trains and not draw(one_in(6), "without admission")
    evaluates = draw(one_in(2), "evaluates")
    both = ("", "eval") if evaluates else ("",)
    tasks = [
        TaskSpec(
            name="rollout", needs=("prompt",), gives=("response",), lease_s=10, max_attempts=attempts, admits=admits,
            partitions=both,
        )
    ]  # fmt: skip
    if evaluates:
        tasks.append(TaskSpec(name="score", needs=("response",), lease_s=9, partitions=("eval",)))
    if reward_of is not None:
        every = draw(st.sampled_from([("",), ("*",)]), "reward takes")
        spec = TaskSpec(
            name="reward", needs=(reward_of,), gives=("reward",), lease_s=6, max_attempts=2, partitions=every
        )
        tasks.append(msgspec.structs.replace(spec, sampler=draw(samplers(reward_of), "reward's sampler")))
    if side is not None:
        spec = TaskSpec(name="side", needs=("prompt",), gives=side, lease_s=8, max_attempts=attempts, partitions=both)
        tasks.append(msgspec.structs.replace(spec, sampler=draw(samplers("prompt"), "side's sampler")))
    needs = {None: ("response",), "response": ("response", "reward"), "prompt": ("reward",)}[reward_of]
    tasks.append(TaskSpec(name="train", needs=needs, lease_s=20, batch_rows=batch_rows if trains else None))
    return tasks


class LedgerMachine(RuleBasedStateMachine):
    """Leases are taken, kept, and ended in many ways; what is rarer shares one rule, ``now_and_then``."""

    @initialize(data=st.data())
    def begin(self, data: Any) -> None:
        draw = data.draw
        self.run = Harness()
        self.size = draw(st.sampled_from([1, 2, 3]), "group size")
        self.batch = self.size * draw(st.sampled_from([1, 2, 3]), "groups in a batch")
        self.tasks = make_tasks(draw, self.batch)
        self.fair = Fair(self.run, self.tasks, self.size, team=draw(one_in(3), "ranks train"))
        self.sessions = [self.run.join(f"worker {i}") for i in range(3)]
        limits = cmd.Configure(
            capacity_rows=draw(st.sampled_from([None, 4 * self.batch, self.batch + 1, self.batch]), "capacity"),
            max_staleness=draw(st.sampled_from([0, 1, 2, 4]), "max_staleness"),
            steps=draw(st.sampled_from([None, 6, 3, 2]), "steps"),
            capacity_bytes=draw(st.sampled_from([None, None, 600, 60]), "bytes"),
            row_bytes=draw(st.sampled_from([None, None, 10]), "bytes of a row"),
            keep_versions=draw(st.sampled_from([None, 1, 3, 4]), "versions kept"),
            max_swapping=draw(st.sampled_from([None, None, 1, 2]), "replicas that load at once"),
            quorum=draw(st.sampled_from([None, None, None, 1, 2, 3]), "quorum"),
        )
        self.run.send(self.sessions[0], limits)
        order = draw(st.permutations(self.tasks), "order of declaration")
        if draw(one_in(5), "starts from nothing"):
            order = order[: draw(small)]
        for task in order:
            self.run.send(self.sessions[0], cmd.Declare(task=task))
        if len(order) == len(self.tasks):  # a run that is under way
            for command in publishing(0)[: draw(st.sampled_from([3, 4]))]:
                self.run.send(self.sessions[0], command)
            for session in self.sessions[: draw(st.integers(0, 3))]:
                self.run.send(session, cmd.Loaded(version=0))
            for _ in range(draw(st.integers(0, 6))):
                self.run.send(self.sessions[0], cmd.Put(groups=1, group_size=self.size, columns=ORDINARY))

    def session(self, at: int) -> int:
        return self.sessions[at % len(self.sessions)]

    def _held(self, at: int) -> tuple[int, Any, TaskSpec] | None:
        leases = list(self.run.ledger.leases.items())
        if not leases:
            return None
        token, lease = leases[at % len(leases)]
        return token, lease, self.run.naive.tasks[lease.task]

    # ---- leases

    @rule(
        who=small,
        which=small,
        count=st.sampled_from([0, 1, 1, 2, 3, 6, 9]),
        at_least=st.sampled_from([0, 0, 1, 2, 3, 5, -1]),
        wait=waits,
        where=wheres,
    )
    def lease(self, who: int, which: int, count: int, at_least: int, wait: float, where: str | None) -> None:
        task = self.tasks[which % len(self.tasks)].name
        command = cmd.Lease(task=task, count=count, timeout_s=wait, at_least=at_least, partition=where)
        self.run.send(self.session(who), command)

    @rule(who=small, count=st.integers(1, 9), wait=waits, loads=st.booleans())
    def lease_what_there_is(self, who: int, count: int, wait: float, loads: bool) -> None:
        """Of each task in turn, until something comes of it."""
        for task in self.run.naive.tasks:
            outcome = self.run.send(self.session(who), cmd.Lease(task=task, count=count))
            if isinstance(outcome, cmd.LoadFirst) and loads:
                self.run.send(self.session(who), cmd.Loaded(version=outcome.version))
                outcome = self.run.send(self.session(who), cmd.Lease(task=task, count=count))
            if isinstance(outcome, cmd.Leased):
                break

    @rule(
        who=small,
        which=small,
        count=st.sampled_from([2, 4, 4, 5]),
        size=st.sampled_from([2, 2, 2, 3]),
        shards=st.sampled_from([0, 0, 1]),
        ranks=st.sampled_from([[0, 1], [1, 0], [1, 0], [0], [1], [0, 1, 2], [2, 1, 0]]),
        spoil=st.sampled_from(["no"] * 9 + ["rank", "shards", "name"]),
        wait=st.sampled_from([0.0, 4.0, 40.0, 40.0]),
        words=st.booleans(),
    )
    def lease_as_a_team(
        self, who: int, which: int, count: int, size: int, shards: int, ranks: list[int], spoil: str, wait: float,
        words: bool,
    ) -> None:  # fmt: skip
        task = self.tasks[which % len(self.tasks)].name
        for number, rank in enumerate(ranks):
            if rank < size or spoil == "rank":
                command = cmd.Lease(
                    task=task, count=count, timeout_s=wait, team="" if spoil == "name" else "t", rank=rank,
                    world_size=size, shards=5 if spoil == "shards" else shards,
                )  # fmt: skip
                self.run.send(self.session(who + number), command)
        crews = [lease for lease in self.run.ledger.leases.values() if lease.crew is not None]
        if words and crews:
            lease = crews[-1]
            columns = dict.fromkeys(self.run.naive.tasks[lease.task].gives, COLUMN)
            for rank in ranks[: lease.crew.size]:
                done = cmd.Complete(token=lease.token, columns=columns, rank=rank)
                self.run.send(lease.session_of(rank % lease.crew.size), done)

    @rule(at=small)
    def complete_all(self, at: int) -> None:
        held = self._held(at)
        if held is not None:
            token, lease, task = held
            for rank in range(1 if lease.crew is None else lease.crew.size):
                if token in self.run.ledger.leases:
                    done = cmd.Complete(token=token, columns=dict.fromkeys(task.gives, COLUMN), rank=rank)
                    self.run.send(lease.session_of(rank), done)

    @rule(
        at=small,
        part=st.none() | st.lists(small, max_size=4, unique=True),
        filtered=st.none() | st.lists(st.integers(0, 3), max_size=2, unique=True),
    )
    def complete_in_part(self, at: int, part: list[int] | None, filtered: list[int] | None) -> None:
        self._complete(at, part, filtered, "no")

    @rule(
        at=small,
        part=st.none() | st.lists(small, max_size=4, unique=True),
        spoil=st.sampled_from(["lacks", "dtype", "twice", "odd", "range", "below", "again", "thief"]),
    )
    def complete_wrongly(self, at: int, part: list[int] | None, spoil: str) -> None:
        self._complete(at, part, None, spoil)

    def _complete(self, at: int, part: list[int] | None, filtered: list[int] | None, spoil: str) -> None:
        held = self._held(at)
        if held is None:
            return
        token, lease, task = held
        rank = at % (1 if lease.crew is None else lease.crew.size)
        rows = len(lease.part(rank))
        if part is not None:
            part = sorted({p % rows for p in part}) if rows else []
        count = rows if part is None else len(part)
        if filtered is not None:
            filtered = sorted({f for f in filtered if f < count})
        columns = dict.fromkeys(task.gives, COLUMN)
        if spoil == "lacks":
            columns.pop(next(iter(columns), None), None)
        elif spoil == "dtype":
            columns = {"fresh": COLUMN, "prompt": WRONG, **columns}
        elif spoil == "twice":
            columns["prompt"] = COLUMN
        elif spoil in ("range", "below", "again"):
            part = [*(part or []), *{"range": [rows], "below": [-1], "again": [0, 0]}[spoil]]
        index = None if part is None else np.array(part, "<i4").tobytes()
        command = cmd.Complete(
            token=token,
            columns=columns,
            index=b"\0\0\0" if spoil == "odd" else index,
            filtered=None if filtered is None else np.array(filtered, "<i4").tobytes(),
            rank=rank,
        )
        owner = lease.session_of(rank)
        if spoil == "thief":
            owner = next((s for s in reversed(self.run.naive.loaded) if s != owner), 10**6)
        self.run.send(owner, command)

    @rule(at=small, part=st.none() | st.lists(small, max_size=3, unique=True), blame=st.booleans())
    def give_back(self, at: int, part: list[int] | None, blame: bool) -> None:
        held = self._held(at)
        if held is None:
            return
        token, lease, _ = held
        rank = at % (1 if lease.crew is None else lease.crew.size)
        rows = len(lease.part(rank))
        index = None
        if part is not None:
            index = np.array(sorted({p % rows for p in part} if rows else []), "<i4").tobytes()
        self.run.send(lease.session_of(rank), cmd.GiveBack(token=token, index=index, blame=blame, rank=rank))

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

    @rule(seconds=st.sampled_from([0.0, 1.0, 3.0, 5.0, 9.0, 21.0]))
    def pass_time(self, seconds: float) -> None:
        self.run.pass_time(seconds)

    # ---- rows and versions

    @rule(
        groups=st.integers(1, 4),
        spoil=st.sampled_from(["no"] * 8 + ["dtype", "empty", "size", "zero", "complete"]),
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
        command = cmd.Put(
            groups=groups, group_size=size, columns=columns, key=key, timeout_s=wait, priority=priority,
            partition=where, nbytes=nbytes,
        )  # fmt: skip
        self.run.send(self.session(groups), command)

    @rule(who=small, what=st.sampled_from(["publish", "publish", "load", "load", "await"]), by=small, wait=waits)
    def handle_versions(self, who: int, what: str, by: int, wait: float) -> None:
        current = self.run.naive.version
        if what == "publish":
            version = max(current + [1, 1, 1, 2, 5, 0, 1, 1][by], 0)
            for command in publishing(version):
                self.run.send(self.session(who), command)
            return
        if what == "load":
            command: Any = cmd.Loaded(version=current - [0, 0, 0, 1, 2, -1, 0, 1][by])
        else:
            command = cmd.AwaitVersion(after=current - by // 4, timeout_s=wait)
        self.run.send(self.session(who), command)

    @rule(
        who=small,
        what=st.sampled_from(["open", "announce", "publish", "publish", "withdraw", "close", "all ranks"]),
        rank=st.sampled_from([0, 0, 1, 1, 2, -1]),
        size=st.sampled_from([2, 2, 2, 1]),
        by=small,
        outlives=st.booleans(),
        wait=waits,
    )
    def publish_in_parts(
        self, who: int, what: str, rank: int, size: int, by: int, outlives: bool, wait: float
    ) -> None:  # fmt: skip
        """Ranks of a publisher say this and that, in any order; or all that is needed, but for what one may leave out."""
        coming = self.run.naive.coming
        version = coming.version if coming is not None and by < 6 else self.run.naive.version + 1 + by // 6
        share = part(version, max(rank, 0), outlives=outlives)
        commands: dict[str, Any] = {
            "open": cmd.OpenPublisher(rank=rank, world_size=size),
            "announce": cmd.Announce(version=version, timeout_s=wait),
            "publish": cmd.Publish(version=version, part=share, probe=b"p" * (rank == 0)),
            "withdraw": cmd.Withdraw(version=version, reason="why not"),
            "close": cmd.ClosePublisher(),
        }
        if what != "all ranks":
            self.run.send(self.session(who), commands[what])
            return
        for each in range(size):
            session = self.session(who + each)
            self.run.send(session, cmd.OpenPublisher(rank=each, world_size=size))
            self.run.send(session, commands["announce"])
        for each in range(size - (by == 3)):
            share = part(version, each, outlives=outlives)
            self.run.send(self.session(who + each), cmd.Publish(version=version, part=share))

    @rule(
        who=small,
        what=st.sampled_from(["fetch", "stage", "stage", "swap", "swap", "load", "fail", "retire", "whole"]),
        by=st.sampled_from([0, 0, 0, 0, 1, 2, -1]),
        wait=waits,
    )
    def be_a_replica(self, who: int, what: str, by: int, wait: float) -> None:
        version, session = self.run.naive.version - by, self.session(who)
        commands: dict[str, Any] = {
            "fetch": cmd.AwaitVersion(after=version - 1, timeout_s=wait),
            "stage": cmd.Staged(version=version, skipped=by > 0, moved=7, encoding="full"),
            "swap": cmd.Swap(
                version=self.run.naive.staged.get(session, version) if by < 2 else version, timeout_s=wait
            ),
            "load": cmd.Loaded(version=version),
            "fail": cmd.NotLoaded(version=version, reason="it would not"),
            "retire": cmd.Retire(),
        }
        for step in ("fetch", "stage", "swap", "load") if what == "whole" else (what,):
            if self.run.send(session, commands[step]) == PARKED:
                break

    @rule(
        who=small,
        ahead=st.sampled_from([0, 1, 1, 2, 3]),
        loads=st.booleans(),
        works=st.integers(0, 3),
        announces=one_in(4),
        back=st.sampled_from([1, 1, 1, 2, 3, 0, -1]),
    )
    def roll_back(self, who: int, ahead: int, loads: bool, works: int, announces: bool, back: int) -> None:
        """To a version before those that are published here; replicas may have begun with them."""
        for _ in range(ahead):
            for session in list(self.run.naive.ranks.values()):
                self.run.send(session, cmd.ClosePublisher())
            for command in publishing(self.run.naive.version + 1)[:3]:
                self.run.send(self.session(who), command)
            if loads:
                self.run.send(self.session(who + 1), cmd.Loaded(version=self.run.naive.version))
            for at in range(works if "rollout" in self.run.naive.tasks else 0):
                put = cmd.Put(groups=2, group_size=self.size, columns=ORDINARY)
                self.run.send(self.session(who), put)
                got = self.run.send(self.session(who + 1), cmd.Lease(task="rollout", count=self.size + 1))
                if isinstance(got, cmd.Leased) and at:  # in part, perhaps with what it loads meanwhile
                    index = np.arange(max(len(cmd.unpack_ids(got.ids)) - works // 2, 1), dtype="<i4").tobytes()
                    self.run.send(self.session(who + 1), cmd.Loaded(version=self.run.naive.version))
                    done = cmd.Complete(token=got.token, columns={"response": COLUMN}, index=index)
                    self.run.send(self.session(who + 1), done)
        if announces:
            self.run.send(self.session(who), cmd.Announce(version=self.run.naive.version + 1))
        kept = [version.version for version in self.run.naive.kept]
        version = kept[max(-1 - back, -len(kept))] if kept and back >= 0 else self.run.naive.version - back
        self.run.send(self.session(who), cmd.Rollback(version=version, reason="it diverged"))

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
            self._declare(at, data.draw(st.sampled_from(["no", "no", "no", "other", "attempts", "admits", "batch"])))
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
            self.run.send(self.session(0), cmd.Dismiss(session=self.session(at)))
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
            cmd.Configure(steps=0),
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
TestLedger = pytest.mark.timeout(3600 if LONG else 300)(LedgerMachine.TestCase)
