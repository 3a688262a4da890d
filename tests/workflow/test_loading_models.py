"""While a worker loads its model, whoever waits for it is told that, and for how long."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import DeadlineExceeded
from asyncflow_sdk.testing import EchoRollout

pytestmark = pytest.mark.fast

PROMPTS = {"prompt_ids": af.Ragged.of([[1, 2], [3]]), "response_ids": af.Ragged.of([[4], [5]])}


class LoadsAtGate(EchoRollout):
    """Is not made as long as there is the file ``loads``, as one with a large model."""

    def __init__(self, model: str = "", *, loads: str) -> None:
        while Path(loads).exists():
            time.sleep(0.01)
        super().__init__(model)


ENGINE = "test_loading_models:LoadsAtGate"


def rollout(loads: Path) -> af.Rollout:
    return af.Rollout(ENGINE, loads=str(loads), prompt="prompt_ids", group_size=1, task="rollout", launcher="thread")


def judge(loads: Path) -> af.Stage:
    work = af.Generate(ENGINE, loads=str(loads))
    return af.Stage(work, task="judge", needs=["prompt_ids"], gives=["verdict"], launcher="thread")


@pytest.mark.parametrize(("make", "task"), [(rollout, "rollout"), (judge, "judge")])
def test_a_wait_says_who_loads_its_model(make: Callable[[Path], Any], task: str, tmp_path: Path) -> None:
    # given rows for a worker that is loading its model
    loads = tmp_path / "loads"
    loads.touch()
    with af.serve(tmp_path / "run") as run:
        run.queue.declare("train", needs=["logprobs" if task == "rollout" else "verdict"], batch_rows=2)
        (worker,) = run.start(make(loads))
        columns = ["prompt_ids"] if task == "rollout" else ["prompt_ids", "response_ids"]
        run.queue.put({name: PROMPTS[name] for name in columns})
        until(lambda: any(each.prepares for each in run.queue.status().sessions), "a worker that loads its model")

        # when somebody waits for what it will give
        with pytest.raises(DeadlineExceeded) as waited:
            run.queue.get("train", timeout_s=0.0)

        # then that is the reason, wherever one looks
        assert f"2 rows are ready for task '{task}'; {task}-0 is loading its model for " in str(waited.value)
        with pytest.raises(DeadlineExceeded, match=f"{task}-0 is loading its model for "):
            run.wait(worker, timeout_s=0.0)

        # when it is loaded
        loads.unlink()
        until(lambda: not any(each.prepares for each in run.queue.status().sessions), "the end of loading")
        with pytest.raises(DeadlineExceeded) as waited:
            run.wait(worker, timeout_s=0.0)
        assert "loading" not in str(waited.value)
