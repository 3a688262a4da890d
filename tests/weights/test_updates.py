"""Versions on a replica: fetched behind, the newest first; a loop of one's own loads them, whatever fails on the way."""

import asyncio
import gc
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import xxhash
from flaky_proxy import WHOLE, FlakyProxy
from replicas import LIMIT_S, PROBE, Served, load, model, value_of
from scripted_transport import Scripted, ScriptedReceiver, fails, until_interrupted
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import (
    ConfigError,
    DeadlineExceeded,
    DigestMismatch,
    MemoryFull,
    VersionGone,
    WeightMismatch,
    WireError,
)
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.queue import Connection, LoopPort
from asyncflow_sdk.testing import EchoRollout
from asyncflow_sdk.testing.memory import MemorySender
from asyncflow_sdk.types import Manifest, Probe, TensorInfo
from asyncflow_sdk.types.manifest import BUCKET_BYTES
from asyncflow_sdk.weights import ReplicaSubscriber, TransportSubscriber


@pytest.fixture
def run(scripted: type[Scripted]) -> Iterator[Served]:
    with Served("scripted") as run:
        yield run


@pytest.fixture
def receiver(run: Served, scripted: type[Scripted]) -> ScriptedReceiver:
    """Of every replica of the run."""
    return scripted.end


class Gate:
    """A fetch that goes on once it is open."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, receiver: ScriptedReceiver, manifest: Manifest) -> None:
        self.reached.set()
        assert self.open.wait(LIMIT_S)


# ---- versions come


def test_a_loop_loads_and_commits_each_newest_version(served: Served) -> None:
    served.publish(0, probe=PROBE)
    seen, updates = [], served.replica()
    for update in updates:
        with update:
            seen.append((update.version, value_of(update)))
            assert update.probe == (PROBE if update.version == 0 else None)
        assert updates.loaded == update.version == served.loaded()
        if update.version == 3:
            served.run.queue.end()
        else:
            served.publish(update.version + 1)
    assert seen == [(version, float(version)) for version in range(4)]


def test_the_same_on_an_event_loop(served: Served) -> None:
    async def loop(updates: TransportSubscriber) -> list[int]:
        seen = []
        async with updates:
            async for update in updates:
                async with update:
                    await asyncio.sleep(0)
                    value_of(update)
                seen.append(update.version)
                if update.version == 2:
                    await asyncio.to_thread(served.run.queue.end)
                else:
                    await asyncio.to_thread(served.publish, update.version + 1)
        return seen

    served.publish(0)
    assert asyncio.run(loop(served.replica())) == [0, 1, 2]


def test_a_newer_version_replaces_one_that_is_not_taken(run: Served, receiver: ScriptedReceiver) -> None:
    updates = run.replica()
    run.publish(1)
    run.until("staged", 1)
    # when
    run.publish(5)
    # then the old one is released, and those passed over are counted
    assert run.until("staged", 5).skipped == 3
    until(lambda: receiver.held == [5], "the release of version 1")
    assert load(updates, 5) == 5.0


def test_a_version_that_is_not_entered_is_passed_over(run: Served) -> None:
    run.publish(1)
    versions = iter(run.replica())
    passed = next(versions)
    run.publish(2)
    with next(versions) as update:
        assert (update.version, value_of(update)) == (2, 2.0)
    with pytest.raises(af.AsyncFlowError, match="version 1 was left already"), passed:
        pass


def test_a_newer_version_stops_the_fetch_of_an_older_one(run: Served, receiver: ScriptedReceiver) -> None:
    # given a fetch of version 1 that goes on until it is interrupted
    began = threading.Event()
    receiver.script = [lambda r, m: (began.set(), until_interrupted(r, m))]
    updates = run.replica()
    run.publish(1)
    assert began.wait(LIMIT_S)
    # when
    run.publish(2)
    # then
    assert load(updates, 2) == 2.0
    assert receiver.fetched == [(1, None), (2, None)]
    assert run.states("failed") == []  # nothing failed: it was wanted no more


def test_a_replica_slower_than_the_trainer_is_not_interrupted_twice_in_a_row(
    run: Served, receiver: ScriptedReceiver
) -> None:
    # given a trainer that publishes during every fetch
    def publish_and_wait(end: ScriptedReceiver, manifest: Manifest) -> None:
        run.publish(manifest.version + 1)
        if manifest.version % 2:
            until_interrupted(end, manifest)

    receiver.script = [publish_and_wait] * 4
    updates = run.replica()
    run.publish(1)
    assert load(updates, 5) == 5.0
    assert [version for version, _ in receiver.fetched] == [1, 2, 3, 4, 5]
    assert [e.version for e in run.states("staged")] == [2, 4, 5]


def test_a_version_that_is_gone_is_no_failure_when_there_is_a_newer_one(
    run: Served, receiver: ScriptedReceiver
) -> None:
    # given a replica that begins to fetch a version when two more are published, and it is kept no longer
    receiver.script = [lambda r, m: [run.publish(version) for version in (2, 3, 4)]]
    updates = run.replica()
    run.publish(1)
    assert load(updates, 4) == 4.0
    assert receiver.fetched[0] == (1, None)
    assert run.states("failed") == []


# ---- what fails


def test_a_fetch_that_fails_is_reported_and_the_next_version_is_fetched_at_once(
    run: Served, receiver: ScriptedReceiver
) -> None:
    errors = [
        DigestMismatch("version 1: bucket 0 of chunk 0 differs"), WireError("nobody listens"), OSError(5, "I/O error"),
        TimeoutError("no answer"), MemoryFull("no room"), VersionGone("segment w1 is not there"),
    ]  # fmt: skip
    updates = run.replica()
    for version, error in enumerate(errors):
        receiver.script = [fails(error)]
        run.publish(2 * version)
        assert run.until("failed", 2 * version).detail == f"{type(error).__name__}: {error}"
        run.publish(2 * version + 1)
        assert load(updates, 2 * version + 1) == 2 * version + 1


def test_a_version_that_failed_comes_again_and_without_its_base(run: Served, receiver: ScriptedReceiver) -> None:
    updates = run.replica()
    for version in (1, 2):
        run.publish(version)
        load(updates, version)
    assert receiver.held == [2]  # until the next is loaded
    receiver.script = [fails(DigestMismatch("a delta that does not fit"))]  # it may be the base that is wrong
    run.publish(3)
    assert load(updates, 3) == 3.0
    run.publish(4)
    assert load(updates, 4) == 4.0
    assert receiver.fetched == [(1, None), (2, 1), (3, 2), (3, None), (4, 3)]
    updates.close()
    assert receiver.held == []


def test_an_exception_keeps_the_old_version_and_the_version_comes_again(run: Served) -> None:
    run.publish(1)
    versions = iter(run.replica(loaded=0))
    with pytest.raises(ZeroDivisionError), next(versions):
        raise ZeroDivisionError("of my own")
    assert run.loaded() == 0
    with next(versions) as update:
        assert (update.version, value_of(update)) == (1, 1.0)
    assert run.loaded() == 1
    # a tensor that was not handed out was not taken
    run.publish(2)
    with pytest.raises(WeightMismatch, match="2 of 3 tensors were not taken by the engine: b, s"):
        with next(versions) as update:
            next(iter(update.arrays()))
    # and what the engine says that it took counts
    run.publish(3)
    with pytest.raises(WeightMismatch, match=r"3 of 3 tensors were not taken.*"), next(versions) as update:
        update.took(set())
    run.publish(4)
    with next(versions) as update:
        update.took(set(model(1)))
    assert run.loaded() == 4
    failed = [e.detail.partition(":")[0] for e in run.states("failed")]
    assert failed == ["ZeroDivisionError", "WeightMismatch", "WeightMismatch"]


def test_a_wait_says_what_fetching_failed_for(run: Served, receiver: ScriptedReceiver) -> None:
    receiver.script = [fails(WireError("nobody listens at 10.0.0.1:7000"))] * 1000
    run.publish(0)
    updates = run.replica(timeout_s=0.1)
    run.until("failed", 0)
    with pytest.raises(DeadlineExceeded, match="version 0 could not be fetched: WireError: nobody listens at 10"):
        next(iter(updates))


def test_tensors_that_do_not_fit_their_chunks_end_the_loop_by_name(run: Served, receiver: ScriptedReceiver) -> None:
    def damaged(*arguments: Any, **options: Any) -> Any:
        fetched = fetch(*arguments, **options)
        fetched.manifest = Manifest(1, (TensorInfo("w", "float32", (1 << 20,), 0, 0),), fetched.manifest.chunks)
        return fetched

    fetch, receiver.fetch = receiver.fetch, damaged  # type: ignore[method-assign]
    run.publish(1)
    with pytest.raises(WeightMismatch, match="tensor 'w'"):
        next(iter(run.replica()))
    assert "does not lie in chunk 0" in run.until("failed", 1).detail
    assert receiver.held == []


def test_shared_memory_that_is_not_in_sight_is_refused_with_another_transport_named(served: Served) -> None:
    served.publish(0)
    far = served.client("far", shared_memory=False)
    with far.weight_updates(timeout_s=LIMIT_S) as updates, pytest.raises(ConfigError, match="tcp"):
        next(iter(updates))


def renamed(manifest: bytes) -> bytes:
    other = msgspec.msgpack.decode(manifest)
    other[1][0][0] = "v"
    return msgspec.msgpack.encode(other)


MANIFEST = Manifest(1, (TensorInfo("w", "float32", (0,), 0, 0),), ())
PLAIN = msgspec.msgpack.encode(MANIFEST)
UNREADABLE = "ProtocolError: version 1: the manifest of rank 0's part cannot be read"


@pytest.mark.parametrize(
    ("manifest", "probe", "message"),
    [
        (renamed(PLAIN), b"", "DigestMismatch: version 1: the manifest of rank 0's part differs from what was published"),
        (b"\xc1", b"", UNREADABLE),
        (PLAIN[:-9], b"", UNREADABLE),
        (b"\x91" * 100_000, b"", UNREADABLE),
        (msgspec.msgpack.encode((1, (("w", "float32", (1 << 40,), 0, 0),), ((4 << 40, ()),), 0)), b"", UNREADABLE),
        (PLAIN, msgspec.msgpack.encode({"prompt_ids": [[0]]}), "ProtocolError: version 1: its probe cannot be read"),
        (PLAIN, msgspec.msgpack.encode((((0,),), ((1, 2),), ((-1.0,),))), "ProtocolError: version 1: its probe"),
    ],
)  # fmt: skip
def test_a_damaged_manifest_or_probe_costs_its_version_and_no_replica(
    manifest: bytes, probe: bytes, message: str, run: Served
) -> None:
    async def publish_damaged() -> None:
        connection = Connection(run.address, "stranger")
        port = LoopPort(connection)
        part = cmd.VersionPart(
            manifest=manifest, transport="scripted", where=where, root=MANIFEST.root, nbytes=16, outlives=True
        )
        for command in (
            cmd.OpenPublisher(), cmd.Announce(version=1), cmd.Publish(version=1, part=part, probe=probe), cmd.ClosePublisher(),
        ):  # fmt: skip
            await port.send(command)
        await connection.wire.aclose_loop()
        connection.close()

    where, updates = MemorySender().send(MANIFEST), run.replica()
    asyncio.run(publish_damaged())
    assert run.until("failed", 1).detail.startswith(message)
    run.publish(2, probe=Probe(((0,),), ((1,),), ((-1.0,),)))
    assert load(updates, 2) == 2.0


# ---- waiting, permissions and ends


def test_waiting_has_an_end_that_says_for_what() -> None:
    with Served(max_swapping=1) as run:
        updates = run.replica("mine", timeout_s=0.1)
        with pytest.raises(
            DeadlineExceeded, match="no version was published and fetched in 0.1 s; this replica has no"
        ):
            next(iter(updates))
        # and a permission, too
        run.publish(1)
        with next(iter(run.replica("other"))) as held:
            run.until("staged", 1, "mine")
            with pytest.raises(DeadlineExceeded, match="version 1 could not be loaded in 0.1 s: "):
                next(iter(updates))
            value_of(held)


def test_a_closed_replica_keeps_no_permission_and_no_part_in_the_quorum() -> None:
    with Served(max_swapping=1) as run:
        one, two = run.replica("one"), run.replica("two")
        run.publish(1)
        next(iter(one))
        run.until("staged", 1, "two")
        one.close()
        assert load(two, 1) == 1.0
        session = next(each for each in run.run.queue.status().sessions if each.name == "one")
        assert (session.loaded, session.replica, session.weights) == (None, False, "")


def test_a_connection_is_one_replica(served: Served) -> None:
    client = served.client("mine")
    served.publish(1)
    with client.weight_updates(timeout_s=LIMIT_S) as updates:
        with pytest.raises(ConfigError, match="mine takes weight updates for another engine already"):
            client.weight_updates(loaded=0)
        with pytest.raises(ConfigError, match="mine takes weight updates for another engine already"):
            asyncio.run(af.EngineProducer(client.queue, EchoRollout()).run())
        assert load(updates, 1) == 1.0  # it is not disturbed
    with client.weight_updates(timeout_s=LIMIT_S) as updates:
        assert load(updates, 1) == 1.0


def test_a_replica_that_is_closed_at_once_leaves_nothing_unawaited(served: Served) -> None:
    async def open_and_close() -> None:
        replica = ReplicaSubscriber(served.run.queue, None, asyncio.Event())
        await replica.open()
        await replica.close()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        asyncio.run(open_and_close())
        gc.collect()
    assert [str(each.message) for each in seen] == []


def test_closing_interrupts_a_fetch(run: Served, receiver: ScriptedReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fetcher", "subscriber"):
        monkeypatch.setattr(f"asyncflow_sdk.weights.{module}.CLOSE_S", LIMIT_S)
    began = threading.Event()
    receiver.script = [lambda r, m: (began.set(), until_interrupted(r, m))]
    updates = run.replica()
    run.publish(1)
    assert began.wait(LIMIT_S)
    updates.close()
    assert receiver.interrupted.is_set()
    assert receiver.closed.is_set()


def test_closing_does_not_wait_for_a_fetch_that_cannot_be_interrupted(
    run: Served, receiver: ScriptedReceiver
) -> None:
    gate = Gate()
    receiver.script = [gate]
    updates = run.replica()
    run.publish(1)
    assert gate.reached.wait(LIMIT_S)
    updates.close()  # after seconds
    assert not receiver.closed.is_set()  # its thread is still at it
    gate.open.set()


def test_closing_the_run_ends_a_wait_for_versions(served: Served) -> None:
    client = served.client("mine")
    served.publish(1)
    updates = client.weight_updates(timeout_s=LIMIT_S)
    ended = in_thread(lambda: [update.version for update in updates])
    served.until("failed", 1, "mine")  # passed over, so that it waits for the next
    client.close()
    assert ended() == [1]
    with pytest.raises(af.AsyncFlowError, match="closed"):
        next(iter(updates))


def test_a_version_that_came_for_a_cancelled_loop_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, wrap = list[Any](), asyncio.wrap_future
    monkeypatch.setattr(asyncio, "wrap_future", lambda future: waited.append(future) or wrap(future))

    async def cancelled(updates: TransportSubscriber) -> None:
        async def loop() -> None:
            async for _ in updates:
                raise AssertionError("it got the version")

        task = asyncio.create_task(loop())
        await asyncio.sleep(0)
        run.publish(1)
        until(lambda: waited[0].done(), "version 1 for a waiter that has not heard of it")
        task.cancel()  # in the turn in which it would have got the version
        with pytest.raises(asyncio.CancelledError):
            await task

    with Served(max_swapping=1) as run:
        one, two = run.replica("one"), run.replica("two")
        asyncio.run(cancelled(one))
        assert load(two, 1) == 1.0
        assert load(one, 1) == 1.0  # it comes again


# ---- through a network


@pytest.fixture
def far(scripted: type[Scripted]) -> Iterator[tuple[Served, FlakyProxy, af.Run]]:
    """A run, a proxy before its server, and a client that reaches it there."""
    with Served("scripted", address="tcp://127.0.0.1:0", insecure=True, max_swapping=1) as run:
        proxy = FlakyProxy(int(run.run.address.rpartition(":")[2]), pieces=WHOLE)
        with af.connect(proxy.address, insecure=True, shared_memory=False, name="far") as client:
            yield run, proxy, client
            proxy.resume()
        proxy.close()


def test_a_commit_that_is_cancelled_is_a_commit(far: tuple[Served, FlakyProxy, af.Run]) -> None:
    """A loop that is cancelled while it leaves a version goes on as if it had been cancelled after."""
    run, proxy, client = far
    leaving = threading.Event()

    async def loop(updates: TransportSubscriber) -> None:
        async for update in updates:
            async with update:
                value_of(update)
                proxy.halt(there=False)  # the answer to the commit is late
                leaving.set()

    async def cancelled(updates: TransportSubscriber) -> None:
        task = asyncio.create_task(loop(updates))
        await asyncio.to_thread(leaving.wait, LIMIT_S)
        task.cancel()
        proxy.resume()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert updates.loaded == 1

    run.publish(1)
    with client.weight_updates(timeout_s=LIMIT_S) as updates:
        asyncio.run(cancelled(updates))
        run.publish(2)
        assert load(updates, 2) == 2.0


def test_a_replaced_version_is_asked_for_once_while_the_newest_is_fetched(
    far: tuple[Served, FlakyProxy, af.Run], scripted: type[Scripted]
) -> None:
    run, proxy, client = far
    gate = Gate()
    with client.weight_updates(timeout_s=LIMIT_S) as updates:
        run.publish(1)
        run.until("staged", 1, "far")
        scripted.end.script = [gate]
        run.publish(2)
        assert gate.reached.wait(LIMIT_S)
        before = proxy.there
        versions = in_thread(lambda: next(iter(updates)).version)
        gate.open.wait(0.3)  # in which it could ask thousands of times
        gate.open.set()
        assert versions() == 2
        assert proxy.there - before < 20_000


def test_an_update_names_what_no_version_holds(served: Served) -> None:
    """The names are part of the version's digest, so no two versions with other names are taken for equal."""
    served.publish(0, untrained=["mtp.norm.weight"])
    with next(iter(served.replica())) as update:
        update.took(update.tensors)
        assert update.untrained == ("mtp.norm.weight",)
    assert Manifest(1, (), (), untrained=("mtp.norm.weight",)).root != Manifest(1, (), ()).root
    assert Manifest(1, (), ()).root == xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(((), (), BUCKET_BYTES)))
