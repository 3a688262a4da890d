"""Versions from a trainer to replicas through a queue: numbers only rise, the newest wins, and every tensor is proven."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from children import Child
from weight_children import publish_until_killed

from asyncflow_sdk.errors import ConfigError, DigestMismatch, WeightMismatch
from asyncflow_sdk.interfaces import WeightUpdate
from asyncflow_sdk.queue import Connection, QueueServer, TransferQueue, open_queue
from asyncflow_sdk.testing import EchoRollout
from asyncflow_sdk.testing.echo import weights
from asyncflow_sdk.weights import WeightPublisher, WeightUpdates, check_names, sync


@contextlib.contextmanager
def connected(server: QueueServer, name: str) -> Iterator[TransferQueue]:
    connection = Connection(server.addresses[-1], name)
    yield open_queue(connection)
    connection.close()


@pytest.fixture(params=["ipc", "tcp"])
def server(request: pytest.FixtureRequest) -> Iterator[QueueServer]:
    server = QueueServer(["tcp://127.0.0.1:0"] if request.param == "tcp" else [])
    yield server
    server.close()


@pytest.fixture
def trainer(server: QueueServer) -> Iterator[TransferQueue]:
    with connected(server, "trainer") as queue:
        yield queue


@pytest.fixture
def replica(server: QueueServer) -> Iterator[TransferQueue]:
    with connected(server, "replica") as queue:
        yield queue


def model(version: int) -> dict[str, Any]:
    return {
        "w": np.full(1000, version, np.float32),
        "b": np.full((3, 5), version, ml_dtypes.bfloat16),
        "s": np.array(version, np.int64),
    }


async def next_of(updates: WeightUpdates, after: int) -> WeightUpdate:
    async for update in updates.staged(after):
        return update
    raise AssertionError("no version came")


def values(update: WeightUpdate) -> set[float]:
    return {float(v) for _, array in update.arrays() for v in np.asarray(array, np.float64).reshape(-1)}


def test_a_replica_takes_up_each_newest_version(trainer: TransferQueue, replica: TransferQueue) -> None:
    # given
    publisher = WeightPublisher(trainer)

    async def scenario() -> None:
        updates = WeightUpdates(replica, 0)
        waiting = asyncio.create_task(next_of(updates, 0))
        # when versions are published before it looks again
        publisher.publish(1, model(1).items())
        update = await waiting
        # then it has the first, whole
        assert update.version == 1
        assert values(update) == {1.0}
        await updates.commit(update, set(model(1)))
        assert updates.loaded == 1
        # and then the newest: those in between are passed over
        for version in range(2, 8):
            publisher.publish(np.int64(version), model(version).items())  # type: ignore[arg-type]
        update = await next_of(updates, update.version)
        assert update.version == 7
        assert values(update) == {7.0}
        updates.close()
        await replica._port.connection.wire.aclose_loop()

    asyncio.run(scenario())
    publisher.close()


def test_the_end_of_the_stream_ends_the_versions(trainer: TransferQueue, replica: TransferQueue) -> None:
    async def scenario() -> list[int]:
        updates = WeightUpdates(replica, 0)
        collected = asyncio.create_task(collect(updates))
        await replica.aio.status()
        await replica.aio.end()
        return await collected

    async def collect(updates: WeightUpdates) -> list[int]:
        return [update.version async for update in updates.staged(-1)]

    WeightPublisher(trainer).publish(0, model(0).items())
    trainer.declare("rollout", needs=["p"], admits=True)
    assert asyncio.run(scenario()) in ([0], [])


def test_a_step_may_take_longer_than_any_one_request(
    trainer: TransferQueue, replica: TransferQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "ASK_AGAIN_S", 0.02)

    async def scenario() -> None:
        waiting = asyncio.create_task(next_of(WeightUpdates(replica, 0), 0))
        await asyncio.sleep(0.2)  # many requests come to their deadline
        WeightPublisher(trainer).publish(1, model(1).items())
        assert (await waiting).version == 1

    asyncio.run(scenario())


def test_numbers_never_go_back_and_a_refused_one_changes_nothing(
    trainer: TransferQueue, replica: TransferQueue
) -> None:
    # given
    publisher = WeightPublisher(trainer)
    publisher.publish(5, model(5).items())
    # when
    for version in (5, 4, 0, -1, 5):
        with pytest.raises(ConfigError, match=f"version {version} cannot be published: 5 is already current"):
            publisher.publish(version, model(99).items())
    # then the current one is still there to be fetched
    update = asyncio.run(next_of(WeightUpdates(replica, 0), 0))
    assert update.version == 5
    assert values(update) == {5.0}


def test_a_flipped_byte_is_found_before_an_engine_sees_it(
    server: QueueServer, trainer: TransferQueue, replica: TransferQueue
) -> None:
    # given an engine that has version 1, and a version 2 that is damaged where it lies
    publisher, engine = WeightPublisher(trainer), EchoRollout()

    async def scenario() -> None:
        updates = WeightUpdates(replica, 0)
        publisher.publish(1, weights(1).items())
        update = await next_of(updates, 0)
        await updates.commit(update, await engine.load_weights(update))
        manifest = publisher.publish(2, weights(2).items())
        segment, start, _ = msgspec.msgpack.decode(server.ledger.versions[2].where)
        place = start + 64 + next(t.offset for t in manifest.tensors if t.name == "head.weight")
        with (server.directory.path / segment).open("r+b") as file:
            file.seek(place)
            file.write(b"\xff")
        # when
        with pytest.raises(DigestMismatch, match=r"version 2: bucket 0 .*it holds .*head\.weight"):
            await next_of(updates, 1)
        # then the replica keeps its version, and takes up the next
        assert updates.loaded == 1
        assert float(engine._weights["scale"]) == 1.0
        publisher.publish(3, weights(3).items())
        update = await next_of(updates, 2)
        await updates.commit(update, await engine.load_weights(update))
        assert updates.loaded == 3

    asyncio.run(scenario())


def test_an_engine_that_takes_fewer_or_more_is_refused_by_name(
    trainer: TransferQueue, replica: TransferQueue
) -> None:
    # given
    WeightPublisher(trainer).publish(1, model(1).items())

    async def scenario() -> None:
        updates = WeightUpdates(replica, 0)
        update = await next_of(updates, 0)
        # when / then
        for names, reason in (
            ({"w"}, "version 1: 2 of 3 tensors were not taken by the engine: b, s"),
            ({"w", "b", "s", "lm_head"}, "version 1: 1 of 3 tensors were never published: lm_head"),
            (set(), "3 of 3 tensors were not taken by the engine: b, s, w"),
        ):
            with pytest.raises(WeightMismatch, match=reason):
                await updates.commit(update, names)
            assert updates.loaded == 0
        await updates.commit(update, {"w", "b", "s"})
        # and of many, some are named and the others counted
        with pytest.raises(WeightMismatch, match=r"30 of 3 tensors.*and 20 more"):
            check_names(update.manifest, {"w", "b", "s", *(f"x{i:02}" for i in range(30))})

    asyncio.run(scenario())


def test_an_engine_that_is_given_other_shapes_refuses_by_name(trainer: TransferQueue, replica: TransferQueue) -> None:
    WeightPublisher(trainer).publish(1, [("head.weight", np.zeros((7, 5, 4), np.float16))])
    update = asyncio.run(next_of(WeightUpdates(replica, 0), 0))
    with pytest.raises(WeightMismatch, match=r"tensor 'head\.weight' is float16\(7, 5, 4\)"):
        asyncio.run(EchoRollout().load_weights(update))


def test_a_slow_reader_that_comes_too_late_gets_the_newest(
    server: QueueServer, trainer: TransferQueue, replica: TransferQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a replica that learns of a version, and fetches it only when three more are published
    publisher = WeightPublisher(trainer)
    publisher.publish(1, [("w", np.full(1 << 19, 1, np.float32))])
    updates = WeightUpdates(replica, 0)
    receiver = updates._receiver("shm")
    fetch, fetched = receiver.fetch, []

    def slow(manifest: Any, where: bytes) -> WeightUpdate:
        fetched.append(manifest.version)
        if manifest.version == 1:
            for version in range(2, 5):
                publisher.publish(version, [("w", np.full(1 << 19, version, np.float32))])
        return fetch(manifest, where)

    monkeypatch.setattr(receiver, "fetch", slow)
    # when
    update = asyncio.run(next_of(updates, 0))
    # then
    assert fetched == [1, 4]
    assert update.version == 4
    assert values(update) == {4.0}


def test_a_trainer_killed_in_the_middle_leaves_the_old_version_current(
    server: QueueServer, replica: TransferQueue
) -> None:
    # given
    with Child(publish_until_killed, server.addresses[-1]) as child:
        assert child.hear() == "in the middle"
        # when
        child.kill()
    # then
    update = asyncio.run(next_of(WeightUpdates(replica, 0), 0))
    assert update.version == 1
    assert values(update) == {1.0}
    # and the next trainer goes on from there
    with connected(server, "another") as queue:
        WeightPublisher(queue).publish(2, model(2).items())
        assert asyncio.run(next_of(WeightUpdates(replica, 1), 1)).version == 2
