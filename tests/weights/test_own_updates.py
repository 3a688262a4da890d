"""Weights for a loop of one's own: what it loads is committed, whatever it raises or however it is cancelled."""

import asyncio
import contextlib
import threading
from typing import Any

import pytest
from replica_runs import LIMIT_S, model, probe_of, served, values
from scripted_transport import fails, scripted
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, DeadlineExceeded, WeightMismatch, WireError
from asyncflow_sdk.ledger import Ledger
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.testing import EchoRollout
from asyncflow_sdk.types.events import WeightState
from asyncflow_sdk.weights import OwnUpdates, prefetch


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "RETRY_S", 0.01)


def test_a_loop_of_ones_own_commits_what_it_loaded() -> None:
    with af.serve() as run, af.connect(run.address, name="mine") as mine:
        publisher = run.weight_publisher()
        publisher.publish(0, model(0).items(), probe=probe_of(0)).wait()
        seen = []
        updates = mine.weight_updates(timeout_s=LIMIT_S)
        for update in updates:
            with update:
                seen.append((update.version, values(update)))
                assert update.probe == probe_of(0) if update.version == 0 else update.probe is None
            assert updates.loaded == update.version
            assert loaded(run, mine) == update.version
            if update.version == 3:
                run.queue.end()
            else:
                publisher.publish(update.version + 1, model(update.version + 1).items())
        assert seen == [(version, {float(version)}) for version in range(4)]
        publisher.close()


def loaded(run: af.Run, client: af.Run) -> int | None:
    return next(each.loaded for each in run.queue.status().sessions if each.id == client.session)


def test_an_exception_keeps_the_old_version_and_the_next_try_may_do(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    with af.serve(on_event=events.append) as run, af.connect(run.address, name="mine") as mine:
        with run.weight_publisher() as publisher:
            publisher.publish(1, model(1).items())
            versions = iter(mine.weight_updates(loaded=0, timeout_s=LIMIT_S))
            with pytest.raises(ZeroDivisionError), next(versions):
                raise ZeroDivisionError("of my own")
            assert loaded(run, mine) == 0
            # what was not handed out was not taken
            with pytest.raises(WeightMismatch, match="2 of 3 tensors were not taken by the engine: b, s"):
                with next(versions) as update:
                    next(iter(update.arrays()))
            with pytest.raises(WeightMismatch, match="3 of 3 tensors were not taken.*"):
                with next(versions) as update:
                    update.took(set())
            # then
            with next(versions) as update:
                assert update.version == 1
                update.took(set(model(1)))
            assert loaded(run, mine) == 1
    failed = [e.detail for e in events if getattr(e, "state", "") == "failed"]
    assert [text.split(":")[0] for text in failed] == ["ZeroDivisionError", "WeightMismatch", "WeightMismatch"]


def test_a_version_that_is_not_entered_is_passed_over() -> None:
    with af.serve() as run, run.weight_publisher() as publisher, af.connect(run.address, name="mine") as mine:
        publisher.publish(1, model(1).items())
        versions = iter(mine.weight_updates(timeout_s=LIMIT_S))
        passed = next(versions)
        publisher.publish(2, model(2).items())
        with next(versions) as update:
            assert update.version == 2
            list(update.arrays())
        with pytest.raises(af.AsyncFlowError, match="version 1 was left already"), passed:
            pass


def test_waiting_has_an_end_that_says_for_what() -> None:
    events: list[Any] = []
    with af.serve(max_swapping=1, on_event=events.append) as run, af.connect(run.address, name="mine") as mine:
        updates = mine.weight_updates(timeout_s=0.1)
        with pytest.raises(
            DeadlineExceeded, match="no version was published and fetched in 0.1 s; this replica has no"
        ):
            next(iter(updates))
        # and of a permission, too
        with run.weight_publisher() as publisher, af.connect(run.address, name="other") as other:
            publisher.publish(1, model(1).items()).wait()
            with next(iter(other.weight_updates(timeout_s=LIMIT_S))) as held:
                until(
                    lambda: any(
                        (e.worker, e.state) == ("mine", "staged") for e in events if isinstance(e, WeightState)
                    ),
                    "a version that is staged",
                )
                with pytest.raises(DeadlineExceeded, match="version 1 could not be loaded in 0.1 s: "):
                    next(iter(updates))
                list(held.arrays())


def test_the_same_on_an_event_loop() -> None:
    async def scenario(mine: af.Run) -> list[int]:
        seen = []
        async with mine.weight_updates(timeout_s=LIMIT_S) as updates:
            async for update in updates:
                async with update:
                    await asyncio.sleep(0)
                    list(update.arrays())
                seen.append(update.version)
                if update.version == 2:
                    await asyncio.to_thread(mine.queue.end)
                else:
                    publisher.publish(update.version + 1, model(0).items())
        return seen

    with af.serve() as run, run.weight_publisher() as publisher, af.connect(run.address, name="mine") as mine:
        publisher.publish(0, model(0).items())
        assert asyncio.run(scenario(mine)) == [0, 1, 2]


def asked_by(monkeypatch: pytest.MonkeyPatch, worker: str) -> list[int]:
    """The versions that a replica asks to load, request by request; of runs that are served from now on."""
    asked: list[int] = []
    swap = Ledger._swap

    def counted(ledger: Any, session: Any, command: Any) -> Any:
        if session.name == worker:
            asked.append(command.version)
        return swap(ledger, session, command)

    monkeypatch.setattr(Ledger, "_swap", counted)
    return asked


def test_a_version_that_was_replaced_before_it_was_taken_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, asked = scripted(monkeypatch), asked_by(monkeypatch, "mine")
    with served() as run:
        updates = OwnUpdates(run.client("mine"), timeout_s=LIMIT_S)
        run.publish(1)
        until(lambda: run.states("staged", "mine"), "a version that is staged")
        comes = threading.Event()
        receiver.script = [lambda r, m: (comes.wait(LIMIT_S), None)[1]]
        run.publish(2)
        # when it wants one while the newest is still being fetched
        threading.Timer(0.3, comes.set).start()
        assert next(iter(updates)).version == 2
        # then
        assert asked == [1, 2]
        updates.close()


def test_a_closed_loop_keeps_nobody_waiting() -> None:
    with served(max_swapping=1) as run:
        one, two = (OwnUpdates(run.client(name), timeout_s=LIMIT_S) for name in ("one", "two"))
        run.publish(1)
        for _ in one:
            break
        one.close()
        with next(iter(two)) as update:
            assert values(update) == {1.0}
        two.close()


def test_a_connection_is_one_replica() -> None:
    with served() as run:
        queue = run.client("mine")
        run.publish(1)
        with OwnUpdates(queue, timeout_s=LIMIT_S) as updates:
            with pytest.raises(ConfigError, match="mine takes weight updates for another engine already"):
                OwnUpdates(queue, loaded=0)
            with pytest.raises(ConfigError, match="mine takes weight updates for another engine already"):
                asyncio.run(af.Producer(queue, EchoRollout()).run())
            with next(iter(updates)) as update:  # which did not notice
                list(update.arrays())
        with OwnUpdates(queue, timeout_s=LIMIT_S) as updates, next(iter(updates)) as update:
            list(update.arrays())


def test_a_commit_that_is_cancelled_is_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that is cancelled while it leaves a version goes on as if it had been cancelled after."""
    receiver = scripted(monkeypatch)
    with served() as run:
        updates = OwnUpdates(run.client("mine"), timeout_s=LIMIT_S)
        run.publish(1)
        committing = threading.Event()
        send = updates._updates._port.send

        async def slow(command: Any) -> Any:
            reply = await send(command)
            if isinstance(command, cmd.Loaded):
                committing.set()
                await asyncio.sleep(0.2)
            return reply

        updates._updates._port.send = slow  # type: ignore[method-assign]

        async def load() -> None:
            async for update in updates:
                async with update:
                    list(update.arrays())

        async def cancelled() -> None:
            task = asyncio.create_task(load())
            await asyncio.to_thread(committing.wait, LIMIT_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert updates.loaded == 1

        asyncio.run(cancelled())
        # and what fails afterwards is told, and tried again
        receiver.script = [fails(WireError("nobody listens"))]
        run.publish(2)
        with next(iter(updates)) as update:
            assert values(update) == {2.0}
        assert [e.version for e in run.states("failed", "mine")] == [2]
        updates.close()


def test_a_version_that_came_for_a_cancelled_loop_is_given_back() -> None:
    async def cancelled(updates: OwnUpdates) -> None:
        async def load() -> None:
            async for _ in updates:
                raise AssertionError("it heard of it")

        task = asyncio.create_task(load())
        await asyncio.sleep(0)
        run.publish(1)
        until(lambda: run.states("swapping", "one"), "the permission to load it")
        task.cancel()  # in the turn in which it would have heard of it
        with pytest.raises(asyncio.CancelledError):
            await task

    with served(max_swapping=1) as run:
        one, two = (OwnUpdates(run.client(name), timeout_s=LIMIT_S) for name in ("one", "two"))
        asyncio.run(cancelled(one))
        with next(iter(two)) as update:
            list(update.arrays())
        with next(iter(one)) as update:  # it comes again
            assert values(update) == {1.0}
        one.close()
        two.close()


def test_closing_the_run_ends_a_wait_for_versions() -> None:
    with af.serve() as run:
        mine = af.connect(run.address, name="mine")
        updates = mine.weight_updates(timeout_s=LIMIT_S)
        ended: list[Any] = []
        thread = threading.Thread(target=lambda: ended.append(list(updates)))
        thread.start()
        mine.close()
        thread.join(LIMIT_S)
        assert ended == [[]]
        with pytest.raises(af.AsyncFlowError, match="closed"):
            next(iter(updates))


def test_what_no_further_try_mends_is_raised() -> None:
    with af.serve() as run, run.weight_publisher() as publisher:
        with af.connect(run.address, name="far", shared_memory=False) as far:
            publisher.publish(0, model(0).items())
            with pytest.raises(ConfigError, match="tcp"):
                next(iter(far.weight_updates(timeout_s=LIMIT_S)))


def test_a_replica_that_fails_to_fetch_goes_on_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = scripted(monkeypatch)
    receiver.script = [fails(WireError("nobody listens at 10.0.0.1:7000"))]
    with af.serve() as run, run.weight_publisher() as publisher, af.connect(run.address, name="mine") as mine:
        publisher.publish(0, model(0).items())
        with next(iter(mine.weight_updates(timeout_s=LIMIT_S))) as update:
            assert values(update) == {0.0}


def test_a_wait_says_what_fetching_failed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = scripted(monkeypatch)
    receiver.script = [fails(WireError("nobody listens at 10.0.0.1:7000"))] * 1000
    events: list[Any] = []
    with af.serve(on_event=events.append) as run, run.weight_publisher() as publisher:
        publisher.publish(0, model(0).items()).wait()
        updates = run.weight_updates(timeout_s=0.5)
        with contextlib.suppress(DeadlineExceeded):  # it begins, and perhaps has not tried once before it is over
            next(iter(updates))
        until(lambda: any(getattr(e, "state", "") == "failed" for e in events), "a fetch that fails")
        with pytest.raises(DeadlineExceeded, match="version 0 could not be fetched: WireError: nobody listens at 10"):
            next(iter(updates))
