"""Versions on a replica: fetched behind, the newest first, whatever fails on the way is told and tried again."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from children import Child
from replica_runs import LIMIT_S, Replica, model, replica, served, values
from scripted_transport import ScriptedReceiver, and_then, fails, scripted, until_interrupted
from weight_children import publish_until_killed

from asyncflow_sdk.errors import ConfigError, DigestMismatch, MemoryFull, VersionGone, WeightMismatch, WireError
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types import Manifest, Probe, TensorInfo
from asyncflow_sdk.weights import prefetch, publisher


def test_a_replica_takes_up_each_newest_version_and_counts_what_it_passed_over() -> None:
    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            # when versions are published before it looks again
            run.publish(1)
            first = await one.staged(1)
            assert values(first) == {1.0}
            await one.load(1)
            assert one.updates.loaded == 1
        # and more while it is away
        for version in range(2, 8):
            run.publish(version)
        async with replica(run.client("later"), 1) as one:
            assert values(await one.staged(7)) == {7.0}

    with served() as run:
        asyncio.run(scenario())
        staged = run.states("staged")
        assert [(e.version, e.skipped, e.encoding) for e in staged] == [(1, 0, "mapped")]


def test_a_newer_version_replaces_one_that_is_not_taken() -> None:
    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            run.publish(1)
            old = await one.staged(1)
            run.publish(5)
            assert values(await one.staged(5)) == {5.0}
            # then the old one is released, and may be loaded no more
            with pytest.raises(VersionGone, match="version 1 was released"):
                list(old)
            assert not await one.updates.permission(1)
            await one.load(5)

    with served() as run:
        asyncio.run(scenario())
        assert [(e.version, e.skipped) for e in run.states("staged")] == [(1, 0), (5, 3)]


def test_a_newer_version_stops_the_fetch_of_an_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a fetch of version 1 that goes on until it is interrupted
    receiver = scripted(monkeypatch)
    began = threading.Event()
    receiver.script = [lambda r, m: (began.set(), until_interrupted(r, m))[1]]

    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            run.publish(1)
            await asyncio.to_thread(began.wait, LIMIT_S)
            # when
            run.publish(2)
            # then
            assert values(await one.staged(2)) == {2.0}

    with served() as run:
        asyncio.run(scenario())
        assert receiver.versions == [1, 2]
        assert run.states("failed") == []  # nothing failed: it was wanted no more


def test_a_replica_slower_than_the_trainer_is_not_interrupted_twice_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a trainer that publishes during every fetch
    receiver = scripted(monkeypatch)

    def publish_and_wait(end: ScriptedReceiver, manifest: Manifest) -> None:
        run.publish(manifest.version + 1)
        if end.wanted_no_more.wait(0.5):
            raise WireError(f"interrupted while fetching version {manifest.version}")

    receiver.script = [publish_and_wait] * 4

    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            run.publish(1)
            await one.staged(5)

    with served() as run:
        asyncio.run(scenario())
        assert receiver.versions == [1, 2, 3, 4, 5]
        assert [e.version for e in run.states("staged")] == [2, 4, 5]


@pytest.mark.parametrize(
    "error",
    [
        DigestMismatch("version 1: bucket 0 of chunk 0 differs"), WireError("nobody listens"), OSError(5, "I/O error"),
        TimeoutError("no answer"), MemoryFull("no room"), VersionGone("segment w1 is not there"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_what_fails_is_told_and_tried_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = scripted(monkeypatch)
    receiver.script = [fails(error), fails(error)]
    monkeypatch.setattr(prefetch, "RETRY_S", 0.01)

    async def scenario() -> None:
        async with replica(run.client("replica"), 0) as one:
            run.publish(1)
            await one.load(1)

    with served() as run:
        asyncio.run(scenario())
        assert receiver.versions == [1, 1, 1]
        failed = run.states("failed")
        assert [e.version for e in failed] == [1, 1]
        assert failed[0].detail == f"{type(error).__name__}: {error}"


def _another_name(part: dict[str, Any]) -> None:
    manifest = msgspec.msgpack.decode(part["manifest"])
    manifest[1][0][0] = "v"
    part["manifest"] = msgspec.msgpack.encode(manifest)


def _as_ints(part: dict[str, Any]) -> None:
    manifest = msgspec.msgpack.decode(part["manifest"])
    manifest[1][0][1] = "int32"
    part["manifest"] = msgspec.msgpack.encode(manifest)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_another_name, "DigestMismatch: version 1: the manifest of rank 0's part differs from what was published"),
        (_as_ints, "DigestMismatch: version 1: the manifest of rank 0's part differs"),
        (
            lambda part: part.update(manifest=b"\x91" * 100_000),
            "ProtocolError: version 1: the manifest of rank 0's part",
        ),
    ],
)
def test_a_damaged_manifest_is_noticed_and_the_next_version_taken(
    damage: Callable[[dict[str, Any]], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a version of which something other than its bytes is damaged on its way
    def part(**fields: Any) -> cmd.Part:
        damage(fields)
        return made(**fields)

    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            while not run.states("failed"):
                await asyncio.sleep(0.01)
            monkeypatch.setattr(cmd, "Part", made)
            run.publish(2)
            await one.load(2)

    made = cmd.Part
    monkeypatch.setattr(cmd, "Part", part)
    with served() as run:
        run.publish(1)
        asyncio.run(scenario())
        assert run.states("failed")[0].detail.startswith(message)


@pytest.mark.parametrize("probe", [{"prompt_ids": [[0]]}, ((), (), ()), (((0,),), ((1, 2),), ((-1.0,),))])
def test_a_probe_that_cannot_be_read_costs_its_version_and_no_replica(
    probe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            while not run.states("failed"):
                await asyncio.sleep(0.01)
            run.publish(2, probe=Probe(((0,),), ((1,),), ((-1.0,),)))
            assert (await one.load(2)).probe is not None

    monkeypatch.setattr(publisher, "plain_probe", lambda probe, scored: probe)
    with served() as run:
        run.publish(1, probe=probe)
        asyncio.run(scenario())
        assert run.states("failed")[0].detail.startswith("ProtocolError: version 1: its probe cannot be read")


def test_a_newer_version_is_fetched_at_once_while_an_older_one_is_let_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a version that failed and is not tried again within this test
    receiver = scripted(monkeypatch)
    receiver.script = [fails(WireError("nobody listens"))]
    monkeypatch.setattr(prefetch, "RETRY_S", 10 * LIMIT_S)
    monkeypatch.setattr(prefetch, "RETRY_MOST_S", 10 * LIMIT_S)

    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            run.publish(1)
            while not run.states("failed"):
                await asyncio.sleep(0.01)
            # when / then
            run.publish(2)
            await one.load(2)

    with served() as run:
        asyncio.run(scenario())
        assert receiver.versions == [1, 2]


def test_a_version_that_is_gone_is_no_failure_when_there_is_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a replica that comes to fetch a version when two more are published, and it is kept no longer
    receiver = scripted(monkeypatch)
    receiver.script = [and_then(lambda: [run.publish(version) for version in (2, 3)])]

    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            run.publish(1)
            await one.load(3)

    with served() as run:
        asyncio.run(scenario())
        assert receiver.versions[0] == 1
        assert receiver.versions[-1] == 3
        assert run.states("failed") == []


def test_the_loaded_version_is_kept_as_a_base_until_the_next_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = scripted(monkeypatch)

    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            run.publish(1)
            await one.load(1)
            run.publish(2)
            await one.staged(2)
            assert receiver.held == [1, 2]
            await one.load(2)
            assert receiver.held == [2]
            # and after a failure it is left out once: it may be what is wrong
            receiver.script = [fails(DigestMismatch("a delta that does not fit"))]
            monkeypatch.setattr(prefetch, "RETRY_S", 0.01)
            run.publish(3)
            await one.load(3)
            run.publish(4)
            await one.load(4)

    with served() as run:
        asyncio.run(scenario())
        assert receiver.fetched == [(1, None), (2, 1), (3, 2), (3, None), (4, 3)]
        assert receiver.held == []  # closed


def test_the_version_before_can_be_had_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with replica(run.client("replica"), 0) as one:
            # given weights that were never published
            with pytest.raises(VersionGone, match="never published"):
                await one.updates.previous()
            run.publish(1)
            await one.load(1)
            run.publish(2)
            # when / then: as long as it is kept
            again = await one.updates.previous()
            assert (again.version, values(again)) == (1, {1.0})
            again.release()
            run.publish(3)
            with pytest.raises(VersionGone, match="version 1 is no longer kept"):
                await one.updates.previous()

    with served(keep_versions=2) as run:
        asyncio.run(scenario())


def test_a_version_that_was_given_up_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "RETRY_S", 0.01)

    async def scenario() -> None:
        async with replica(run.client("replica"), 0) as one:
            run.publish(1)
            await one.staged(1)
            assert await one.updates.permission(1)
            await one.updates.give_up(one.updates.take(), "EngineError: out of memory")
            assert one.updates.loaded == 0
            await one.load(1)

    with served() as run:
        asyncio.run(scenario())
        assert [e.detail for e in run.states("failed")] == ["EngineError: out of memory"]


def test_parts_that_do_not_fit_each_other_end_it_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a version of which a tensor lies outside of its chunk
    receiver = scripted(monkeypatch)
    fetch = receiver.fetch

    def damaged(manifest, where, **options):  # type: ignore[no-untyped-def]
        fetched = fetch(manifest, where, **options)
        fetched.manifest = type(manifest)(1, (TensorInfo("w", "float32", (1 << 20,), 0, 0),), manifest.chunks)
        return fetched

    receiver.fetch = damaged  # type: ignore[method-assign]

    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            run.publish(1)
            await one.until(lambda: one.updates.failure, "the failure")
            assert isinstance(one.updates.failure, WeightMismatch)
            assert "tensor 'w'" in str(one.updates.failure)

    with served() as run:
        asyncio.run(scenario())
        assert "does not lie in chunk 0" in run.states("failed")[0].detail
        assert receiver.held == []


def test_shared_memory_that_is_not_in_sight_is_refused_with_what_to_use_instead() -> None:
    async def scenario() -> None:
        async with replica(run.client("replica", shared_memory=False)) as one:
            run.publish(1)
            await one.until(lambda: one.updates.failure, "the failure")
            assert isinstance(one.updates.failure, ConfigError)
            assert "tcp" in str(one.updates.failure)

    with served() as run:
        asyncio.run(scenario())


def test_the_end_of_the_stream_ends_the_versions() -> None:
    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            run.publish(0)
            await one.load(0)
            run.trainer.end()
            await one.until(lambda: one.updates.ended, "the end")

    with served() as run:
        run.trainer.declare("rollout", needs=["p"], admits=True)
        asyncio.run(scenario())


def test_a_step_may_take_longer_than_any_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "ASK_AGAIN_S", 0.02)

    async def scenario() -> None:
        async with replica(run.client("replica"), 0) as one:
            await asyncio.sleep(0.2)  # many requests come to their deadline
            run.publish(1)
            await one.load(1)

    with served() as run:
        asyncio.run(scenario())


def test_closing_stops_a_fetch_and_does_not_wait_for_one_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = scripted(monkeypatch)
    monkeypatch.setattr(prefetch, "CLOSE_S", 0.05)
    began, ends = threading.Event(), threading.Event()
    receiver.script = [lambda r, m: (began.set(), ends.wait(LIMIT_S))[0]]
    closed = []
    monkeypatch.setattr(receiver, "close", lambda: closed.append(True))

    async def scenario() -> None:
        async with replica(run.client("replica")):
            run.publish(1)
            await asyncio.to_thread(began.wait, LIMIT_S)

    with served() as run:
        asyncio.run(scenario())
        assert receiver.wanted_no_more.is_set()
        assert not closed  # its thread is still at it
        ends.set()


def test_one_slow_replica_asks_until_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two replicas that may not swap at once, the second is told why it waits, and goes on asking."""
    monkeypatch.setattr("asyncflow_sdk.weights.updates.ASK_AGAIN_S", 0.02)

    async def scenario() -> None:
        async with replica(run.client("one")) as one, replica(run.client("two")) as two:
            run.publish(1)
            await asyncio.gather(one.staged(1), two.staged(1))
            assert await one.updates.permission(1)
            asking = asyncio.create_task(two.updates.permission(1))
            while not two.updates.waits_for:
                await asyncio.sleep(0.01)
            assert not asking.done()
            update = one.updates.take()
            await one.updates.commit(update, set(model(1)))
            assert await asyncio.wait_for(asking, LIMIT_S)
            assert not two.updates.waits_for

    with served(max_swapping=1) as run:
        asyncio.run(scenario())


def test_a_staged_version_that_was_replaced_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = scripted(monkeypatch)

    async def scenario() -> None:
        async with replica(run.client("replica")) as one:
            run.publish(1)
            old = await one.staged(1)
            # given the next version, which is not here yet
            comes = threading.Event()
            receiver.script = [lambda r, m: (comes.wait(LIMIT_S), None)[1]]
            run.publish(2)
            # when
            assert not await one.updates.permission(1)
            # then
            assert one.updates.staged is None
            with pytest.raises(VersionGone, match="version 1 was released"):
                list(old)
            comes.set()
            await one.load(2)

    with served() as run:
        asyncio.run(scenario())


def test_a_closed_replica_leaves_no_permission_and_no_part_in_the_quorum_behind() -> None:
    async def scenario() -> None:
        async with replica(run.client("two")) as two:
            async with replica(run.client("one")) as one:
                run.publish(1)
                await asyncio.gather(one.staged(1), two.staged(1))
                assert await one.updates.permission(1)
            # when one is closed, while its connection lives
            await two.load(1)
            # then
            session = next(each for each in run.trainer.status().sessions if each.name == "one")
            assert session.loaded is None
            assert not session.weights

    with served(max_swapping=1) as run:
        asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def test_a_connection_is_one_replica() -> None:
    async def scenario() -> None:
        queue = run.client("replica")
        run.publish(1)
        async with replica(queue, 0) as one:
            other = Replica(queue)
            # when
            with pytest.raises(ConfigError, match="replica takes weight updates for another engine already"):
                other.updates.start()
            await other.updates.close()  # of one that never had the place
            # then
            await one.load(1)
        # and a closed one frees the place
        async with replica(queue, 1) as later:
            run.publish(2)
            await later.load(2)

    with served() as run:
        asyncio.run(scenario())


def test_a_trainer_killed_in_the_middle_leaves_the_old_version_current() -> None:
    with served() as run:
        run.publisher.close()
        with Child(publish_until_killed, run.server.addresses[-1]) as child:
            assert child.hear() == "in the middle"
            child.kill()

        async def scenario() -> None:
            async with replica(run.client("replica"), 0) as one:
                update = await one.staged(1)
                assert np.asarray(dict(update.arrays())["w"]).max() == 1.0

        asyncio.run(scenario())
