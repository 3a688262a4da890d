"""The seed of a workflow: the same rows and draws again, and a seed of its own for each task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import asyncflow_sdk as af


def odd(response_ids: Any) -> list[float]:
    return [float(np.mean(np.asarray(row) % 2)) for row in response_ids]


def drawn(model: str, directory: Path, seed: int) -> list[tuple[Any, ...]]:
    """The rows of all steps: ids, prompts, responses and reasons of their ends."""
    place: dict[str, Any] = {"launcher": "thread"}
    af.Workflow(
        prompts={"prompt_ids": [[5, 9], [4, 6, 8], [7], [3, 3, 5], [11, 4]]},
        rollout=af.Rollout(
            "transformers", model=model, prompt="prompt_ids", group_size=4, sampling=af.Sampling(max_tokens=6), **place
        ),
        reward=af.Stage(odd, task="reward", **place), train=af.Train("torch", model=model, learning_rate=1e-3, **place),
        batch_size=16, steps=3, staleness=af.Staleness(max_staleness=0), seed=seed,
    ).run(directory)  # fmt: skip
    columns = ("prompt_ids", "response_ids", "finish_reason")
    return [
        (step, batch.ids.tolist(), *(getattr(batch[name], "tolist", lambda of=batch[name]: of)() for name in columns))
        for step, batch in af.read_steps(directory)
    ]


def test_a_workflow_with_a_seed_draws_the_same_rows_again(tiny: str, tmp_path: Path) -> None:
    first, again, other = (drawn(tiny, tmp_path / name, seed) for name, seed in (("a", 7), ("b", 7), ("c", 8)))

    assert again == first
    assert [prompts for _, _, prompts, *_ in other] != [prompts for _, _, prompts, *_ in first]
    assert len({tuple(response) for response in first[0][3]}) > 8, "each row has draws of its own"


def test_each_task_that_draws_has_a_seed_of_its_own_unless_it_was_given_one(tiny: str) -> None:
    short = af.Sampling(max_tokens=6)
    judge = af.Generate("transformers", model=tiny, sampling=short)
    rollout: dict[str, Any] = {"model": tiny, "prompt": "prompt_ids", "group_size": 4, "sampling": short}

    def seeds(seed: int | None) -> list[Any]:
        plan = af.Workflow(
            prompts={"prompt_ids": [[5, 9]]}, reward=odd, train=af.Train("torch", model=tiny), batch_size=4, steps=1,
            rollout=[
                af.Rollout("transformers", **rollout), af.Rollout("transformers", **rollout),
                af.Rollout("transformers", task="second", **rollout),
                af.Rollout("transformers", task="third", **(rollout | {"sampling": af.Sampling(max_tokens=6, seed=3)})),
            ],
            stages=[af.Stage(judge, needs=["prompt_ids"], gives=["judged"])], seed=seed,
        ).plan  # fmt: skip
        return [each.sampling.seed for each in (*plan.rollouts, plan.stages[-1].work)]  # type: ignore[union-attr]

    first, same, second, third, judged = seeds(7)
    assert first == same and third == 3 and len({first, second, third, judged}) == 4
    assert None not in (second, judged)
    assert seeds(None) == [None, None, None, 3, None]
