"""Stages: functions, coroutines and engines as work, in processes of their own and in the driver."""

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_runs import echo_workflow
from functions import length
from stage_functions import Shouting, ShoutingTogether, most_at_a_time, slowly_scored, spread_of_group

import asyncflow_sdk as af
from asyncflow_sdk.errors import WorkerFailed


def steps_of(directory: Path) -> af.Batch:
    _, batch = next(iter(af.read_steps(directory)))
    return batch


@pytest.mark.parametrize("local", [False, True])
def test_calls_of_a_coroutine_overlap_and_are_bounded(tmp_path: Path, local: bool) -> None:
    async def here(response_ids):
        return await slowly_scored(response_ids)

    stage = af.Stage(here if local else slowly_scored, needs=["response_ids"], gives=["busy"], batch=2, concurrency=3)
    echo_workflow(stages=[stage], train=af.Train("echo", needs=["busy"]), steps=4).run(tmp_path / "run")

    busy = np.concatenate([batch.array("busy") for _, batch in af.read_steps(tmp_path / "run")])
    assert 2 <= busy.max() <= 3 == stage.concurrency
    assert most_at_a_time() == 0 or local


def test_what_a_coroutine_raises_ends_the_run_with_its_rows(tmp_path: Path) -> None:
    async def refuses(response_ids):
        await asyncio.sleep(0)
        raise KeyError("no judge")

    with pytest.raises(WorkerFailed, match=r"refuses\(\) raised KeyError: 'no judge' \(called with response_ids"):
        echo_workflow(reward=refuses).run(tmp_path / "run")


def test_an_engine_with_fixed_weights_gives_logprobs(tmp_path: Path) -> None:
    stages = [af.Stage(af.Logprobs("echo"), gives=["ref_logprobs"])]
    echo_workflow(stages=stages, train=af.Train("echo", needs=["ref_logprobs"])).run(tmp_path / "run")

    steps = list(af.read_steps(tmp_path / "run"))
    assert len(steps) == 12
    for _, batch in steps:
        reference, responses = batch.ragged("ref_logprobs"), batch.ragged("response_ids")
        assert reference.values.dtype == np.float32
        assert (reference.lengths == responses.lengths).all()
        assert (reference.values == 0).all()  # of weights that no step changed


def test_an_engine_with_fixed_weights_answers_ids(tmp_path: Path) -> None:
    stages = [
        af.Stage(af.Generate("echo", sampling=af.Sampling(max_tokens=2)), needs=["response_ids"], gives=["said"])
    ]
    echo_workflow(stages=stages, train=af.Train("echo", needs=["said"])).run(tmp_path / "run")

    batch = steps_of(tmp_path / "run")
    assert [row.tolist() for row in batch.ragged("said")] == [
        row[:2].tolist() for row in batch.ragged("response_ids")
    ]


def test_a_prompt_that_an_engine_refuses_costs_its_group_only(tmp_path: Path) -> None:
    def asked(prompt_ids):
        return [ids[:0] if len(ids) == 1 else ids for ids in prompt_ids]

    judge = af.Stage(af.Generate("echo"), needs=["asked"], gives=["said"])
    result = echo_workflow(
        stages=[af.Stage(asked), judge], train=af.Train("echo", needs=["said"]),
    ).run(tmp_path / "run")  # fmt: skip

    assert result.summary["steps"] == 12
    assert result.summary["rows"]["failed"] > 0
    assert any("the engine refused the prompt" in reason for reason in result.summary["reasons"])
    for _, batch in af.read_steps(tmp_path / "run"):
        assert (batch.ragged("said").lengths > 1).all()


def test_an_engine_that_refuses_everything_ends_the_run_and_says_why(tmp_path: Path) -> None:
    judge = af.Stage(af.Generate("echo"), needs=["asked"], gives=["said"])
    with pytest.raises(WorkerFailed, match=r"\d+ prompts in a row were refused, the last because: an empty prompt"):
        echo_workflow(
            stages=[af.Stage(lambda prompt_ids: [ids[:0] for ids in prompt_ids], task="asked"), judge],
            train=af.Train("echo", needs=["said"]),
        ).run(tmp_path / "run")


def test_a_function_is_named_by_its_path_for_another_interpreter(tmp_path: Path) -> None:
    reward = af.Stage("functions:length", task="reward", needs=["response_ids"], python=sys.executable)
    result = echo_workflow(reward=reward, steps=2).run(tmp_path / "run")

    assert result.summary["steps"] == 2


def test_a_function_with_groups_works_on_whole_ones(tmp_path: Path) -> None:
    stages = [af.Stage(spread_of_group, gives=["spread"])]
    echo_workflow(stages=stages, train=af.Train("echo", needs=["spread"])).run(tmp_path / "run")

    for _, batch in af.read_steps(tmp_path / "run"):
        assert (batch.array("spread") == 4).all()


def test_filtered_groups_are_replaced(tmp_path: Path) -> None:
    def keep_long(length, groups):
        return {"reward": length, "filtered": length < 2}

    stages = [af.Stage(length, gives=["length"], task="length"), af.Stage(keep_long, gives=["reward"])]
    result = echo_workflow(reward=None, stages=stages).run(tmp_path / "run")

    assert result.summary["steps"] == 12
    assert result.summary["rows"]["filtered"] > 0
    rewards = np.concatenate([batch.array("reward") for _, batch in af.read_steps(tmp_path / "run")])
    assert rewards.min() == 2


def test_an_engine_of_ones_own_is_named_by_its_class(tmp_path: Path) -> None:
    rollout = af.Rollout(Shouting, group_size=4, prompt="prompt_ids")
    assert rollout.engine == "stage_functions:Shouting"

    echo_workflow(rollout=rollout, steps=2).run(tmp_path / "run")

    assert (steps_of(tmp_path / "run").ragged("response_ids").values == 7).all()


def test_two_engines_share_the_prompts(tmp_path: Path) -> None:
    met = tmp_path / "met"
    met.mkdir()
    prompts: dict[str, Any] = {"group_size": 4, "prompt": "prompt_ids", "met": str(met)}
    echo = af.Rollout("gates:Together", delay_s=0.01, max_rows=8, **prompts)
    echo_workflow(rollout=[echo, af.Rollout(ShoutingTogether, **prompts)], steps=20).run(tmp_path / "run")

    shouted = np.concatenate([b.ragged("response_ids").values == 7 for _, b in af.read_steps(tmp_path / "run")])
    assert 0 < shouted.mean() < 1


def test_a_second_task_answers_every_prompt_again_under_its_own_names(tmp_path: Path) -> None:
    second = af.Rollout(Shouting, task="second", group_size=4, prompt="prompt_ids")
    first = af.Rollout("echo", group_size=4, prompt="prompt_ids")
    echo_workflow(rollout=[first, second], train=af.Train("echo", needs=["second_response_ids"])).run(
        tmp_path / "run"
    )

    batch = steps_of(tmp_path / "run")
    assert (batch.ragged("second_response_ids").values == 7).all()
    assert {"second_logprobs", "second_version_spans"} <= set(batch)


def test_a_stage_runs_in_ones_own_loop() -> None:
    def doubled(number):
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
