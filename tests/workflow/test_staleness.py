"""Synchronous, one step off and fully asynchronous, under each policy: the same code, with echo engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_runs import check_whole, declare_rollout, echo_workflow, events_of
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, PluginError
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.testing import EchoRollout, EchoTrain
from asyncflow_sdk.types import token_staleness

STEPS, BATCH, GROUP = 5, 8, 2


class HeavyTailed(EchoRollout):
    """Most responses are quick, and some take very long."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(**options)
        self._random = np.random.default_rng(seed)

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        await asyncio.sleep(0.002 * min(self._random.pareto(1.1), 100.0))
        async for completion in super().generate(request):
            yield completion


@contextlib.contextmanager
def producing(run: af.Run, *engines: EchoRollout, slow: type[Any] | None = None) -> Iterator[None]:
    """Engines that generate in threads of this process until the stream ends. ``slow``: what stands before their queues."""
    failures: list[BaseException] = []

    def produce(number: int, engine: EchoRollout) -> None:
        try:
            with af.connect(run.address, name=f"rollout-{number}") as replica:
                queue = replica.queue if slow is None else slow(replica.queue)
                producer = af.EngineProducer(queue, engine, needs_first=True, sampling=af.Sampling(max_tokens=4))
                asyncio.run(asyncio.wait_for(producer.run(), 100))
        except BaseException as failure:
            failures.append(failure)
            run.fail(failure)

    threads = [threading.Thread(target=produce, args=item) for item in enumerate(engines)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        run.queue.end(cancel=True)
        for thread in threads:
            thread.join(100)
    assert not failures


def declare(run: af.Run) -> None:
    declare_rollout(run)
    run.queue.declare(
        "train", needs=["prompt_ids", "response_ids", "logprobs", "version_spans", "reward"], batch_rows=BATCH
    )
    run.feed(
        {"prompt_ids": af.Ragged.of([[i, 1, 2] for i in range(50)])}, group_size=GROUP, column="prompt_ids", chunk=8
    )
    run.start(af.Stage(lambda response_ids: [float(len(r)) for r in response_ids], task="reward"))


def train(run: af.Run, enough: Callable[[], bool] = lambda: False) -> list[np.ndarray[Any, Any]]:
    """All steps, or until it is enough; returns the staleness of the tokens of each."""
    engine, late = EchoTrain(), []
    with run.weight_publisher() as weights:
        weights.publish(0, engine.named_weights())
        for step in run.consumer("train"):
            late.append(token_staleness(step.ragged("version_spans"), step.version))
            engine.train_step(step)
            weights.publish(step.version + 1, engine.named_weights())
            step.ack()
            if enough():
                break
    return late


@pytest.mark.parametrize(
    ("max_staleness", "policy"),
    [(0, "wait"), (0, "drop"), (1, "wait"), (1, "count"), (3, "wait"), (3, "drop"), (3, "count")],
)
def test_a_run_trains_all_its_steps_within_what_its_policy_promises(max_staleness: int, policy: str) -> None:
    with af.serve(steps=STEPS, max_staleness=max_staleness, staleness_policy=policy, capacity_rows=64) as run:
        declare(run)
        with producing(run, HeavyTailed(seed=1), HeavyTailed(seed=2, max_rows=2 * GROUP)):
            late = train(run)

        assert len(late) == STEPS
        if policy != "count":
            assert max(int(step.max()) for step in late) <= max_staleness
        audit = run.audit()
        assert audit.balanced
        assert audit.consumed == STEPS * BATCH
        assert audit.expired <= (max_staleness * STEPS * BATCH if policy == "drop" else 0)


class Stuck(EchoRollout):
    """Its first request never ends by itself."""

    asked = aborted = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.began = threading.Event()

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        self.asked += 1
        if self.asked == 1:
            self.began.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.aborted += 1
        async for completion in super().generate(request):
            yield completion


def test_what_drop_gives_up_is_no_longer_generated_and_its_slots_are_used_again() -> None:
    stuck = Stuck(max_rows=GROUP)  # room for one group at a time

    class Later(EchoRollout):
        """Leaves room for it."""

        async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
            await asyncio.to_thread(stuck.began.wait, 100)
            async for completion in super().generate(request):
                yield completion

    with af.serve(max_staleness=1, staleness_policy="drop", capacity_rows=64) as run:
        declare(run)
        with producing(run, stuck, Later(max_rows=2 * GROUP)):
            late = train(run, enough=lambda: stuck.asked > 1)
            aborted = stuck.aborted

        assert aborted == 1
        assert max(int(step.max()) for step in late) <= 1
        reasons = run.audit().reasons
        assert reasons["expired: older than max_staleness 1 (policy 'drop')"] >= GROUP


def test_what_is_cancelled_is_no_longer_generated() -> None:
    stuck = Stuck()
    with af.serve(steps=1, max_staleness=0) as run:
        run.queue.declare("train", needs=["response_ids"], batch_rows=GROUP)
        declare_rollout(run)
        with run.weight_publisher() as weights, producing(run, stuck):
            weights.publish(0, EchoTrain().named_weights())
            run.queue.put({"prompt_ids": af.Ragged.of([[1, 2]])}, group_size=GROUP, key="stuck")
            until(stuck.began.is_set, "the first request")
            run.queue.cancel(key="stuck")
            run.queue.put({"prompt_ids": af.Ragged.of([[3, 4]])}, group_size=GROUP)
            run.queue.get("train").ack()

        assert (stuck.asked, stuck.aborted) == (2, 1)


class Listing(EchoRollout):
    """Knows the prompts that it was given."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.given: list[list[int]] = []

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        self.given.append(request.prompt_ids.tolist())
        async for completion in super().generate(request):
            yield completion


class SlowLease:
    """A queue whose first lease comes late: its rows have ended, and the producer has heard of that, before it has them."""

    def __init__(self, of: Any, heard: threading.Event, cancel: Callable[[], Any]) -> None:
        self._of, self._heard, self._cancel = of, heard, cancel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    @property
    def aio(self) -> SlowLease:
        return SlowLease(self._of.aio, self._heard, self._cancel)

    async def get(self, *arguments: Any, **options: Any) -> Any:
        batch = await self._of.get(*arguments, **options)
        if not self._heard.is_set():
            await asyncio.to_thread(self._cancel)
            while not self._heard.is_set():
                await asyncio.sleep(0.005)
        return batch

    async def lost(self, **options: Any) -> Any:
        ids = await self._of.lost(**options)
        asyncio.get_running_loop().call_later(0.05, self._heard.set)  # the producer has looked at them by then
        return ids


def test_rows_that_end_before_their_lease_arrives_are_never_begun() -> None:
    heard, engine = threading.Event(), Listing()
    with af.serve(steps=1, max_staleness=0) as run:
        run.queue.declare("train", needs=["response_ids"], batch_rows=GROUP)
        declare_rollout(run)
        run.queue.put({"prompt_ids": af.Ragged.of([[1, 2]])}, group_size=GROUP, key="first")
        slow: Any = lambda queue: SlowLease(queue, heard, lambda: run.queue.cancel(key="first"))  # noqa: E731
        with run.weight_publisher() as weights, producing(run, engine, slow=slow):
            weights.publish(0, EchoTrain().named_weights())
            until(heard.is_set, "the end of the first rows")
            run.queue.put({"prompt_ids": af.Ragged.of([[3, 4]])}, group_size=GROUP)
            run.queue.get("train").ack()

    assert engine.given == [[3, 4]]


Drop: Any = registry().get("staleness", "drop").load()


class Mine(Drop):
    """A policy that no package registers."""

    promise = "what the tests need"

    def __init__(self, share: float = 0.0) -> None:
        self.share = share


@pytest.mark.parametrize("policy", [(Mine, {"share": 0.5}), "test_staleness:Mine"])
def test_a_policy_of_this_process_is_handed_over(policy: Any) -> None:
    with af.serve(staleness_policy=policy, max_staleness=2) as run:
        run.queue.declare("train", needs=["x"], batch_rows=4)
        status = run.queue.status()
    assert status.staleness in ("Mine", "test_staleness:Mine")
    assert status.promise == "what the tests need"


def test_whoever_goes_on_with_a_durable_run_hands_its_policy_over_again(tmp_path: Path) -> None:
    with af.serve(tmp_path, staleness_policy=Mine, durability="process") as run:
        run.queue.declare("train", needs=["x"], batch_rows=4)
        run.queue.put({"x": [1]})

    with pytest.raises(PluginError, match="no staleness adapter is named 'Mine'"):
        af.serve(tmp_path)

    with af.serve(tmp_path, staleness_policy=Mine) as run:
        assert run.queue.status().staleness == "Mine"
        assert run.queue.audit().live == 1
        run.queue.end(cancel=True)


@pytest.mark.parametrize(
    ("policy", "error", "said"),
    [
        ("hope", PluginError, "no staleness adapter is named 'hope'; installed: .*count"),
        ("drop:nothing", ConfigError, "cannot be imported"),
        ((Mine, {"shares": 1}), ConfigError, "cannot be created with {'shares': 1}"),
        (dict, PluginError, "not a StalenessPolicy"),
        (None, ConfigError, "no staleness policy is named"),
        (7, ConfigError, "a staleness policy (is|must be) a name"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_before_anything_is_served(
    tmp_path: Path, policy: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        af.serve(tmp_path, staleness_policy=policy)
    assert not list(tmp_path.iterdir())


def test_nobody_else_can_make_the_server_import_something(monkeypatch: pytest.MonkeyPatch) -> None:
    with af.serve() as run, af.connect(run.address) as other:
        with pytest.raises(PluginError, match="no staleness adapter is named 'os:abort'"):
            other.queue.configure(staleness_policy="os:abort")
    assert os.getpid()


def test_a_workflow_says_what_its_policy_promises_and_runs_with_it(tmp_path: Path) -> None:
    flow = echo_workflow(staleness=af.Staleness(max_staleness=1, policy="drop"), steps=4)

    assert flow.describe()["staleness"]["policy"] == "drop"
    assert "no trained token is older" in flow.describe()["staleness"]["promise"]
    result = flow.run(tmp_path / "run")

    check_whole(result, 4)
    assert result.summary["staleness_max"] <= 1
    assert any("staleness policy 'drop'" in note["text"] for note in events_of(tmp_path / "run", "note"))


@pytest.mark.parametrize("policy", ["hope", Mine, ("count", {}), (Mine, {"share": 0.1})])
def test_a_workflow_checks_its_policy_when_it_is_made(policy: Any) -> None:
    make: Callable[[], af.Workflow] = lambda: echo_workflow(staleness=af.Staleness(policy=policy))  # noqa: E731
    if policy == "hope":
        with pytest.raises(PluginError, match="no staleness adapter is named 'hope'"):
            make()
    else:
        assert make().describe()["staleness"]["policy"] in ("Mine", "count")


def test_count_says_in_a_workflow_that_it_bounds_no_token() -> None:
    rule = echo_workflow(staleness=af.Staleness(policy="count")).describe()["staleness"]
    assert not rule["bounded"]
    assert "may be older than max_staleness" in rule["promise"]
