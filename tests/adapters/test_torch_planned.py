"""What a workflow of the engines on torch is refused for before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.types import Batch
from asyncflow_torch.reference import tiny_model


def workflow(
    model: str, rollout: dict[str, Any] | None = None, train: dict[str, Any] | None = None,
    engine: str = "transformers", **more: Any,
) -> af.Workflow:  # fmt: skip
    rollouts = af.Rollout(engine, model=model, group_size=4, **({"sampling": LENGTH} | (rollout or {})))
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
    with pytest.raises(ConfigError, match=r"engine 'torch', option 'learning_rate' must be float, not str: '1e-5'"):
        workflow(tiny, train={"learning_rate": "1e-5"})
    with pytest.raises(ConfigError, match=r"engine 'transformers', option 'max_rows' must be int, not float: 8.5"):
        workflow(tiny, rollout={"max_rows": 8.5})
    workflow(tiny, train={"learning_rate": 1, "betas": (0.9, 0.99), "max_steps": None})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": {"lr_scheduler_type": "cosin"}}, "lr_scheduler_type 'cosin' is none of constant, linear, cosine"),
        ({"train": {"lr_scheduler_type": "linear", "warmup_steps": 1}}, "max_steps=1 end before the 1 steps of the w"),
        ({"train": {"device": "gpu"}}, "device 'gpu' cannot be used here: Expected one of cpu, cuda"),
        ({"train": {"dtype": "float33"}}, "dtype 'float33' is no floating-point dtype"),
        ({"train": {"betas": (0.9, 1.0)}}, "betas must be two numbers from 0 to below 1"),
        ({"train": {"warmup_ratio": 2.0}}, "warmup_ratio is a share of max_steps"),
        ({"train": {"updates": 0}}, "updates must be above 0"),
        ({"rollout": {"device": "cuda:x"}}, "device 'cuda:x' cannot be used here"),
        ({"rollout": {"attn_implementation": "flash"}}, "attention 'flash' is none of transformers: eager, flash_att"),
        ({"rollout": {"max_rows": 0}}, "max_rows must be 1 or more"),
    ],
)  # fmt: skip
def test_a_value_of_an_option_is_refused_before_a_worker_starts(
    tiny: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"engine '(transformers|torch)': {message}"):
        workflow(tiny, **options)


def test_a_schedule_lasts_as_long_as_the_run(tiny: str) -> None:
    scheduled = {"lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "updates": 2}

    assert workflow(tiny, train=scheduled).plan.train.options["max_steps"] == 2 * workflow(tiny).plan.options.steps
    assert workflow(tiny, train={**scheduled, "max_steps": 7}).plan.train.options["max_steps"] == 7


def test_draws_with_other_log_probs_are_refused_by_the_declaration_of_the_engine(tiny: str) -> None:
    for name, value in {"min_p": 0.1, "repetition_penalty": 1.2}.items():
        sampling = af.Sampling(max_tokens=4, **{name: value})
        refused = rf"engine 'vllm' cannot draw with {name}={value}: its log-probs .* It can with: top_k, top_p"
        with pytest.raises(ConfigError, match=refused):
            workflow(tiny, rollout={"sampling": sampling}, engine="vllm")
        workflow(tiny, rollout={"sampling": sampling})


@pytest.mark.parametrize("engine", ["torch", "fsdp", "deepspeed"])
def test_training_in_float16_is_refused_with_its_cure_and_a_reference_in_it_is_not(
    engine: str, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path, dtype="float16", ends=True)
    elsewhere: dict[str, Any] = {"model": model, "python": sys.executable}  # deepspeed is not installed here
    rollout = af.Rollout("transformers", model=model, group_size=4, sampling=LENGTH)
    reference = af.Stage(af.Logprobs(engine, model=model), gives=["ref_logprobs"], python=sys.executable)

    def made(**train: Any) -> af.Workflow:
        return af.Workflow(
            prompts=["12="], rollout=rollout, reward=scored, stages=[reference], batch_size=8, steps=1,
            train=af.Train(engine, **elsewhere, **train), weights=af.Weights(dtype="float16"),
        )  # fmt: skip

    cure = "small gradients are below its range; say dtype='bfloat16' or dtype='float32'"
    with pytest.raises(
        ConfigError, match=f"{engine!r} does not train in float16, the dtype of its model folder: {cure}"
    ):
        made()
    with pytest.raises(ConfigError, match=f"{engine!r} does not train in float16: {cure}"):
        made(dtype="half")
    made(dtype="bfloat16")


@pytest.mark.parametrize("engine", ["torch", "fsdp"])
def test_an_engine_in_float16_gives_log_probs_and_does_not_train(engine: str, batch: Batch, tmp_path: Path) -> None:
    make: Any = registry().get("train", engine).load()
    model, found = tiny_model(tmp_path, dtype="float16", ends=True), []

    with pytest.raises(
        ConfigError, match="in float16, the dtype of model folder .*, loses small gradients.*say dtype='bf"
    ):
        make(model)
    with pytest.raises(ConfigError, match="in float16 loses small gradients"):
        make(model, dtype="half")
    for dtype in ("auto", "float32"):
        frozen = make(model, dtype=dtype, frozen=True, device="cpu")
        found.append(frozen.logprobs(batch).values)
        frozen.close()
    assert abs(found[0] - found[1]).max() < 0.02
