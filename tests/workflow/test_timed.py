"""Timed engines: what takes how long is computed by hand; engines give what their model says, and say which version drew it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, EngineError
from asyncflow_sdk.interfaces import WeightUpdate
from asyncflow_sdk.testing import Decoding, RolloutLatency, TimedRollout, TimedTrain

pytestmark = pytest.mark.fast

FAST = 10_000.0


def decoding(**latency: float) -> Decoding:
    return Decoding(RolloutLatency(step_s=1.0, **latency))  # type: ignore[arg-type]


def test_each_step_takes_longer_the_more_responses_run() -> None:
    running = decoding(step_row_s=0.5)
    running.start(0.0, [("short", 10), ("long", 20)], prompt_tokens=0)
    assert running.next() == 20.0  # 10 steps of 1 + 2 * 0.5
    assert running.ended(20.0) == ["short"]
    assert running.next() == 35.0  # 10 steps of 1 + 0.5
    assert running.ended(35.0) == ["long"]
    assert running.next() is None


def test_who_looks_late_finds_what_ended_meanwhile_when_it_did() -> None:
    running = decoding(step_row_s=0.5)
    running.start(0.0, [("short", 10), ("long", 20), ("longest", 30)], prompt_tokens=0)
    # 10 steps of 2.5, 10 of 2, 10 of 1.5
    assert running.ended(46.5) == ["short", "long"]
    assert running.position(46.5) == 21.0
    assert running.next() == 60.0


def test_prompts_and_loads_hold_up_all_that_runs() -> None:
    running = decoding(prefill_s=0.5)
    running.start(0.0, [("first", 10)], prompt_tokens=4)
    assert running.next() == 12.0
    assert running.start(7.0, [("second", 10)], prompt_tokens=4) == 5.0
    assert running.next() == 14.0
    running.hold(8.0, 3.0)
    assert running.next() == 17.0
    assert running.ended(100.0) == ["first", "second"]


def test_of_what_was_stopped_nothing_is_heard() -> None:
    running = decoding(step_row_s=1.0)
    running.start(0.0, [("stopped", 10), ("goes on", 10)], prompt_tokens=0)
    running.stop(15.0, ["stopped"])  # after 5 steps of 3
    assert running.next() == 25.0
    assert running.ended(25.0) == ["goes on"]


def test_lengths_follow_from_seed_and_prompt_and_have_a_long_tail() -> None:
    latency = RolloutLatency(median=700, sigma=0.8, longest=4096, seed=3)
    lengths = np.concatenate([latency.lengths(prompt, 8) for prompt in range(2000)])
    assert (latency.lengths(17, 8) == lengths[17 * 8 : 18 * 8]).all()
    assert np.median(lengths) == pytest.approx(700, rel=0.03)
    assert np.log(lengths[lengths < 4096]).std() == pytest.approx(0.8, rel=0.05)
    assert lengths.max() == 4096
    assert (RolloutLatency(seed=4).lengths(17, 8) != RolloutLatency(seed=3).lengths(17, 8)).any()


@pytest.mark.parametrize(
    "latency", [{"step_s": 0.0}, {"load_s": -1.0}, {"step_s": float("nan")}, {"longest": 0}, {"speed": 1}]
)
def test_a_model_that_cannot_be_is_refused(latency: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TimedRollout(**latency)


class Update(WeightUpdate):
    """A version with one tensor."""

    def __init__(self, version: int) -> None:
        self.version = version

    def arrays(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        yield "steps", np.array([self.version])

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return self.arrays()

    def release(self) -> None:
        pass


def request(prompt: int, n: int) -> af.Request:
    return af.Request(np.array([prompt, 0], np.int32), af.Sampling(max_tokens=4096), n)


def test_responses_come_as_they_end_and_are_as_long_as_the_model_says() -> None:
    engine = TimedRollout(time_scale=FAST)

    async def generated() -> list[af.Completion]:
        return [completion async for completion in engine.generate(request(5, 8))]

    completions = asyncio.run(generated())

    lengths = engine.latency.lengths(5, 8)
    assert [len(c.token_ids) for c in completions] == sorted(lengths.tolist())
    assert sorted(c.index for c in completions) == list(range(8))
    assert all(len(c.token_ids) == len(c.logprobs) == lengths[c.index] for c in completions)


def test_tokens_after_a_load_in_flight_are_of_the_new_version() -> None:
    engine = TimedRollout(time_scale=20.0, sigma=0.0, median=1000)  # 1 s each

    async def generated() -> list[af.Completion]:
        first = asyncio.create_task(anext(aiter(engine.generate(request(1, 1)))))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        assert await engine.load_weights(Update(1)) == {"steps"}
        second = asyncio.create_task(anext(aiter(engine.generate(request(2, 1)))))  # type: ignore[arg-type]
        await engine.load_weights(Update(2))
        return [await first, await second]

    first, second = asyncio.run(generated())

    assert [span.version for span in first.spans] in (
        [0, 1, 2],
        [0, 2],
    )  # two loads may come between the same two tokens
    assert first.spans[0].start == 0
    assert first.spans[0].end == first.spans[1].start
    assert first.spans[-1].end == 1000
    assert [span.version for span in second.spans][-1] == 2
    assert second.spans[0].version >= 1


def test_what_is_cancelled_leaves_the_engine() -> None:
    """Responses that run beside others take longer: those of an engine that was left by some end before those of one with more rows."""
    model: dict[str, Any] = {"time_scale": 1.0, "median": 10, "sigma": 0.0, "step_s": 1e-6, "step_row_s": 0.02}
    left, other, order = TimedRollout(**model), TimedRollout(**model), list[str]()

    async def generated(name: str, engine: TimedRollout, n: int) -> None:
        async for _ in engine.generate(request(1, n)):
            pass
        order.append(name)

    async def main() -> None:
        cancelled = asyncio.create_task(generated("cancelled", left, 8))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await asyncio.gather(generated("left", left, 1), generated("other", other, 5))

    asyncio.run(main())
    assert order == ["left", "other"]


def test_an_empty_prompt_is_refused() -> None:
    async def generated() -> None:
        await anext(aiter(TimedRollout().generate(af.Request(np.empty(0, np.int32), af.Sampling()))))

    with pytest.raises(EngineError, match="an empty prompt"):
        asyncio.run(generated())


def test_a_workflow_of_timed_engines_runs_to_its_end(tmp_path: Any) -> None:
    result = af.Workflow(
        prompts=[{"prompt_ids": [number, 0]} for number in range(16)],
        rollout=af.Rollout(
            "timed", prompt="prompt_ids", group_size=4, max_rows=8, time_scale=FAST, launcher="thread"
        ),
        reward=lambda response_ids: np.zeros(len(response_ids), np.float32),
        train=af.Train("timed", token_s=1e-3, step_s=1.0, copy_s=1.0, time_scale=FAST, launcher="thread"),
        batch_size=16,
        steps=3,
        staleness=af.Staleness(max_staleness=1),
        weights=af.Weights(swap="in_flight"),
    ).run(tmp_path / "run")
    assert result.summary["rows"]["consumed"] == 48
    assert result.summary["balanced"]
    assert result.summary["staleness_max"] <= 1


def test_a_trainer_goes_on_from_what_it_saved(tmp_path: Any) -> None:
    engine, again = TimedTrain(), TimedTrain()
    engine.steps = 7
    engine.save(tmp_path)
    again.load(tmp_path)
    assert dict(again.named_weights())["steps"].tolist() == [7]
