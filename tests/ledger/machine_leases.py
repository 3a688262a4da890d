"""What workers say of leases: alone or as a team, rightly and wrongly, in time and too late."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import rule
from ledger_harness import COLUMN
from machine_run import WRONG, MachineRun, small, waits, wheres

from asyncflow_sdk.errors import LeaseLost
from asyncflow_sdk.ledger import commands as cmd


class LeaseRules(MachineRun):
    """Leases are taken, kept, and ended in many ways."""

    @rule(
        who=small,
        which=small,
        count=st.sampled_from([0, 1, 1, 2, 3, 6, 9]),
        at_least=st.sampled_from([0, 0, 1, 2, 3, 5, -1]),
        wait=waits,
        where=wheres,
        most=st.sampled_from([0, 0, 4, 9]),
    )
    def lease(
        self, who: int, which: int, count: int, at_least: int, wait: float, where: str | None, most: int
    ) -> None:
        task = self.tasks[which % len(self.tasks)].name
        command = cmd.Lease(task=task, count=count, timeout_s=wait, at_least=at_least, partition=where, most=most)
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
