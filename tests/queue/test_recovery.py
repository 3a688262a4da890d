"""A server that comes back is the one that died: any commands, a kill after any of them, and all that can be seen is the same.

``HYPOTHESIS_PROFILE=long pytest tests/queue/test_recovery.py`` looks longer.
"""

import asyncio
import contextlib
import itertools
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from queue_runs import Durable

from asyncflow_sdk.errors import AsyncFlowError

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
TASKS: dict[str, dict[str, Any]] = {
    "rollout": {"needs": ["prompt"], "gives": ["response"], "max_attempts": 2, "admits": True},
    "reward": {"needs": ["response"], "gives": ["reward"], "max_attempts": 2},
    "side": {"needs": ["prompt"], "partitions": ["", "eval"]},
    "train": {"needs": ["response", "reward"], "batch_rows": 4},
}
SAMPLERS: dict[str, Any] = {
    "rollout": ("shuffled", {"seed": 1, "window": 8}),
    "reward": ("length_bucketed", {"column": "response", "window": 8}),
    "side": ("by_column", {"column": "prompt"}),
    "train": ("token_balanced", {"column": "response"}),
}
GIVES = {"rollout": "response", "reward": "reward"}
PASSING = {"age_s", "held_s", "since_s", "left_s", "time_s", "weights_s", "prepares_s", "version_age_s", "announced_s",
           "pid", "host", "session_count", "held_bytes", "written_bytes", "garbage", "why", "parked", "waiting", "oldest", "versions"}  # fmt: skip


def lasting(value: Any) -> Any:
    """What of a status does not depend on the time, nor on which process answers."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return {name: lasting(part) for name, part in value.items() if name not in PASSING}
    return [lasting(part) for part in value] if isinstance(value, list | tuple) else value


class Chance:
    """Clients of a run that do what chance says: each request goes on its way, and is answered, waits, or is taken back."""

    def __init__(self, run: Durable, seed: int) -> None:
        self.run, self.random = run, random.Random(seed)
        self.clients = [run.client(f"client-{number}") for number in range(3)]
        self.batches: list[Any] = []
        self.steps: list[Any] = []
        self.streams: list[Any] = []
        self.waiting: list[asyncio.Task[None]] = []
        self.keys = itertools.count()
        self.publisher = self.clients[0].weight_publisher()
        self.version = 0

    @property
    def queue(self) -> Any:
        return self.random.choice(self.clients).queue.aio

    async def declare(self, lease_s: float) -> None:
        for name, task in TASKS.items():
            sampler = self.random.choice([None, SAMPLERS[name]])
            await self.queue.declare(name, **task, sampler=sampler, lease_s=lease_s)

    async def put(self) -> None:
        draw = self.random
        values = {"prompt": np.arange(draw.randint(1, 4)) + draw.random()}
        key, partition = draw.choice(["", "a", str(next(self.keys))]), draw.choice(["", "", "eval"])
        wait_s = draw.choice([0.0, 100.0])
        await self.queue.put(
            values, group_size=2, key=key, partition=partition, priority=draw.choice([0, 1]), timeout_s=wait_s
        )

    async def lease(self) -> None:
        task, count = self.random.choice(list(TASKS)), self.random.randint(1, 6)
        wait_s = self.random.choice([0.0, 0.0, 100.0])
        self.batches.append(await self.queue.get(task, count, timeout_s=wait_s))

    async def lease_as_ranks(self) -> None:
        task, shards = self.random.choice(["side", "train"]), self.random.choice([0, 1])
        ranks = (
            self.clients[rank].queue.aio.get(
                task, 4, group="t", rank=rank, world_size=2, shards=shards, timeout_s=100.0
            )
            for rank in range(2)
        )
        self.batches += await asyncio.gather(*ranks)

    async def lease_in_parts(self) -> None:
        stream = self.queue.steps("train", part_rows=self.random.choice([1, 4]), timeout_s=100.0)
        self.streams.append(await stream.__aenter__())  # a loop that is dropped gives its step back, some time
        self.steps.append(await anext(aiter(stream)))

    async def lease_in_parts_as_ranks(self) -> None:
        streams = [
            self.clients[rank].queue.aio.steps("train", group="p", rank=rank, world_size=2, timeout_s=100.0)
            for rank in range(2)
        ]
        self.streams += [await stream.__aenter__() for stream in streams]
        self.steps += await asyncio.gather(*(anext(aiter(stream)) for stream in streams))

    async def work_on_a_step(self) -> None:
        if not self.steps:
            return
        step = self.steps.pop(self.random.randrange(len(self.steps)))
        how = self.random.choice(["part", "part", "part", "ack", "give back", "renew"])
        if how == "give back":
            await step.give_back()
            return
        self.steps.append(step)
        if how == "renew":
            await step.renew()
        elif how == "ack" or step.complete:
            await step.ack(filtered=np.arange(step.rows) == 0)
            self.steps.remove(step)
        else:
            async for _ in step.parts():
                break

    async def work(self) -> None:
        if not self.batches:
            return
        draw, batch = self.random, self.batches.pop(self.random.randrange(len(self.batches)))
        how = draw.choice(["complete", "complete", "complete", "a part", "give back", "renew", "drop some"])
        values = {GIVES[batch.task]: np.array([draw.random() for _ in batch.ids])} if batch.task in GIVES else {}
        if how == "give back":
            await batch.give_back(blame=draw.random() < 0.5)
        elif how == "renew":
            self.batches.append(batch)
            await batch.renew()
        elif how == "a part" and batch.rows:
            self.batches.append(batch)
            await batch.complete({name: column[:1] for name, column in values.items()}, index=[0])
        else:
            drops = np.arange(batch.rows) == (0 if how == "drop some" else -1)
            await batch.complete(values, filtered=drops)

    async def publish(self) -> None:
        """Or go back to an earlier version, or say that a replica has loaded one."""
        how = self.random.choice(["publish", "publish", "roll back", "loaded"])
        if how == "publish":
            self.version += 1
            with contextlib.suppress(AsyncFlowError):
                self.publisher.publish(self.version, [("w", np.full(10, self.version))]).wait()
        elif how == "loaded":
            await self.queue.loaded(self.version)
        elif self.version:
            self.version = self.clients[0].rollback(max(self.version - 1, 0)).version
            self.clients[0].restored(self.version)

    async def rare(self) -> None:
        what = self.random.choice(["cancel", "leave", "look"])
        if what == "cancel":
            await self.queue.cancel(**self.random.choice([{"key": "a"}, {"partition": "eval"}]))
        elif what == "leave":
            number = self.random.randrange(1, 3)
            if not self.waiting:
                self.clients[number].close()
                self.clients[number] = self.run.client(f"client-{next(self.keys)}")
        else:
            await self.queue.audit()
            await self.queue.failed()

    async def step(self) -> None:
        parts = [self.lease_in_parts, self.lease_in_parts_as_ranks, self.work_on_a_step]
        verbs = [self.put, self.lease, self.work, self.lease_as_ranks, self.publish, self.rare, *parts]
        verb = self.random.choices(verbs, [6, 10, 14, 1, 1, 1, 3, 1, 5])[0]
        task = asyncio.create_task(self.tried(verb))
        self.waiting.append(task)
        await asyncio.wait([task], timeout=0.02)
        if len(self.waiting) > 4:
            self.waiting[0].cancel()
            await asyncio.wait(self.waiting[:1])
        self.waiting = [task for task in self.waiting if not task.done()]

    async def tried(self, verb: Any) -> None:
        with contextlib.suppress(AsyncFlowError):
            await verb()

    def seen(self) -> Any:
        """All that can be seen of the run."""
        queue = self.clients[0].queue
        status = lasting(queue.status())
        status["sessions"] = [session for session in status["sessions"] if session["name"] != "driver"]  # its own
        return status, queue.audit(), queue.failed()


async def live(chance: Chance, run: Durable, steps: int, kills: float, lease_s: float) -> None:
    await chance.declare(lease_s)
    for _ in range(steps):
        await chance.step()
        if chance.random.random() < kills:
            before = chance.seen() if lease_s > 100 and not chance.waiting else None
            found = run.again()
            assert (found["differing"], found["lost"], found["discarded_bytes"]) == (0, 0, 0)
            after = chance.seen()
            assert before is None or after == before
    for task in chance.waiting:
        task.cancel()
    await asyncio.gather(*chance.waiting, return_exceptions=True)


@pytest.mark.timeout(3600 if LONG else 300)
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("lease_s", [1000.0, 0.1])
@pytest.mark.parametrize("seed", range(100 if LONG else 2))
def test_a_server_killed_after_any_command_is_what_it_was(tmp_path: Path, seed: int, lease_s: float) -> None:
    draw = random.Random(seed)
    limits = {
        "max_staleness": draw.choice([0, 1, 3]), "capacity_rows": 60, "keep_versions": draw.choice([2, 3]),
        "staleness_policy": draw.choice(["wait", "drop", "count"]), "on_failure": "stop",
    }  # fmt: skip
    with Durable(tmp_path / "run", **limits) as run:
        chance = Chance(run, seed)
        asyncio.run(live(chance, run, 120, 0.08, lease_s))
        audit = chance.clients[0].audit()
        assert audit.balanced
        assert audit.put > 20
        chance.publisher.close()
        for client in chance.clients:
            client.close()
