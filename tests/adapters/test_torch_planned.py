"""What a workflow of the engines on torch is refused for before anything starts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError


def workflow(
    model: str, rollout: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **more: Any
) -> af.Workflow:
    rollouts = af.Rollout("transformers", model=model, group_size=4, **({"sampling": LENGTH} | (rollout or {})))
    trainer = af.Train("torch", model=model, **(train or {}))
    return af.Workflow(prompts=["12="], rollout=rollouts, reward=scored, train=trainer, batch_size=8, steps=1, **more)


LENGTH = af.Sampling(max_tokens=4)


def scored(response: list[str]) -> list[float]:
    return [1.0 for _ in response]


def test_a_trainer_and_a_rollout_of_other_dtypes_are_refused(tiny: str) -> None:
    # the folder's is float32
    with pytest.raises(
        ConfigError, match="train publishes weights in bfloat16, and rollout 'rollout' .* takes float32"
    ):
        workflow(tiny, train={"dtype": "bfloat16"})
    with pytest.raises(
        ConfigError, match="train publishes weights in float32, and rollout 'rollout' .* takes bfloat16"
    ):
        workflow(tiny, rollout={"dtype": "bfloat16"})
    with pytest.raises(ConfigError, match=r"say weights=af.Weights\(dtype='float32'\), or dtype='float16' for the"):
        workflow(tiny, weights=af.Weights(dtype="float16"))

    # what is the same in the end is fine
    workflow(tiny)
    workflow(tiny, rollout={"dtype": "bfloat16"}, train={"dtype": "bfloat16"})
    workflow(tiny, rollout={"dtype": "bfloat16"}, weights=af.Weights(dtype="bfloat16"))
    workflow(tiny, train={"dtype": "bfloat16"}, weights=af.Weights(dtype="float32"))


def test_an_option_of_another_type_is_refused_by_name(tiny: str) -> None:
    with pytest.raises(ConfigError, match=r"engine 'torch', option 'lr' must be float, not str: '1e-5'"):
        workflow(tiny, train={"lr": "1e-5"})
    with pytest.raises(ConfigError, match=r"engine 'transformers', option 'max_rows' must be int, not float: 8.5"):
        workflow(tiny, rollout={"max_rows": 8.5})
    workflow(tiny, train={"lr": 1, "betas": (0.9, 0.99), "decay_steps": None})


def test_a_stop_of_several_tokens_is_refused_and_one_of_one_token_ends_responses(tiny: str) -> None:
    with pytest.raises(ConfigError, match=r"a response ends at one token, and stop '12' is 2: \["):
        workflow(tiny, rollout={"sampling": af.Sampling(max_tokens=4, stop=["=", "12"])})
    judge = af.Generate("transformers", model=tiny, sampling=af.Sampling(stop="12"))
    with pytest.raises(ConfigError, match="stop '12' is 2"):
        workflow(tiny, stages=[af.Stage(judge, needs=["prompt"], gives=["verdict"])])
    sampling = af.Sampling(max_tokens=4, stop="=", stop_ids=(7,))
    workflow(tiny, rollout={"sampling": sampling})
    with pytest.raises(ConfigError, match="a request takes stop_ids"):
        af.Request(np.array([1], np.int32), sampling)
