"""Whole runs with samplers, priorities, fixed batches, and ranks that train as a team and die: under any schedule.

As in test_schedules every request waits without limit, so a lost wake-up is a deadlock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from ledger_checks import check_counters
from schedules import (
    ANY_POLICY,
    FOR_EVER,
    TASKS,
    Feeder,
    Judge,
    Replica,
    Stage,
    Worker,
    World,
    most_staleness,
    publish,
    schedules,
    train_task,
)

from asyncflow_sdk.errors import ConfigError, LeaseLost
from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.ledger.commands import PolicySpec, SamplerSpec


class Job:
    """What the ranks of a team see together."""

    def __init__(self, size: int, shards: int, batch: int, limit: int) -> None:
        self.size, self.shards, self.batch, self.limit = size, shards, batch, limit
        self.dealt: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)  # token → rank → rows
        self.step_of: dict[int, int] = {}
        self.rows_of: dict[int, set[int]] = {}
        self.words: defaultdict[int, set[int]] = defaultdict(set)  # token → ranks that acknowledged

    def got(self, reply: cmd.Leased, world: World) -> None:
        ids = cmd.unpack_ids(reply.ids)
        rows = world.ledger.rows
        made = [world.ledger.lineage.step(version) for version in rows.version[rows.at(ids)].tolist()]
        assert reply.step - min(made) <= self.limit, "staleness"
        assert reply.rank not in self.dealt[reply.token], "a rank gets a lease once"
        self.dealt[reply.token][reply.rank] = ids.tolist()
        assert self.step_of.setdefault(reply.token, reply.step) == reply.step
        if len(self.dealt[reply.token]) == self.size:
            self._whole(reply.token, reply.step)

    def _whole(self, token: int, step: int) -> None:
        by_rank = self.dealt[token]
        each = self.size // self.shards
        shards = [by_rank[shard * each] for shard in range(self.shards)]
        for rank, ids in by_rank.items():
            assert ids == shards[rank // each], "ranks of one shard get the same rows"
        every = [i for shard in shards for i in shard]
        assert len(every) == len(set(every)) == self.batch
        assert max(map(len, shards)) - min(map(len, shards)) <= 1
        assert self.rows_of.setdefault(step, set(every)) == set(every), "the same step, whole"

    @property
    def trained(self) -> Counter[int]:
        return Counter(self.step_of[token] for token, words in self.words.items() if len(words) == self.size)


class Rank(Worker):
    """One rank: takes its shard, publishes (rank 0), acknowledges. Dies with a shard in hand or while it waits."""

    def __init__(self, world: World, job: Job, rank: int, mortality: float) -> None:
        self.job, self.rank = job, rank
        super().__init__(world, "train", f"rank {rank}", mortality)

    def start(self) -> None:
        if self.rank == 0 and self.world.ledger.version < 0:
            publish(self.world, 0, lambda reply: None)
        super().start()

    def ask(self) -> None:
        lease = cmd.Lease(
            task="train", count=1, timeout_s=2 * FOR_EVER, team="job", rank=self.rank, world_size=self.job.size,
            shards=self.job.shards,
        )  # fmt: skip
        self.call(lease, self.got)
        if self.world.random.random() < self.mortality / 2:
            self.later(self.world.soon(), self.dies)

    def dies(self) -> None:
        if not self.over:
            self.life += 1
            if self.world.random.random() < 0.8:
                self.world.die(self.session)
            else:  # nobody notices; it is restarted all the same
                self.world.forget(self.session)
            self.world.later(self.world.soon(), self.start)

    def got(self, reply: Any) -> None:
        if isinstance(reply, LeaseLost):  # another process was started in its name: not in this world
            raise AssertionError(reply)
        if isinstance(reply, cmd.Leased):
            self.job.got(reply, self.world)
        super().got(reply)

    def work(self, reply: Any) -> None:
        drop = [at for at in range(len(cmd.unpack_ids(reply.ids))) if self.world.random.random() < 0.2]

        def trained() -> None:
            if self.rank == 0:
                life = self.life

                def published(said: Any) -> None:
                    if life == self.life:
                        self.acknowledge(said, reply, drop)

                publish(self.world, reply.version + 1, published)
            else:
                self.acknowledge(cmd.Done(), reply, drop)

        if self.world.random.random() < 0.1:
            self.later(
                self.world.soon(), lambda: self.call(cmd.Renew(token=reply.token, rank=self.rank), lambda r: None)
            )
        if self.world.random.random() < 0.05:
            back = cmd.GiveBack(token=reply.token, rank=self.rank)
            self.later(self.world.soon(), lambda: self.call(back, lambda said: self.ask()))
        else:
            self.later(self.world.soon(), trained)

    def acknowledge(self, said: Any, lease: cmd.Leased, drop: list[int]) -> None:
        assert isinstance(said, cmd.Done | cmd.Published | ConfigError)
        if self.world.random.random() < self.mortality / 2:
            self.dies()
            return
        self.token = lease.token
        self.complete(lease, (), None, drop)

    def completed(self, reply: Any) -> None:
        super().completed(reply)
        if isinstance(reply, cmd.Completed):
            assert not reply.revoked
            self.job.words[self.token].add(self.rank)
        self.ask()


def sampled(world: World, task: TaskSpec, *names: str) -> TaskSpec:
    """A task with a sampler of some name, "" for none."""
    options: dict[str, dict[str, Any]] = {
        "whole_groups": {},
        "shuffled": {"seed": 5, "window": world.random.randint(1, 9)},
        "length_bucketed": {"column": task.needs[0], "window": world.random.randint(1, 9)},
        "by_column": {"column": task.needs[0]},
        "token_balanced": {"column": task.needs[0]},
    }
    name = world.random.choice(names)
    return msgspec.structs.replace(task, sampler=SamplerSpec(name, options[name]) if name else None)


@schedules(60)
@given(
    seed=st.integers(0, 2**32),
    staleness=st.sampled_from([0, 1, 2, 4]),
    size=st.sampled_from([1, 2, 4]),
    groups=st.integers(1, 4),
    steps=st.integers(1, 5),
    ranks=st.sampled_from([(2, 2), (2, 1), (3, 3), (4, 2), (4, 4)]),
    mortality=st.sampled_from([0.0, 0.05, 0.2]),
    tight=st.booleans(),
    policy=ANY_POLICY,
)
def test_a_team_ends_a_run_with_every_row_accounted_for_under_any_schedule(
    seed: int,
    staleness: int,
    size: int,
    groups: int,
    steps: int,
    ranks: tuple[int, int],
    mortality: float,
    tight: bool,
    policy: str,
) -> None:
    batch = max(size * groups, size * -(-ranks[1] // size))
    world = World(seed, limit=20_000 + 8_000 * steps * batch)
    limits = cmd.Configure(
        capacity_rows=batch if tight else 4 * batch,
        max_staleness=staleness,
        steps=steps,
        staleness=PolicySpec(policy),
    )
    rollout, reward, judge = TASKS
    tasks = [
        sampled(world, rollout, "", "shuffled", "length_bucketed"),
        sampled(world, reward, "", "shuffled", "length_bucketed", "by_column"),
        sampled(world, judge, "", "whole_groups", "token_balanced"),
        sampled(world, train_task(batch), "", "token_balanced"),
    ]
    world.set_up(limits, world.random.sample(tasks, 4))

    job = Job(ranks[0], ranks[1], batch, most_staleness(policy, staleness))
    feeder = Feeder(world, size, size if tight else 2 * batch)
    feeder.priorities = (0, 0, 1, -1)
    workers: list[Worker] = [feeder, *(Rank(world, job, rank, mortality) for rank in range(job.size))]
    workers += [Replica(world, "rollout", f"replica {i}", mortality) for i in range(3)]
    workers += [Stage(world, "reward", f"stage {i}", mortality) for i in range(2)]
    side = Judge(world, "judge", "judge", mortality / 2)
    if not tight and tasks[2].sampler is None:
        side.at_least = world.random.randint(0, batch)
    workers.append(side)
    world.run()

    assert all(worker.over for worker in workers), world.ledger.status()
    assert job.trained == Counter(dict.fromkeys(range(steps), 1)), "each step once"
    check_counters(world.ledger)
    assert not world.ledger.leases
    audit = world.ledger.audit()
    assert (audit.live, audit.balanced) == (0, True)
    assert set(world.retired.values()) == {1}
    assert world.retired.total() == audit.put
    assert audit.consumed + audit.reasons.get("filtered: no gradient in the step", 0) == steps * batch
