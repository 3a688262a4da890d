"""A run whose pipeline, limits and first rows Hypothesis draws: what all rules of the machine begin from."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize
from ledger_harness import COLUMN, Fair, Harness
from ledger_queue import publishing

from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.ledger.commands import PolicySpec, SamplerSpec
from asyncflow_sdk.types import ColumnSpec

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


class MachineRun(RuleBasedStateMachine):
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
            staleness=draw(st.sampled_from([None, None, PolicySpec("drop"), PolicySpec("count")]), "policy"),
            capacity_bytes=draw(st.sampled_from([None, None, 600, 60]), "bytes"),
            checkpoints=draw(st.sampled_from([None, None, True]), "checkpoints"),
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
