"""While a worker loads its model, whoever waits for it is told that, and for how long."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import DeadlineExceeded
from asyncflow_sdk.workflow.waiting import what_stands

PROMPTS = {"prompt_ids": af.Ragged.of([[1, 2], [3]]), "response_ids": af.Ragged.of([[4], [5]])}


def rollout(loads: Path) -> af.Rollout:
    return af.Rollout("gates:LoadsAtGate", loads=str(loads), prompt="prompt_ids", group_size=1, task="rollout")


def judge(loads: Path) -> af.Stage:
    work = af.Generate("gates:LoadsAtGate", loads=str(loads))
    return af.Stage(work, task="judge", needs=["prompt_ids"], gives=["verdict"])


@pytest.mark.parametrize(("make", "task"), [(rollout, "rollout"), (judge, "judge")])
def test_a_wait_says_who_loads_its_model(make: Callable[[Path], Any], task: str, tmp_path: Path) -> None:
    # given rows for a worker that is loading its model
    loads = tmp_path / "loads"
    loads.touch()
    with af.serve(tmp_path / "run") as run:
        run.queue.declare("train", needs=["logprobs" if task == "rollout" else "verdict"], batch_rows=2)
        run.start(make(loads))
        columns = ["prompt_ids"] if task == "rollout" else ["prompt_ids", "response_ids"]
        run.queue.put({name: PROMPTS[name] for name in columns})
        until(lambda: any(each.prepares for each in run.queue.status().sessions), "a worker that loads its model")

        # when somebody waits for what it will give
        with pytest.raises(DeadlineExceeded) as waited:
            run.queue.get("train", timeout_s=0.0)

        # then that is the reason, wherever one looks
        assert f"2 rows are ready for task '{task}'; {task}-0 is loading its model for " in str(waited.value)
        assert f"{task}-0 is loading its model for " in what_stands(run.queue.status())

        # when it is loaded
        loads.unlink()
        until(lambda: not any(each.prepares for each in run.queue.status().sessions), "the end of loading")
        assert "loading" not in what_stands(run.queue.status())
