"""Producers: how many rows they have at a time, how they ask for prompts and complete responses, and what becomes of a dead engine."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from echo_runs import declare_rollout, echo_weights
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.testing import EchoRollout
from asyncflow_sdk.types.events import Loaded

pytestmark = pytest.mark.fast
ROWS = 6


class Spy:
    """Stands before an object, and hears of the calls of some of its methods."""

    def __init__(self, of: Any, **heard: Callable[..., Any]) -> None:
        self._of, self._heard = of, heard

    def __getattr__(self, name: str) -> Any:
        return self._heard.get(name) or getattr(self._of, name)


class Watched(Spy):
    """A queue of which one knows with how many rows its batches were completed, and how often it was asked for one."""

    def __init__(self, queue: Any) -> None:
        self.asked, self.completed = 0, list[int]()
        aio = queue.aio

        async def get(*arguments: Any, **options: Any) -> Any:
            self.asked += 1
            return await aio.get(*arguments, **options)

        super().__init__(queue)
        self.aio = Spy(aio, get=get)


class Dies(EchoRollout):
    """When it is asked for the first time."""

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        raise af.EngineGone("its process has died")
        yield


def given_prompts(run: af.Run, prompts: int, group_size: int, batch_rows: int) -> None:
    declare_rollout(run)
    run.queue.declare("train", needs=["response_ids"], batch_rows=batch_rows)
    run.queue.put({"prompt_ids": af.Ragged.of([[n, n] for n in range(prompts)])}, group_size=group_size)
    run.queue.end()


def produce(run: Any, engine: af.RolloutEngine, **options: Any) -> None:
    asyncio.run(asyncio.wait_for(af.EngineProducer(run.queue, engine, **options).run(), 60))


def test_a_dead_engine_ends_its_producer_and_another_has_its_rows() -> None:
    with af.serve(max_staleness=0, steps=1) as run:
        given_prompts(run, 4, group_size=2, batch_rows=8)

        with (
            af.connect(run.address, name="first") as dying,
            pytest.raises(af.EngineGone, match="its process has died"),
        ):
            produce(dying, Dies())
        assert run.audit().live == 8

        produce(run, EchoRollout())
        assert run.queue.status().step == 1
        assert run.audit().failed == 0


# ---- rows at a time


class Counting(EchoRollout):
    """Knows how many rows it was generating at a time."""

    rows = most = 0

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        self.rows += request.n
        self.most = max(self.most, self.rows)
        async for completion in super().generate(request):
            self.rows -= 1
            yield completion


class OneLong(af.RolloutEngine):
    """The last response of the first prompt comes when those of the second have come."""

    capabilities = af.Capabilities(max_rows=4)

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        first = int(request.prompt_ids[0]) == 0
        if not first:
            self.begun.set()
        for index in range(request.n):
            if first and index == request.n - 1:
                await self.begun.wait()
            yield af.Completion(index, request.prompt_ids, [0.0] * len(request.prompt_ids))

    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        raise NotImplementedError("no version is published here, so nothing is loaded")


def test_whole_groups_do_not_exceed_what_an_engine_takes() -> None:
    engine = Counting(delay_s=0.001, spread=1.0, max_rows=10)
    with af.serve(max_staleness=4, steps=5) as run:
        given_prompts(run, 20, group_size=4, batch_rows=16)
        produce(run, engine)
        assert run.queue.status().step == 5
    assert 8 <= engine.most <= 10  # two groups at first; a third would be two rows too many


def test_a_long_response_does_not_keep_the_places_of_its_group() -> None:
    with af.serve(max_staleness=0, steps=1) as run:
        given_prompts(run, 2, group_size=3, batch_rows=6)
        produce(run, OneLong())
        assert run.queue.status().step == 1


# ---- asking for prompts


@pytest.mark.parametrize("swap", ["drain", "boundary", "partial", "in_flight"])
def test_one_request_waits_for_the_version_and_gets_all_there_is_room_for_with_it(swap: str) -> None:
    steps, rows = 3, 4
    with af.serve(max_staleness=0, steps=steps) as run, run.weight_publisher() as publisher:
        run.queue.declare("train", needs=["response_ids"], batch_rows=rows)
        declare_rollout(run)
        run.queue.put({"prompt_ids": [[n] for n in range(rows * steps)]})
        publisher.publish(0, echo_weights(0))
        with af.connect(run.address, name="replica") as replica, ThreadPoolExecutor() as threads:
            # given one whose rows end one after another, so that it has room for one of the next step at first
            engine = EchoRollout(
                delay_s=0.005, spread=1.0, max_rows=rows, in_flight=swap == "in_flight", partial=swap == "partial"
            )
            queue: Any = Watched(replica.queue)
            work = asyncio.wait_for(af.EngineProducer(queue, engine, swap=swap).run(), 60)
            producing = threads.submit(asyncio.run, work)
            # when each step needs the version of the one before
            for number in range(1, steps + 1):
                with run.queue.get("train", timeout_s=30) as step:
                    assert step.rows == rows
                    if number < steps:
                        until(lambda n=number: queue.asked > n, "the request for the next step")
                        publisher.publish(number, echo_weights(number))
                    step.ack()
            producing.result()
    # then a step took one request, and one more where it was taken back to see whether nothing runs
    assert queue.asked <= steps * (2 if swap == "boundary" else 1) + 1


def test_who_waits_for_a_version_that_does_not_come_hears_of_the_end() -> None:
    with af.serve(max_staleness=0) as run:
        run.queue.declare("train", needs=["response_ids"], batch_rows=4)
        declare_rollout(run)
        run.queue.put({"prompt_ids": [[n] for n in range(4)]})
        with af.connect(run.address, name="replica") as replica, ThreadPoolExecutor() as threads:
            # given one that has rows to generate and may have no others with what it has
            queue: Any = Watched(replica.queue)
            producing = asyncio.wait_for(af.EngineProducer(queue, EchoRollout(delay_s=0.005, spread=1.0)).run(), 60)
            ended = threads.submit(asyncio.run, producing)
            # when its rows end one after another
            with run.queue.get("train", timeout_s=30) as step:
                step.ack()
            # then it asks once more
            until(lambda: queue.asked == 2, "the other request")
            # and when no version will come, it hears of the end
            run.queue.end()
            ended.result()
            assert queue.asked == 2, "and not again"


def test_a_replica_that_comes_late_has_the_newest_version_before_its_first_prompt() -> None:
    """Its own weights count as version 0; by now that is one nobody generates with any more."""
    with af.serve(max_staleness=100) as run, run.weight_publisher() as publisher:
        run.queue.declare("train", needs=["response_ids", "logprobs"], batch_rows=4)
        declare_rollout(run)
        for number in range(4):
            publisher.publish(number, echo_weights(number))
        publisher.flush()
        run.queue.put({"prompt_ids": [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]}, group_size=1)
        run.queue.end()
        with af.connect(run.address, name="late") as late:
            produce(late, EchoRollout())
        with run.queue.get("train") as batch:
            assert set(batch.ragged("response_ids").lengths) == {1, 2, 3, 4}
            assert set(batch.ragged("logprobs").values) == {-3.0}
            batch.ack()


def by_a_producer(run: af.Run, threads: ThreadPoolExecutor) -> None:
    declare_rollout(run)
    replica = af.connect(run.address, name="replica")
    threads.submit(produce, replica, EchoRollout()).add_done_callback(lambda _: replica.close())


def by_start(run: af.Run, threads: ThreadPoolExecutor) -> None:
    run.start(af.Rollout("echo", prompt="prompt_ids", group_size=1, launcher="thread"))


@pytest.mark.parametrize("begin", [by_a_producer, by_start])
def test_a_published_version_0_is_loaded_before_its_name_is_used(begin: Callable[..., None]) -> None:
    loads: list[Any] = []
    with (
        ThreadPoolExecutor() as threads,
        af.serve(on_event=lambda e: loads.append(e) if isinstance(e, Loaded) else None) as run,
        run.weight_publisher() as publisher,
    ):
        run.queue.declare("train", needs=["response_ids", "logprobs", "version_spans"], batch_rows=4)
        # given engines that have begun with weights of their own
        begin(run, threads)
        until(lambda: loads, "an engine with version 0 of its own")
        # when others are published under that name
        publisher.publish(0, echo_weights(5))
        run.queue.put({"prompt_ids": [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]})
        run.queue.end()
        # then all is generated by these
        with run.queue.get("train", timeout_s=60) as step:
            assert {span[0] for spans in step["version_spans"] for span in spans} == {0}
            assert set(step.ragged("logprobs").values) == {-5.0}
            step.ack()


def test_weights_that_rows_were_leased_for_keep_the_name_0() -> None:
    with ThreadPoolExecutor() as threads, af.serve() as run, run.weight_publisher() as publisher:
        run.queue.declare("train", needs=["response_ids", "logprobs", "version_spans"], batch_rows=2)
        by_a_producer(run, threads)
        run.queue.put({"prompt_ids": [[1], [2, 3]]})
        run.queue.end()
        with run.queue.get("train", timeout_s=60) as step:
            with pytest.raises(
                af.ConfigError, match="version 0 cannot be published: rows were leased for the engines'"
            ):
                publisher.publish(0, echo_weights(5))
            publisher.publish(1, echo_weights(1))
            step.ack()


def test_a_rollout_thread_that_dies_is_noticed() -> None:
    with af.serve() as run:
        declare_rollout(run)
        steps = run.consumer("train", needs=("response_ids",), batch_size=2)
        run.queue.put({"prompt_ids": [[1], [2, 3]]})

        def roll_out() -> None:
            try:
                with af.connect(run.address, name="mine") as mine:
                    produce(mine, Dies())
            except Exception as error:
                run.fail(error)

        threading.Thread(target=roll_out).start()
        with pytest.raises(af.EngineGone, match="its process has died"):
            next(iter(steps))


# ---- completing responses


class OneByOne(af.RolloutEngine):
    """Response after response; the second when somebody has ``seen`` the first, where anybody looks."""

    capabilities = af.Capabilities(max_rows=ROWS)

    def __init__(self, see: Callable[[], None] | None = None) -> None:
        self._see = see

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion | af.Completions]:
        for index in range(request.n):
            yield af.Completion(index, [index], [0.0])
            if index == 0 and self._see is not None:
                await asyncio.to_thread(self._see)
            await asyncio.sleep(0)

    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        raise NotImplementedError("no version is published here, so nothing is loaded")


class Packed(OneByOne):
    """Some responses at once, some alone."""

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion | af.Completions]:
        for part in ([4, 0], [2], [5, 1, 3]):
            if len(part) == 1:
                yield af.Completion(part[0], [part[0]] * (part[0] + 1), [-1.0] * (part[0] + 1))
                continue
            ids = af.Ragged.of([[index] * (index + 1) for index in part], np.int32)
            logprobs = af.Ragged(np.full(len(ids.values), -1.0, np.float32), ids.offsets)
            yield af.Completions(np.array(part), ids, logprobs, ["stop"] * len(part))
            await asyncio.sleep(0)


@pytest.fixture
def served() -> Iterator[af.Run]:
    """One group of prompts."""
    with af.serve() as run:
        declare_rollout(run)
        run.queue.declare("seen", needs=["response_ids"])
        run.queue.declare("train", needs=["response_ids", "logprobs", "version_spans"], batch_rows=ROWS)
        run.queue.put({"prompt_ids": af.Ragged.of([[1, 2]])}, group_size=ROWS)
        run.queue.end()
        yield run


def generated(run: Any, engine: af.RolloutEngine) -> list[list[int]]:
    produce(run, engine)
    with run.queue.get("train", ROWS, timeout_s=30) as step:
        lengths = step.ragged("response_ids").lengths
        assert step.ragged("logprobs").lengths.tolist() == lengths.tolist()
        assert step.ragged("version_spans").values.tolist() == [[0, 0, length] for length in lengths]
        responses: list[list[int]] = step.ragged("response_ids").tolist()
        step.ack()
    return responses


def test_a_response_does_not_wait_for_its_lease(served: af.Run) -> None:
    def see() -> None:
        with served.queue.get("seen", 1, timeout_s=30.0) as batch:
            batch.ack()

    assert generated(served, OneByOne(see)) == [[index] for index in range(ROWS)]


def test_responses_may_come_packed(served: af.Run) -> None:
    assert generated(served, Packed()) == [[index] * (index + 1) for index in range(ROWS)]


@pytest.mark.parametrize(
    ("part", "lengths", "message"),
    [
        ([0, 0], None, "response 0 twice"),
        ([0, ROWS], None, f"response {ROWS} twice, or more"),
        ([0, 1], [1, 3], "tokens with"),
        ([0, 1], [0, 4], "tokens with"),
    ],
)
def test_packed_responses_that_do_not_hold_together_are_refused(
    served: af.Run, part: list[int], lengths: list[int] | None, message: str
) -> None:
    class Wrong(OneByOne):
        async def generate(self, request: af.Request) -> AsyncIterator[af.Completions]:
            ids = af.Ragged.from_lengths(np.zeros(4, np.int32), np.array([2, 2]))
            logprobs = af.Ragged.from_lengths(np.zeros(4, np.float32), np.array(lengths or [2, 2]))
            yield af.Completions(np.array(part), ids, logprobs, ["stop", "stop"])

    produce(served, Wrong())
    letters = served.queue.failed()
    assert letters
    assert all(message in letter.reasons[-1] for letter in letters), letters


def test_packed_responses_of_rows_that_ended_meanwhile_harm_no_others() -> None:
    class CancelsTheFirst(Packed):
        async def generate(self, request: af.Request) -> AsyncIterator[af.Completion | af.Completions]:
            if list(request.prompt_ids) == [1, 2]:
                await asyncio.to_thread(run.queue.cancel, [1])  # the request may be cancelled here, or go on
            ids = af.Ragged.of([[index] * (index + 1) for index in range(request.n)], np.int32)
            logprobs = af.Ragged(np.full(len(ids.values), -1.0, np.float32), ids.offsets)
            yield af.Completions(np.arange(request.n), ids, logprobs, ["stop"] * request.n)

    with af.serve() as run:
        run.queue.declare("rollout", needs=["prompt_ids"], gives=["response_ids", "logprobs", "version_spans"])
        run.queue.declare("sink", needs=["response_ids"])
        run.queue.put({"prompt_ids": af.Ragged.of([[1, 2], [3]])}, group_size=3)
        run.queue.end()
        produce(run, CancelsTheFirst())
        with run.queue.get("sink", 3, at_least=3, timeout_s=30) as batch:
            assert batch.ids.tolist() == [3, 4, 5]
            assert batch.ragged("response_ids").tolist() == [[0], [1, 1], [2, 2, 2]]
            batch.ack()
        audit = run.audit()
        assert (audit.live, audit.cancelled, audit.consumed) == (0, 3, 3)


def test_a_producer_names_its_keywords_and_refuses_others() -> None:
    keywords = list(inspect.signature(af.EngineProducer).parameters)[2:]
    assert {"task", "prompt", "text", "sampling", "agent", "swap", "prompt_limit"} <= {*keywords}
    with af.serve() as run:
        af.EngineProducer(run.queue, EchoRollout(), sampling=None, samplings=None)  # the defaults
        for unknown in ("need_first", "only"):
            with pytest.raises(TypeError, match=f"EngineProducer.*{unknown}"):
                af.EngineProducer(run.queue, EchoRollout(), **{unknown: True})
