"""Stages: functions, coroutines and engines as work, in the driver, in threads and in another interpreter."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_runs import check_whole, column, echo_workflow
from functions import length

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError

THREAD: dict[str, Any] = {"launcher": "thread"}


class Shouting(af.RolloutEngine):
    """Says 7 as often as the prompt has tokens."""

    def __init__(self, model: str = "") -> None:
        self._steps = 0.0

    async def generate(self, request: af.Request) -> Any:
        for index in range(request.n):
            tokens = len(request.prompt_ids)
            yield af.Completion(index, np.full(tokens, 7, np.int32), np.full(tokens, -self._steps, np.float32))

    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        arrays = dict(update.arrays())
        self._steps = float(arrays["scale"])
        return set(arrays)


class Calls:
    """How many calls of a coroutine run at a time; the first waits for another."""

    def __init__(self) -> None:
        self.running, self.most, self.overlap = 0, 0, asyncio.Event()

    async def busy(self, response_ids: Any) -> list[int]:
        self.running += 1
        self.most = max(self.most, self.running)
        if self.running > 1:
            self.overlap.set()
        await asyncio.wait_for(self.overlap.wait(), 60)
        await asyncio.sleep(0.005)
        self.running -= 1
        return [self.running for _ in response_ids]


calls = Calls()


async def busy(response_ids: Any) -> list[int]:
    return await calls.busy(response_ids)


def spread_of_group(reward: Any, groups: Any) -> Any:
    """How many rows of its group each row came with."""
    _, where, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return counts[where]


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a stage of every kind, whose columns its trainer needs."""
    stages = [
        af.Stage(af.Logprobs("echo"), gives=["ref_logprobs"], **THREAD),
        af.Stage(
            af.Generate("echo", sampling=af.Sampling(max_tokens=2)), needs=["response_ids"], gives=["said"], **THREAD
        ),
        af.Stage(spread_of_group, gives=["spread"], **THREAD),
        af.Stage(busy, needs=["response_ids"], gives=["busy"], batch=2, concurrency=3, **THREAD),
    ]
    second = af.Rollout(Shouting, task="second", group_size=4, prompt="prompt_ids", **THREAD)
    first = af.Rollout("echo", group_size=4, prompt="prompt_ids", **THREAD)
    needs = ["ref_logprobs", "said", "spread", "busy", "second_response_ids"]
    reward = af.Stage(
        "functions:length", task="reward", needs=["response_ids"], gives=["reward"], python=sys.executable
    )
    flow = echo_workflow(stages=stages, rollout=[first, second], train={"needs": needs}, reward=reward)
    result = flow.run(tmp_path_factory.mktemp("staged") / "run")
    check_whole(result, 3)
    return result.directory


def test_an_engine_with_fixed_weights_gives_logprobs(staged: Path) -> None:
    for _, batch in af.read_steps(staged):
        reference, responses = batch.ragged("ref_logprobs"), batch.ragged("response_ids")
        assert reference.values.dtype == np.float32
        assert (reference.lengths == responses.lengths).all()
        assert (reference.values == 0).all()  # of weights that no step changed


def test_an_engine_with_fixed_weights_answers_ids(staged: Path) -> None:
    assert column(staged, "said") == [row[:2] for row in column(staged, "response_ids")]


def test_a_function_with_groups_works_on_whole_ones(staged: Path) -> None:
    assert set(column(staged, "spread")) == {4}


def test_calls_of_a_coroutine_overlap_and_are_bounded(staged: Path) -> None:
    assert 2 <= calls.most <= 3
    assert calls.running == 0


def test_a_function_is_named_by_its_path_for_another_interpreter(staged: Path) -> None:
    assert column(staged, "reward") == [len(row) for row in column(staged, "response_ids")]
    assert (staged / "logs" / "reward-0.log").exists()


def test_a_second_task_answers_every_prompt_again_under_its_own_names(staged: Path) -> None:
    assert column(staged, "second_response_ids") == [[7] * len(row) for row in column(staged, "prompt_ids")]
    _, batch = next(iter(af.read_steps(staged)))
    assert {"second_logprobs", "second_version_spans"} <= set(batch)


def test_what_a_coroutine_raises_ends_the_run_with_its_rows(tmp_path: Path) -> None:
    async def refuses(response_ids: Any) -> Any:
        await asyncio.sleep(0)
        raise KeyError("no judge")

    with pytest.raises(ConfigError, match=r"refuses\(\) raised KeyError: 'no judge'\ncalled with response_ids"):
        echo_workflow(reward=refuses, max_failed=0).run(tmp_path / "run")


def test_a_prompt_that_an_engine_refuses_costs_its_group_only(tmp_path: Path) -> None:
    def asked(prompt_ids: Any) -> Any:
        return [ids[:0] if len(ids) == 1 else ids for ids in prompt_ids]

    judge = af.Stage(af.Generate("echo"), needs=["asked"], gives=["said"], **THREAD)
    result = echo_workflow(stages=[af.Stage(asked), judge], train={"needs": ["said"]}, steps=4).run(tmp_path / "run")

    check_whole(result, 4)
    assert result.summary["rows"]["failed"] > 0
    assert any("the engine refused the prompt" in reason for reason in result.summary["reasons"])
    assert min(map(len, column(result.directory, "said"))) > 1


def test_an_engine_that_refuses_everything_ends_the_run_and_says_why(tmp_path: Path) -> None:
    judge = af.Stage(af.Generate("echo"), needs=["asked"], gives=["said"], **THREAD)
    with pytest.raises(ConfigError, match=r"of the last 100 groups failed(.|\n)*the engine refused the prompt"):
        echo_workflow(
            stages=[af.Stage(lambda prompt_ids: [ids[:0] for ids in prompt_ids], task="asked"), judge],
            train={"needs": ["said"]},
        ).run(tmp_path / "run")


def test_filtered_groups_are_replaced(tmp_path: Path) -> None:
    def keep_long(length: Any, groups: Any) -> Any:
        return {"reward": length, "filtered": length < 2}

    stages = [af.Stage(length, gives=["length"], task="length", **THREAD), af.Stage(keep_long, gives=["reward"])]
    result = echo_workflow(reward=None, stages=stages, steps=4).run(tmp_path / "run")

    check_whole(result, 4)
    assert result.summary["rows"]["filtered"] > 0
    assert min(column(result.directory, "reward")) == 2


def test_two_engines_share_the_prompts(tmp_path: Path) -> None:
    (met := tmp_path / "met").mkdir()
    prompts: dict[str, Any] = {"group_size": 4, "prompt": "prompt_ids", "max_rows": 8, **THREAD}
    other = af.Rollout("gates:Together", met=str(met), delay_s=0.001, **prompts)
    flow = echo_workflow(rollout=[af.Rollout("gates:Together", met=str(met), **prompts), other])

    flow.run(tmp_path / "run")

    assert flow.plan.rollouts[1] is other
    assert len(list(met.iterdir())) == 2


def test_a_stage_runs_in_ones_own_loop() -> None:
    def doubled(number: Any) -> Any:
        return 2 * number

    def work(address: str) -> None:
        with af.connect(address, name="doubler") as run:
            af.Stage(doubled).run(run.queue)

    with af.serve() as run:
        run.queue.put({"number": np.arange(5)})
        run.queue.declare("keep", needs=["doubled"])
        worker = threading.Thread(target=work, args=(run.address,))
        worker.start()
        run.queue.end()
        seen = [int(n) for batch in run.consumer("keep", count=8) for n in (batch.array("doubled"), batch.ack())[0]]
        worker.join()

    assert sorted(seen) == [0, 2, 4, 6, 8]
