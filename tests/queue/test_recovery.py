"""A server that comes back is the one that died: any commands, killed anywhere, beside a twin that never dies."""

import os
import random
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recovery_bench import Bench, Client, differs, state

from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.ledger.commands import PolicySpec, SamplerSpec

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
ROLLOUT = TaskSpec(name="rollout", needs=("prompt",), gives=("response",), lease_s=10, max_attempts=2, admits=True)
REWARD = TaskSpec(name="reward", needs=("response",), gives=("reward",), lease_s=6, max_attempts=2)
SIDE = TaskSpec(name="side", needs=("prompt",), lease_s=8, partitions=("", "eval"))
TRAIN = TaskSpec(name="train", needs=("response", "reward"), lease_s=20, batch_rows=4)
TASKS = [ROLLOUT, REWARD, SIDE, TRAIN]
SAMPLERS = {
    "rollout": SamplerSpec("shuffled", {"seed": 1, "window": 8}),
    "reward": SamplerSpec("length_bucketed", {"column": "response", "window": 8}),
    "side": SamplerSpec("by_column", {"column": "prompt"}),
    "train": SamplerSpec("token_balanced", {"column": "response"}),
}
COLUMNS = {"rollout": "response", "reward": "reward"}


class Chance:
    """Says what the clients of a bench do next."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self.bench, self.random = bench, random.Random(seed)
        self.joined = self.version = 0
        admin = self.join()
        limits = cmd.Configure(
            max_staleness=self.random.choice([0, 1, 3]), capacity_rows=60,
            staleness=self.random.choice([None, PolicySpec("drop"), PolicySpec("count")]), keep_versions=self.random.choice([1, 2, 3]),
            max_swapping=self.random.choice([0, 1]), quorum=self.random.choice([0, 0, 2]),
        )  # fmt: skip
        tasks = [
            msgspec.structs.replace(task, sampler=self.random.choice([None, SAMPLERS[task.name]])) for task in TASKS
        ]
        unknown = msgspec.structs.replace(SIDE, name="nobody", sampler=SamplerSpec("nobody"))
        for command in [limits, *(cmd.Declare(task=task) for task in [*tasks, unknown])]:
            bench.send(admin, admin.call(command))
        self.publish(admin)

    def join(self) -> Client:
        self.joined += 1
        return self.bench.join(f"client-{self.joined}")

    def publish(self, client: Client) -> None:
        part = cmd.Part(manifest=b"m", transport="t", where=b"", outlives=self.random.random() < 0.5)
        said = [cmd.OpenPublisher(), cmd.Announce(version=self.version), cmd.Publish(version=self.version, part=part)]
        self.version += 1
        for command in [*said, cmd.ClosePublisher(), cmd.Loaded(version=self.version - 1)]:
            self.bench.send(client, client.call(command))

    def about_versions(self) -> Any:
        """What a replica says of the newest version, or of one before; a rank of two; or a rollback."""
        version = self.bench.server.ledger.version
        near = version - self.random.choice([0, 0, 0, 1, 2])
        part = cmd.Part(manifest=b"m", transport="t", where=b"", outlives=self.random.random() < 0.5)
        rank = self.random.choice([0, 1])
        commands = [
            cmd.AwaitVersion(after=near, timeout_s=20), cmd.Staged(version=near), cmd.Swap(version=near, timeout_s=20),
            cmd.Loaded(version=max(near, 0)), cmd.NotLoaded(version=near, reason="it would not"),
            cmd.OpenPublisher(rank=rank, world_size=2), cmd.Announce(version=version + 1, timeout_s=20),
            cmd.Publish(version=version + 1, part=part), cmd.Withdraw(version=version + 1), cmd.ClosePublisher(),
            cmd.Rollback(version=version - 1), cmd.Retire(), cmd.AwaitLost(timeout_s=20), cmd.Restored(version=version),
        ]  # fmt: skip
        self.version = max(self.version, version + 3)
        return self.random.choices(commands, [3, 4, 4, 2, 1, 2, 2, 2, 0.5, 1, 1, 0.5, 3, 2])[0]

    def step(self) -> None:
        bench, draw = self.bench, self.random
        clients = list(bench.clients.values())
        if not clients:
            self.join()
            return
        client = draw.choice(clients)
        what = draw.choices(
            ["put", "lease", "use", "again", "drop", "news", "tick", "gone", "join", "publish", "rare", "version"],
            [6, 10, 12, 3, 2, 2, 3, 0.4, 0.4, 1, 1, 3],
        )[0]
        if what == "put":
            key = draw.choice(["", "", "a", "b", str(draw.random())])
            more: dict[str, Any] = {"priority": draw.choice([0, 0, 1]), "partition": draw.choice(["", "", "eval"])}
            wait = draw.choice([0.0, 5.0, 50.0])
            values = {"prompt": np.arange(draw.randint(1, 4)) + draw.random()}
            bench.send(client, bench.put(client, values, group_size=2, key=key, timeout_s=wait, **more))
        elif what == "lease":
            task = draw.choice(TASKS).name
            count = draw.randint(1, 6)
            lease = cmd.Lease(
                task=task,
                count=count,
                timeout_s=draw.choice([0.0, 5.0, 50.0]),
                at_least=draw.choice([0, 0, 0, count]),
            )
            if draw.random() < 0.4:  # a team, whose other rank is soon to ask
                rank = draw.randint(0, 1)
                for each in (rank, 1 - rank)[: draw.randint(1, 2)]:
                    team = msgspec.structs.replace(
                        lease, count=4, at_least=0, timeout_s=50.0, team="t", rank=each, world_size=2,
                        shards=draw.choice([0, 0, 1]),
                    )  # fmt: skip
                    bench.send(client, client.call(team))
                    client = draw.choice(clients)
            else:
                bench.send(client, client.call(lease))
        elif what == "use" and client.leases:
            self.use(client, client.leases[draw.choice(list(client.leases))])
        elif what == "again" and client.open:
            bench.send(client, draw.choice(list(client.open)), again=True)
        elif what == "drop" and client.open:
            seq = draw.choice(list(client.open))
            client.numbering.drop(seq)
            del client.open[seq]
            bench.send(client, 0)
        elif what == "news":
            bench.send(client, client.call(draw.choice([None, cmd.GetAudit(), cmd.GetStatus()])))
        elif what == "tick":
            bench.tick(draw.choice([0.1, 1.0, 4.0, 9.0, 21.0]))
        elif what == "gone":
            bench.gone(client)
        elif what == "join" and len(clients) < 4:
            self.join()
        elif what == "publish":
            self.publish(client)
        elif what == "version":
            bench.send(client, client.call(self.about_versions()))
        elif what == "rare":
            commands = [
                cmd.AwaitVersion(after=self.version, timeout_s=20), cmd.Wanted(), cmd.Loaded(version=0),
                cmd.Cancel(key="a"), cmd.Cancel(partition="eval"), cmd.End(partition="eval"), cmd.Leave(),
                cmd.Dismiss(),
            ]  # fmt: skip
            command = draw.choices(commands, [3, 3, 3, 1, 1, 0.3, 0.3, 0.3])[0]
            bench.send(client, client.call(command))
            if isinstance(command, cmd.Leave):
                bench.settle()
                del bench.clients[client.name]

    def use(self, client: Client, lease: cmd.Leased) -> None:
        bench, draw = self.bench, self.random
        count, rank = len(lease.ids) // 8, lease.rank
        if not count:
            return
        index = sorted(draw.sample(range(count), draw.randint(1, count)))
        packed = None if len(index) == count else np.array(index, "<i4").tobytes()
        how = draw.choices(["complete", "give back", "renew"], [8, 1, 1])[0]
        del client.leases[lease.token]
        if how == "renew":
            client.leases[lease.token] = lease
            bench.send(client, client.call(cmd.Renew(token=lease.token, rank=rank)))
        elif how == "give back":
            back = cmd.GiveBack(token=lease.token, index=packed, blame=draw.random() < 0.5, rank=rank)
            bench.send(client, client.call(back))
        elif lease.task in COLUMNS:
            filtered = np.array([0], "<i4").tobytes() if draw.random() < 0.1 else None
            command = cmd.Complete(token=lease.token, columns={}, index=packed, filtered=filtered, rank=rank)
            bench.send(client, bench.put(client, {COLUMNS[lease.task]: np.random.rand(len(index))}, command=command))
        else:
            then = cmd.Lease(task=lease.task, count=2, timeout_s=3.0) if draw.random() < 0.5 else None
            bench.send(client, client.call(cmd.Complete(token=lease.token, columns={}, rank=rank), None, then))


@pytest.mark.timeout(3600 if LONG else 300)
@settings(max_examples=1000 if LONG else 15, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), rate=st.sampled_from([0.02, 0.1, 0.3]), small=st.booleans())
def test_a_server_killed_anywhere_is_what_its_twin_is(seed: int, rate: float, small: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # where syncing costs nothing
        bench = Bench(Path(folder) / "journal")
        try:
            chance = Chance(bench, seed)
            for _ in range(120):
                chance.step()
                fate = chance.random.random()
                if small and fate < 0.05:
                    bench.server._keeping.home._least = 0  # type: ignore[union-attr] - a snapshot at the next settling
                if fate > 0.6:
                    bench.settle()
                if chance.random.random() < rate:
                    pending = len(bench.server._keeping.journal._buffer)  # type: ignore[union-attr]
                    bench.kill(torn=chance.random.choice([0, 0, chance.random.randint(0, max(pending - 1, 0))]))
                    parts = ("server", "ledger", "places", "files", "gauges")
                    assert state(bench.server, *parts) == state(bench.twin, *parts), differs(
                        bench.server, bench.twin, *parts
                    )
            # when it is killed once more, with nothing under way
            bench.settle()
            before = state(bench.server, "server", "ledger", "places", "files", "gauges")
            bench.kill()
            # then it is the same in everything, and so is its twin
            assert state(bench.server, *before) == before
            audit = bench.server.ledger.audit()
            assert audit == bench.twin.ledger.audit()
            assert audit.balanced
        finally:
            bench.close()


def test_a_look_that_was_taken_back_before_it_came_is_replayed(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "journal")
    try:
        # given a request that changes nothing, and word over another socket that nobody waits for it, which comes first
        client = bench.join("client")
        seq = client.call(cmd.GetAudit())
        client.numbering.drop(seq)
        bench.send(client, 0)
        bench.send(client, seq)
        bench.settle()
        # when
        bench.kill()
        # then it was carried out as it was: kill() compares
        assert bench.kills == 1
    finally:
        bench.close()
