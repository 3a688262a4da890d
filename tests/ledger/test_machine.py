"""The ledger as a whole: Hypothesis says what happens next, ``CheckedLedger`` checks what must hold whatever happens.

``HYPOTHESIS_PROFILE=long pytest tests/ledger`` looks longer.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from ledger_queue import TOKENS, Queue, ids, packed, part, publishing
from schedules import LONG

from asyncflow_sdk.errors import AsyncFlowError, Ended, LeaseLost
from asyncflow_sdk.interfaces.store import HomeOffer
from asyncflow_sdk.ledger import TaskSpec, pack_ids
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types import ColumnSpec
from asyncflow_sdk.types.tasks import PolicySpec, SamplerSpec

pytestmark = pytest.mark.fast
WRONG = ColumnSpec("fixed", "float32")
ORDINARY = {"prompt": TOKENS}
small = st.integers(0, 7)
waits = st.sampled_from([0.0, 0.0, 4.0, 40.0])
wheres = st.sampled_from([None, None, None, None, "", "eval"])
positions = st.none() | st.lists(small, max_size=4, unique=True)


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
    trains = draw(st.sampled_from([True] * 5 + [False]), "steps")
    reward_of = draw(st.sampled_from([None, "response", "prompt"]), "what is rewarded")
    side = draw(st.sampled_from([None, (), ("score",)]), "side task gives")
    attempts = draw(st.sampled_from([1, 2, 3]), "attempts")
    admits = trains and draw(st.sampled_from([True] * 5 + [False]), "admission")
    both = draw(st.sampled_from([("",), ("", "eval")]), "partitions")
    shared = {"max_attempts": attempts, "partitions": both}
    tasks = [TaskSpec(name="rollout", needs=("prompt",), gives=("response",), lease_s=10, admits=admits, **shared)]
    if "eval" in both:
        tasks.append(TaskSpec(name="score", needs=("response",), lease_s=9, partitions=("eval",)))
    if reward_of is not None:
        every, sampler = draw(st.sampled_from([("",), ("*",)])), draw(samplers(reward_of))
        tasks.append(
            TaskSpec(
                name="reward",
                needs=(reward_of,),
                gives=("reward",),
                lease_s=6,
                max_attempts=2,
                partitions=every,
                sampler=sampler,
            )
        )
    if side is not None:
        tasks.append(
            TaskSpec(
                name="side", needs=("prompt",), gives=side, lease_s=8, sampler=draw(samplers("prompt")), **shared
            )
        )
    needs = {None: ("response",), "response": ("response", "reward"), "prompt": ("reward",)}[reward_of]
    return [*tasks, TaskSpec(name="train", needs=needs, lease_s=20, batch_rows=batch_rows if trains else None)]


class LedgerMachine(RuleBasedStateMachine):
    """A run whose pipeline, limits and first rows are drawn; then sessions send whatever they like."""

    @initialize(data=st.data())
    def begin(self, data: Any) -> None:
        draw = data.draw
        self.queue = Queue(options={"initial_rows": 8})
        self.size = draw(st.sampled_from([1, 2, 3]), "group size")
        self.batch = self.size * draw(st.sampled_from([1, 2, 3, 5]), "groups in a batch")
        self.tasks = make_tasks(draw, self.batch)
        self.sessions = [self.queue.join(f"worker {i}") for i in range(3)]
        limits = cmd.Configure(
            capacity_rows=draw(st.sampled_from([None, 4 * self.batch, self.batch + 1, self.batch]), "capacity"),
            max_staleness=draw(st.sampled_from([0, 1, 2, 4]), "max_staleness"),
            steps=draw(st.sampled_from([None, 6, 3, 2]), "steps"),
            staleness=draw(st.sampled_from([None, None, PolicySpec("drop"), PolicySpec("count")]), "policy"),
            capacity_bytes=draw(st.sampled_from([None, None, 600, 60]), "bytes"),
            checkpoints=draw(st.sampled_from([None, None, True]), "checkpoints"),
            row_bytes=draw(st.sampled_from([None, None, 10]), "bytes of a row"),
            keep_versions=draw(st.sampled_from([None, 1, 3, 4]), "versions kept"),
            max_swapping=draw(st.sampled_from([None, None, 1, 2]), "replicas that load at once"),
            quorum=draw(st.sampled_from([None, None, None, 1, 2, 3]), "quorum"),
            home_silence_s=draw(st.sampled_from([None, 5.0, 0.0]), "silence of a home"),
        )
        self.send(0, limits)
        self.contents = Counter[str]()
        for name in "abc"[: draw(st.sampled_from([0, 1, 2, 3]), "homes")]:
            self.open_home(self.queue.join(f"unit {name}"), name)
        order = draw(st.permutations(self.tasks), "order of declaration")
        order = order[: draw(st.sampled_from([9, 9, 9, 9, 0, 1, 2, 3]), "declared")]
        for task in order:
            self.send(0, cmd.Declare(task=task))
        if len(order) == len(self.tasks):  # a run that is under way
            for command in publishing(0)[: draw(st.sampled_from([3, 4]))]:
                self.send(0, command)
            for at in range(draw(st.integers(0, 3))):
                self.send(at, cmd.ReportLoaded(version=0))
            for _ in range(draw(st.integers(0, 6))):
                self.send(0, cmd.AddRows(groups=1, group_size=self.size, columns=ORDINARY))

    def session(self, at: int) -> int:
        return self.sessions[at % len(self.sessions)]

    def send(self, at: int, command: Any) -> Any:
        return self.queue.send(self.session(at), command)

    @property
    def version(self) -> int:
        return self.queue.version

    @invariant()
    def all_is_as_it_is_known_to_be(self) -> None:
        if hasattr(self, "queue"):
            self.queue.check()

    # ---- fair turns: from any state they bring the run to its end, or it is a deadlock

    def as_admin(self, command: Any) -> Any:
        return self.queue.send(self.queue.admin, command)

    def take_turns(self, *, train: bool = True) -> bool:
        """One turn of a feeder and of a worker of each task, perhaps not of a trainer. Returns True if any made progress."""
        put = cmd.AddRows(groups=1, group_size=self.size, columns=ORDINARY)
        wanted = isinstance(self.as_admin(cmd.AwaitRowsWanted()), cmd.RowsWanted)
        fed = wanted and isinstance(self.as_admin(put), cmd.PutDone)
        tasks = [task for task in self.tasks if task.name in self.queue.tasks and (train or task.name != "train")]
        return any([fed, *(self.queue.take_turn(task) for task in tasks)])

    def cover(self) -> bool:
        """Make a checkpoint of all that is acknowledged. Returns True if it makes anything final."""
        cut = self.as_admin(cmd.GetTrainingPosition())
        due = cut.checkpoints and cut.step > cut.covered
        return due and self.as_admin(cmd.AddCheckpoint(step=cut.step, covers=cut.step)) == cmd.Done()

    def teardown(self) -> None:
        if not hasattr(self, "tasks"):
            return
        queue, status = self.queue, self.queue.status
        declared = [self.as_admin(cmd.Declare(task=task)) for task in self.tasks]
        give_up = any(isinstance(reply, AsyncFlowError) for reply in declared)
        unlimited = status().step < 0 or status().steps is None
        for count in range(400):
            if give_up or (unlimited and count == 2):
                self.as_admin(cmd.End(cancel=give_up))
                give_up = unlimited = False
            if not queue.live and status().over:
                break
            if self.take_turns() or self.cover():
                continue
            deadline = queue.next_deadline()
            if deadline is not None:
                queue.at(max(deadline, queue.now))
            else:
                assert not status().over, f"deadlock: {status()}"
                self.as_admin(cmd.End())
        assert not queue.live, f"no end in 400 rounds: {status()}"
        queue.check()
        assert all(isinstance(self.as_admin(cmd.LeaseRows(task=task, count=1)), Ended) for task in queue.tasks)

    # ---- time, sessions, and what goes on by itself

    @rule(seconds=st.sampled_from([0.0, 1.0, 3.0, 5.0, 9.0, 21.0]))
    def pass_time(self, seconds: float) -> None:
        self.queue.at(self.queue.now + seconds)

    @rule(which=small, turns=st.integers(1, 3))
    def go_on_fairly(self, which: int, turns: int) -> None:
        """Fair turns, so that the other rules start from deeper states."""
        task = self.tasks[which % len(self.tasks)]
        for _ in range(turns):
            if which == 7:
                self.take_turns()
            elif task.name in self.queue.tasks:
                self.queue.take_turn(task)

    @rule(at=small, how=st.sampled_from(["leaves", "dies", "is dismissed", "is declared dead"]), back=st.booleans())
    def end_session(self, at: int, how: str, back: bool) -> None:
        session = self.session(at)
        if how == "leaves":
            self.send(at, cmd.CloseSession())
        elif how == "dies":
            self.queue.die(session)
        elif session in self.queue.sessions:
            reason = "its process ended" if how == "is declared dead" else ""
            self.send(at + 1, cmd.Dismiss(name=self.queue.sessions[session].name, ended=reason))
        if back or how.startswith("is"):
            self.sessions[at % len(self.sessions)] = self.queue.join(f"worker {at}")

    @rule(at=small, what=st.sampled_from(["forget", "wanted", "feeds", "has fed", "look", "await lost"]), wait=waits)
    def ask(self, at: int, what: str, wait: float) -> None:
        if what == "forget" and self.queue.waiting:
            self.queue.forget(list(self.queue.waiting)[at % len(self.queue.waiting)])
        elif what in ("wanted", "feeds", "has fed"):
            prefix = "" if what == "wanted" else "k-"
            self.send(at, cmd.AwaitRowsWanted(timeout_s=wait, prefix=prefix, more=what != "has fed"))
        elif what == "await lost":
            self.send(at, cmd.AwaitLost(timeout_s=40.0))
        elif what == "look" and self.session(at) in self.queue.sessions:
            assert self.send(at, cmd.GetAudit()) == self.queue.audit()
            assert self.send(at, cmd.GetStatus()) == self.queue.status()

    # ---- homes

    def open_home(self, session: int, name: str) -> Any:
        identity = f"{name}{self.contents[name]}"
        return self.queue.send(session, cmd.OpenHome(offer=HomeOffer(store="hosts", name=name, identity=identity)))

    @rule(
        name=st.sampled_from("aabc"), who=small, turns=st.integers(0, 2),
        what=st.sampled_from(["opens", "opens", "returns", "is wiped", "dies", "dies", "all die", "is evicted", "is evicted", "a stale epoch", "a worker opens it", "dies and returns"]),
    )  # fmt: skip
    def handle_home(self, name: str, who: int, turns: int, what: str) -> None:
        """A unit comes and goes, or its home is given up, while the others work."""
        for _ in range(turns):
            self.take_turns()
        number = next((number for number, home in self.queue.homes.items() if home.name == name), 0)
        home = self.queue.homes.get(number)
        if what in ("dies", "dies and returns") and home is not None and home.unit is not None:
            self.queue.die(home.unit)
        for other in self.queue.homes.values() if what == "all die" else ():
            if other.unit is not None:
                self.queue.die(other.unit)
        if what == "is wiped":
            self.contents[name] += 1
        if what in ("opens", "returns", "is wiped", "dies and returns"):
            unit = (
                home.unit
                if home is not None and home.unit is not None and who % 2
                else self.queue.join(f"unit {name}")
            )
            reply = self.open_home(unit, name)
            assert isinstance(reply, cmd.HomeOpened) or what in ("is wiped", "opens"), reply
        elif what == "a worker opens it":
            self.open_home(self.session(who), name)
        elif what == "is evicted":
            reply = self.as_admin(
                cmd.EvictHome(home=number, epoch=0 if home is None else home.epoch, reason="it burns")
            )
            assert isinstance(reply, cmd.Done | AsyncFlowError)
        elif what == "a stale epoch":
            stale = cmd.EvictHome(home=number, epoch=-1 if home is None else home.epoch - 1)
            assert isinstance(self.as_admin(stale), AsyncFlowError)

    @rule(at=small, turns=st.integers(1, 4), back=st.sampled_from([True, True, False]))
    def lose_home(self, at: int, turns: int, back: bool) -> None:
        """One with rows, at some stage of their way."""
        for _ in range(turns):
            self.take_turns(train=at < 6)
        live = list(self.queue.live_homes().items())
        if live:
            number, home = live[at % len(live)]
            assert self.as_admin(cmd.EvictHome(home=number, epoch=home.epoch)) == cmd.Done()
            if back:
                self.open_home(self.queue.join(f"unit {home.name}"), home.name)

    @rule(at=small, end=st.booleans(), cancel=st.booleans(), where=wheres)
    def end_stream(self, at: int, end: bool, cancel: bool, where: str | None) -> None:
        if end and at == 0:
            self.send(at, cmd.End(cancel=cancel, partition=where))

    # ---- declarations and limits

    @rule(which=small, spoil=st.sampled_from(["no", "no", "no", "other", "attempts", "admits", "batch", "circle"]))
    def declare(self, which: int, spoil: str) -> None:
        task = self.tasks[which % len(self.tasks)]
        changes: dict[str, dict[str, Any]] = {
            "no": {},
            "other": {"lease_s": 3.0},
            "attempts": {"name": "bad", "max_attempts": 0},
            "admits": {"name": "bad", "admits": True, "batch_rows": self.batch},
            "circle": {"name": "bad", "needs": (*task.needs, *task.gives), "gives": task.needs},
            "batch": {"name": "bad", "batch_rows": 0},
        }
        if spoil != "other" or task.name in self.queue.tasks:
            reply = self.send(0, cmd.Declare(task=msgspec.structs.replace(task, **changes[spoil])))
            assert spoil == "no" or isinstance(reply, Exception), reply

    @rule(at=small)
    def configure(self, at: int) -> None:
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
        reply = self.send(0, limits[at])
        assert at >= 3 or isinstance(reply, Exception), reply

    # ---- rows

    @rule(
        groups=st.integers(1, 4),
        spoil=st.sampled_from(["no"] * 8 + ["dtype", "empty", "size", "zero", "complete", "values", "digest"]),
        key=st.sampled_from(["", "", "a", "k-0", "k-1"]),
        priority=st.sampled_from([0, 0, 0, 3, -2]),
        wait=waits,
        where=st.sampled_from(["", "", "eval"]),
        nbytes=st.sampled_from([0, 0, 7, 40]),
    )
    def put(self, groups: int, spoil: str, key: str, priority: int, wait: float, where: str, nbytes: int) -> None:
        columns = {
            "dtype": {"fresh": TOKENS, "prompt": WRONG}, "empty": {},
            "complete": {"prompt": TOKENS, "response": TOKENS, "reward": TOKENS},
        }.get(spoil, ORDINARY)  # fmt: skip
        if spoil == "dtype" and not self.queue.rows:
            return
        size = {"size": self.size + 1, "zero": 0}.get(spoil, self.size)
        if "score" not in {task.name for task in self.tasks}:
            where = ""  # nobody would ever take them
        groups = {"a": 1, "b": 2}.get(key, groups)  # so that a key often comes again as it was
        digest = (b"\1" if spoil == "values" else b"\0") * 16 * len(columns) if key else b""
        command = cmd.AddRows(
            groups=groups, group_size=size, columns=columns, key=key, timeout_s=wait, priority=priority,
            partition=where, nbytes=nbytes, digest=digest + b"\0" * (spoil == "digest"),
        )  # fmt: skip
        reply = self.send(groups, command)
        assert spoil not in ("dtype", "empty", "zero", "digest") or isinstance(reply, Exception), reply

    @rule(at=small, how=st.sampled_from(["rows", "rows", "key", "partition", "nothing"]))
    def cancel(self, at: int, how: str) -> None:
        which: dict[str, dict[str, Any]] = {
            "rows": {"ids": pack_ids(np.array([at, 3 * at]))},
            "key": {"key": "ab"[at % 2]},
            "partition": {"partition": "eval"},
            "nothing": {},
        }
        self.send(at, cmd.Cancel(**which[how]))

    @rule(share=st.sets(small, min_size=1, max_size=3), happens=st.sampled_from([False] * 7 + [True]))
    def lose_payload(self, share: set[int], happens: bool) -> None:
        live = sorted(self.queue.live)
        if happens and live:
            self.queue.lose(*sorted({live[at % len(live)] for at in share}))

    # ---- leases

    @rule(
        who=small, which=small, count=st.sampled_from([0, 1, 1, 2, 3, 6, 9]),
        at_least=st.sampled_from([0, 0, 1, 2, 3, 5, -1]), wait=waits, where=wheres, most=st.sampled_from([0, 0, 4, 9]),
    )  # fmt: skip
    def lease(
        self, who: int, which: int, count: int, at_least: int, wait: float, where: str | None, most: int
    ) -> None:
        task = self.tasks[which % len(self.tasks)].name
        command = cmd.LeaseRows(task=task, count=count, timeout_s=wait, at_least=at_least, partition=where, most=most)
        self.send(who, command)

    @rule(who=small, count=st.integers(1, 9), loads=st.booleans())
    def lease_what_there_is(self, who: int, count: int, loads: bool) -> None:
        """Of each task in turn, until something comes of it."""
        for task in self.queue.tasks:
            reply = self.send(who, cmd.LeaseRows(task=task, count=count))
            if isinstance(reply, cmd.LoadFirst) and loads:
                self.send(who, cmd.ReportLoaded(version=reply.version))
                reply = self.send(who, cmd.LeaseRows(task=task, count=count))
            if isinstance(reply, cmd.Leased):
                break

    @rule(
        who=small, which=small, count=st.sampled_from([2, 4, 4, 5]), size=st.sampled_from([2, 2, 2, 3]),
        shards=st.sampled_from([0, 0, 1, 5]), wait=st.sampled_from([0.0, 4.0, 40.0, 40.0]), works=st.booleans(),
        ranks=st.sampled_from([[0, 1], [1, 0], [1, 0], [0], [1], [0, 1, 2], [2, 1, 0]]),
    )  # fmt: skip
    def lease_as_a_team(
        self, who: int, which: int, count: int, size: int, shards: int, wait: float, works: bool, ranks: list[int]
    ) -> None:
        task = self.tasks[which % len(self.tasks)].name
        for number, rank in enumerate(ranks):
            ask = cmd.LeaseRows(
                task=task, count=count, timeout_s=wait, group="t", rank=rank, world_size=size, shards=shards
            )
            self.send(who + number, ask)
        for token, lease in list(self.queue.open.items())[-1:] if works else ():
            for rank in ranks:
                if rank in lease.sessions:
                    self.complete(token, rank)

    @rule(
        who=small, size=st.sampled_from([1, 1, 2, 2, 3]), shards=st.sampled_from([0, 0, 0, 1]), acks=st.sampled_from([True, True, False]),
        at_least=st.sampled_from([0, 0, 1, 2, 3]), wait=st.sampled_from([0.0, 0.0, 4.0, 40.0]), turns=st.integers(1, 5),
        happens=st.sampled_from(["", "", "", "", "", "", "dies", "leaves", "gives back", "cancels", "expires", "is lost", "renews"]),
    )  # fmt: skip
    def stream_a_step(
        self, who: int, size: int, shards: int, acks: bool, at_least: int, wait: float, turns: int, happens: str
    ) -> None:
        """Lease a step in parts while the others go on, as far as its parts come; perhaps acknowledge it."""
        if "train" not in self.queue.tasks:
            return
        got, token = None, 0
        for turn in range(turns):
            self.take_turns(train=turn + 1 == turns and not token)
            for rank in range(size):
                ask = cmd.LeaseRows(
                    task="train", count=1, parts=True, token=token, at_least=min(at_least, self.batch), timeout_s=wait,
                    group=f"p{who}{size}{shards}", rank=rank, world_size=size, shards=shards,
                )  # fmt: skip
                got = self.send(who + rank, ask)
            if isinstance(got, cmd.LeasedPart):
                token = got.token
            if isinstance(got, cmd.LeasedPart) and got.last:
                break
        if not isinstance(got, cmd.LeasedPart):
            return
        rows = self.queue.leases[token].rows()
        if happens == "dies":
            self.queue.die(self.session(who))
        elif happens == "leaves":
            self.send(who, cmd.CloseSession())
        elif happens == "gives back":
            self.send(who, cmd.GiveBack(token=token, blame=acks))
        elif happens == "cancels":
            self.send(who, cmd.Cancel(ids=pack_ids(np.array(rows[:1]))))
        elif happens == "expires":
            self.queue.at(self.queue.now + 21.0)
        elif happens == "is lost":
            self.queue.lose(*rows[-1:])
        elif happens == "renews":
            self.send(who, cmd.Renew(token=token))
        for rank in range(size if acks else 0):
            reply = self.complete(token, rank, filtered=packed(0) if who == 0 else None)
            fine = happens in ("", "renews") and who and got.last
            assert isinstance(reply, cmd.Completed) or not fine, reply
        if happens in ("dies", "leaves"):
            self.sessions[who % len(self.sessions)] = self.queue.join(f"worker {who}")

    @rule(
        at=small, wait=waits, at_least=st.sampled_from([0, 0, 1, 4]), ranks=st.sampled_from([[0], [0, 1], [1, 0]]),
        spoil=st.sampled_from(["no"] * 7 + ["task", "size", "whole", "thief", "shards", "below"]),
    )  # fmt: skip
    def ask_for_the_next_part(self, at: int, wait: float, at_least: int, ranks: list[int], spoil: str) -> None:
        held = [(token, lease) for token, lease in self.queue.open.items() if lease.parts]
        if not held:
            return
        token, lease = held[at % len(held)]
        changes: dict[str, dict[str, Any]] = {
            "task": {"task": self.tasks[0].name}, "size": {"world_size": lease.world_size + 1, "group": "other"},
            "whole": {"parts": False}, "shards": {"shards": 7}, "below": {"at_least": -1},
        }  # fmt: skip
        for rank in ranks:
            if rank not in lease.sessions:
                continue
            ask = cmd.LeaseRows(
                task="train", count=1, parts=True, token=token, timeout_s=wait, at_least=at_least, rank=rank,
                group=lease.group, world_size=lease.world_size, shards=0 if lease.shards == lease.world_size else lease.shards,
            )  # fmt: skip
            owner = lease.sessions[rank]
            if spoil == "thief":
                owner = next((s for s in reversed(self.queue.sessions) if s != owner), 10**6)
            reply = self.queue.send(owner, msgspec.structs.replace(ask, **changes.get(spoil, {})))
            assert spoil == "no" or isinstance(reply, Exception), reply

    def complete(self, token: int, rank: int, **more: Any) -> Any:
        lease = self.queue.leases[token]
        asked = {"columns": dict.fromkeys(self.queue.tasks[lease.task].gives, TOKENS)} | more
        return self.queue.send(lease.sessions[rank], cmd.Complete(token=token, rank=rank, **asked))

    def held(self, at: int) -> tuple[int, int, int] | None:
        """A token, a rank of its lease, and the number of rows of this rank."""
        if not self.queue.open:
            return None
        token, lease = list(self.queue.open.items())[at % len(self.queue.open)]
        rank = sorted(lease.ids)[at % len(lease.ids)]
        return token, rank, len(lease.ids[rank])

    @rule(at=small)
    def complete_all(self, at: int) -> None:
        if held := self.held(at):
            for rank in sorted(self.queue.leases[held[0]].ids):
                self.complete(held[0], rank)

    @rule(
        at=small, share=positions, filtered=st.none() | st.lists(st.integers(0, 3), max_size=2, unique=True),
        spoil=st.sampled_from(["no"] * 8 + ["lacks", "dtype", "twice", "odd", "range", "below", "again", "thief"]),
    )  # fmt: skip
    def complete_in_part(self, at: int, share: list[int] | None, filtered: list[int] | None, spoil: str) -> None:
        if not (held := self.held(at)):
            return
        token, rank, rows = held
        lease = self.queue.leases[token]
        named = None if share is None else sorted({p % rows for p in share} if rows else ())
        count = rows if named is None else len(named)
        columns = dict.fromkeys(self.queue.tasks[lease.task].gives, TOKENS)
        if spoil == "lacks":
            columns.pop(next(iter(columns), None), None)
        elif spoil in ("dtype", "twice"):
            columns |= {"fresh": TOKENS, "prompt": WRONG} if spoil == "dtype" else {"prompt": TOKENS}
        elif spoil in ("range", "below", "again"):
            named = [*(named or []), *{"range": [rows], "below": [-1], "again": [0, 0]}[spoil]]
        index = None if named is None else packed(*named)
        command = cmd.Complete(
            token=token, columns=columns, rank=rank, index=b"\0\0\0" if spoil == "odd" else index,
            filtered=None if filtered is None else packed(*sorted({f for f in filtered if f < count})),
        )  # fmt: skip
        owner = lease.sessions[rank]
        if spoil == "thief":
            owner = next((s for s in reversed(self.queue.sessions) if s != owner), 10**6)
        reply = self.queue.send(owner, command)
        assert spoil in ("no", "lacks", "twice") or isinstance(reply, Exception), reply

    @rule(at=small, share=positions, blame=st.booleans())
    def give_back(self, at: int, share: list[int] | None, blame: bool) -> None:
        if held := self.held(at):
            token, rank, rows = held
            index = None if share is None else packed(*sorted({p % rows for p in share} if rows else ()))
            owner = self.queue.leases[token].sessions[rank]
            self.queue.send(owner, cmd.GiveBack(token=token, index=index, blame=blame, rank=rank))

    @rule(at=st.integers(0, 30), what=st.sampled_from(["complete", "filter", "give back", "renew", "part"]))
    def use_any_token(self, at: int, what: str) -> None:
        """One that ever was; stale, more often than not."""
        if not self.queue.leases:
            return
        token, lease = list(self.queue.leases.items())[at % len(self.queue.leases)]
        rank, session = next(iter(lease.sessions.items()))
        commands = {
            "complete": cmd.Complete(token=token, columns={"response": TOKENS}, rank=rank),
            "filter": cmd.Complete(token=token, columns={}, filtered=packed(0), rank=rank),
            "give back": cmd.GiveBack(token=token, rank=rank),
            "renew": cmd.Renew(token=token, rank=rank),
            "part": cmd.LeaseRows(
                task="train", count=1, parts=True, token=token, rank=rank, world_size=rank + 1, group="t"
            ),
        }
        if what == "part" and getattr(self.queue.tasks.get("train"), "batch_rows", None) is None:
            return
        stale = token not in self.queue.open
        assert isinstance(self.queue.send(session, commands[what]), LeaseLost) or not stale

    @rule(who=small, works=st.booleans(), turns=st.sampled_from([1, 2, 6]))
    def straggle(self, who: int, works: bool, turns: int) -> None:
        """One worker begins something, and the others go on without it as far as they may."""
        if not {"rollout", "train"} <= self.queue.tasks.keys():
            return
        if self.version >= 0:
            self.send(who, cmd.ReportLoaded(version=self.version))
        held = self.send(who, cmd.LeaseRows(task="rollout", count=1))
        while turns and self.take_turns():
            turns -= 1
        if works and isinstance(held, cmd.Leased):
            self.complete(held.token, 0)

    # ---- versions

    @rule(
        who=small, ahead=st.sampled_from([1, 1, 1, 2, 5, 0]), load=st.sampled_from([None, 0, 0, 1, 2, -1]), wait=waits
    )
    def handle_versions(self, who: int, ahead: int, load: int | None, wait: float) -> None:
        if load is None:
            for command in publishing(max(self.version + ahead, 0)):
                self.send(who, command)
        else:
            self.send(who, cmd.ReportLoaded(version=self.version - load))
            self.send(who, cmd.AwaitVersion(after=self.version - load // 2, timeout_s=wait))

    @rule(
        who=small, rank=st.sampled_from([0, 0, 1, 1, 2, -1]), size=st.sampled_from([2, 2, 2, 1]), by=small,
        what=st.sampled_from(["open", "announce", "publish", "withdraw", "close", "all ranks", "all ranks", "restored"]),
        outlives=st.booleans(), wait=waits,
    )  # fmt: skip
    def publish_in_parts(
        self, who: int, rank: int, size: int, by: int, what: str, outlives: bool, wait: float
    ) -> None:
        """Ranks of a publisher say this and that, in any order; or all that is needed, but for what one may leave out."""
        version = self.version + 1 + by // 6
        share = part(version, max(rank, 0), outlives=outlives)
        commands: dict[str, Any] = {
            "open": cmd.OpenPublisher(rank=rank, world_size=size, no_rollback="it cannot" * (by == 7)),
            "announce": cmd.Announce(version=version, timeout_s=wait),
            "publish": cmd.Publish(version=version, part=share, probe=b"p" * (rank == 0)),
            "withdraw": cmd.Withdraw(version=version, reason="why not"),
            "close": cmd.ClosePublisher(),
            "restored": cmd.ReportRestored(version=self.version - (by == 0), optimizer="fresh"),
        }
        if what != "all ranks":
            self.send(who, commands[what])
            return
        for each in range(size):
            self.send(who + each, cmd.OpenPublisher(rank=each, world_size=size))
            self.send(who + each, commands["announce"])
        for each in range(size - (by == 3)):
            self.send(who + each, cmd.Publish(version=version, part=part(version, each, outlives=outlives)))

    @rule(
        who=small, by=st.sampled_from([0, 0, 0, 0, 1, 2, -1]), wait=waits,
        what=st.sampled_from([["fetch"], ["stage"], ["swap"], ["load"], ["fail"], ["retire"], ["stage", "swap"], ["fetch", "stage", "swap", "load"]]),
    )  # fmt: skip
    def be_a_replica(self, who: int, by: int, wait: float, what: list[str]) -> None:
        version = self.version - by
        commands: dict[str, Any] = {
            "fetch": cmd.AwaitVersion(after=version - 1, timeout_s=wait),
            "stage": cmd.ReportStaged(version=version, skipped=by > 0, moved=7, encoding="full"),
            "swap": cmd.Swap(version=version, timeout_s=wait),
            "load": cmd.ReportLoaded(version=version),
            "fail": cmd.ReportLoadFailed(version=version, reason="it would not"),
            "retire": cmd.Retire(),
        }
        for step in what:
            if self.send(who, commands[step]) is None:
                break

    @rule(
        who=small, ahead=st.sampled_from([0, 1, 1, 2, 3]), loads=st.booleans(), works=st.integers(0, 3),
        back=st.sampled_from([1, 1, 1, 2, 3, 0, -1]), restores=st.sampled_from([True, True, True, False]),
    )  # fmt: skip
    def roll_back(self, who: int, ahead: int, loads: bool, works: int, back: int, restores: bool) -> None:
        """To a version before those that are published here; replicas may have begun with them."""
        for _ in range(ahead):
            self.queue.free_publisher()
            for command in publishing(self.version + 1)[:3]:
                self.send(who, command)
            if loads:
                self.send(who + 1, cmd.ReportLoaded(version=self.version))
            for at in range(works if "rollout" in self.queue.tasks else 0):
                self.send(who, cmd.AddRows(groups=2, group_size=self.size, columns=ORDINARY))
                got = self.send(who + 1, cmd.LeaseRows(task="rollout", count=self.size + 1))
                if isinstance(got, cmd.Leased) and at:  # in part, perhaps with what it loads meanwhile
                    self.send(who + 1, cmd.ReportLoaded(version=self.version))
                    self.complete(got.token, 0, index=packed(*range(max(len(ids(got)) - works // 2, 1))))
        kept = [each.version for each in self.queue.status().versions]
        version = kept[max(-1 - back, -len(kept))] if kept and back >= 0 else self.version - back
        self.send(who, cmd.Rollback(version=version, reason="it diverged"))
        self.send(who, cmd.GetRestoreTarget())
        if restores:
            self.send(who, cmd.ReportRestored(version=self.version))

    # ---- checkpoints, and where ranks meet

    @rule(
        who=small, what=st.sampled_from(["keep", "cover", "cover", "go on", "go on", "go on", "begin anew"]),
        back=st.sampled_from([0, 0, 1, 1, 2, -1]), known=st.sampled_from([0, 0, 1, None]), turns=st.integers(0, 3),
        publishes=st.booleans(),
    )  # fmt: skip
    def keep_or_train_again(
        self, who: int, what: str, back: int, known: int | None, turns: int, publishes: bool
    ) -> None:
        for _ in range(turns):
            self.take_turns()
        cut = self.as_admin(cmd.GetTrainingPosition())
        step = max(cut.step - back, 0)
        version = -1 if known is None else max(cut.version - back + known, -1)
        commands: dict[str, Any] = {
            "keep": cmd.AddCheckpoint(step=step, covers=cut.covered, version=version),
            "cover": cmd.AddCheckpoint(step=step, covers=max(step - who % 2, 0), version=version),
            "go on": cmd.Resume(step=step, version=version),
            "begin anew": cmd.Resume(step=0),
        }
        reply = self.send(who, commands[what])
        if isinstance(reply, cmd.Resumed) and reply.publish and publishes:
            self.queue.free_publisher()
            for command in publishing(reply.version)[: 3 + who % 2]:
                self.send(who, command)

    @rule(
        who=small, size=st.sampled_from([2, 2, 2, 3, 1]), wait=waits, team=st.sampled_from(["t", "t", "t", "train"]),
        ranks=st.sampled_from([[0], [1], [0, 1], [1, 0], [0, 2], [2, 1, 0], [0, 0, 1], [-1]]),
    )  # fmt: skip
    def meet(self, who: int, size: int, wait: float, team: str, ranks: list[int]) -> None:
        for number, rank in enumerate(ranks):
            word = b"%d of %d" % (rank, who)
            meet = cmd.AllGather(group=team, what="a", rank=rank, world_size=size, payload=word, timeout_s=wait)
            self.send(who + number, meet)


LedgerMachine.TestCase.settings = settings(
    max_examples=2000 if LONG else 60,
    stateful_step_count=80 if LONG else 30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestLedger = pytest.mark.timeout(3600 if LONG else 900)(LedgerMachine.TestCase)
