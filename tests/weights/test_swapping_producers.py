"""What a producer asks of the ledger when versions come and go, and what it leaves behind when it ends."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Set
from typing import Any

import pytest
from replica_runs import LIMIT_S, Replica, Served, replica, served
from scripted_transport import scripted

import asyncflow_sdk as af
from asyncflow_sdk.ledger import Ledger
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.queue import LoopPort
from asyncflow_sdk.testing import EchoRollout
from asyncflow_sdk.testing.echo import weights
from asyncflow_sdk.types.events import Loaded


@contextlib.contextmanager
def run_for(**limits: Any) -> Iterator[Served]:
    """A run whose version 0 is published, with a task to generate for."""
    with served(**limits) as run:
        run.trainer.declare("train", needs=["response_ids"], batch_rows=4)
        run.trainer.declare(
            "rollout", needs=["prompt_ids"], gives=["response_ids", "logprobs", "version_spans"], admits=True
        )
        run.publish(0, weights(0))
        yield run


async def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"never came: {what}"
        await asyncio.sleep(0.01)


def on(run: Served, version: int, worker: str = "replica") -> bool:
    return any(isinstance(e, Loaded) and (e.worker, e.version) == (worker, version) for e in run.events)


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def permitted(other: Replica, version: int) -> None:
    await other.staged(version)
    assert await asyncio.wait_for(other.updates.permission(version), LIMIT_S)


@pytest.mark.parametrize("swap", ["drain", "boundary"])
def test_what_was_replaced_is_not_asked_for_while_the_newest_is_fetched(
    swap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = scripted(monkeypatch)
    asked: list[int] = []
    answer = Ledger._swap

    def counted(ledger: Any, session: Any, command: Any) -> Any:
        if session.name == "replica":
            asked.append(command.version)
        return answer(ledger, session, command)

    monkeypatch.setattr(Ledger, "_swap", counted)

    async def scenario() -> None:
        producer = asyncio.create_task(af.Producer(run.client("replica"), EchoRollout(), swap=swap).run())
        await until(lambda: on(run, 0), "version 0")
        # given a version that another has the permission for
        other, may_come = LoopPort(run.client("other")._port.connection), [threading.Event(), threading.Event()]
        receiver.script = [lambda r, m: (may_come[m.version - 1].wait(LIMIT_S), None)[1]] * 2
        run.publish(1, weights(1))
        await other.send(cmd.AwaitVersion(after=0, timeout_s=LIMIT_S))
        await other.send(cmd.Staged(version=1))
        await other.send(cmd.Swap(version=1, timeout_s=LIMIT_S))
        may_come[0].set()
        await until(lambda: [e for e in run.states("staged") if e.version == 1], "version 1")
        # when the next one replaces it, and takes long to come
        run.publish(2, weights(2))
        await asyncio.sleep(0.3)
        # then
        assert len(asked) < 5
        await other.send(cmd.Loaded(version=1))
        may_come[1].set()
        await until(lambda: on(run, 2), "version 2")
        await end(producer)

    with run_for(max_swapping=1) as run:
        asyncio.run(scenario())


class Slow(EchoRollout):
    """Says when a load is under way; the load of version 1 has no end."""

    def __init__(self) -> None:
        super().__init__()
        self.loading = asyncio.Event()

    async def load_weights(self, update: af.WeightUpdate) -> Set[str]:
        if update.version == 1:
            self.loading.set()
            await asyncio.sleep(10 * LIMIT_S)
        return await super().load_weights(update)


class Unclosable(Slow):
    async def close(self) -> None:
        raise af.errors.EngineError("cannot be closed")  # type: ignore[attr-defined]


@pytest.mark.parametrize("engine", [Slow, Unclosable])
def test_a_producer_that_is_cancelled_while_it_loads_keeps_nobody_waiting(engine: Any) -> None:
    async def scenario() -> None:
        loads = engine()
        producer = asyncio.create_task(af.Producer(run.client("replica"), loads).run())
        await until(lambda: on(run, 0), "version 0")
        run.publish(1, weights(1))
        await asyncio.wait_for(loads.loading.wait(), LIMIT_S)
        # when, in a process that lives on
        await end(producer)
        # then
        async with replica(run.client("other"), 0) as other:
            await permitted(other, 1)
        assert next(each for each in run.trainer.status().sessions if each.name == "replica").loaded is None

    with run_for(max_swapping=1) as run:
        asyncio.run(scenario())
