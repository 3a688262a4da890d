"""Tokens of a model folder: where responses end, and what its tokenizer cannot give to the model."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.workflow.loops.tokenizer import end_tokens

NAMED = {"tokenizer_config.json": {"eos_token": {"content": "</s>"}}}
ADDED = {"tokenizer.json": {"added_tokens": [{"id": 5, "content": "</s>"}], "model": {"vocab": {"</s>": 4}}}}


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"generation_config.json": {"eos_token_id": [2, 7, 9]}, "config.json": {"eos_token_id": 2}}, [2, 7, 9]),
        ({"generation_config.json": {"eos_token_id": 7}, "config.json": {"eos_token_id": 2}}, [7, 2]),
        ({"generation_config.json": {"eos_token_id": None}, "config.json": {"eos_token_id": 0}}, [0]),
        ({"config.json": {"eos_token_id": 1, "text_config": {"eos_token_id": [1, 106]}}}, [1, 106]),
        ({"config.json": {"eos_token_id": 2}, **NAMED, **ADDED}, [2, 5]),
        ({**NAMED, "tokenizer.json": {"model": {"vocab": [["<s>", 0.0], ["</s>", -1.5]]}}}, [1]),
        ({"tokenizer_config.json": {"eos_token": "</s>", "added_tokens_decoder": {"3": {"content": "</s>"}}}}, [3]),
        ({"config.json": {}}, []),
    ],
)
def test_a_response_ends_at_every_end_token_of_the_folder(tmp_path: Path, files: Any, ends: list[int]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))

    assert end_tokens(tmp_path) == ends


@pytest.fixture
def model(tiny: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def scored(response: list[str]) -> list[float]:
    return [1.0 for _ in response]


def workflow(model: Path, prompts: Any = ("12=",), engine: str = "transformers", **more: Any) -> af.Workflow:
    options = {"group_size": 4, "sampling": af.Sampling(max_tokens=4), "python": sys.executable} | more.pop(
        "rollout", {}
    )
    return af.Workflow(
        prompts=prompts, rollout=af.Rollout(engine, model=model, **options), reward=scored,
        train=af.Train("torch", model=model, **more.pop("train", {})), batch_size=8, steps=1, **more,
    )  # fmt: skip


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_different_end_tokens_are_named_before_the_run(model: Path) -> None:
    assert "end tokens" not in str(workflow(model))

    change(model / "generation_config.json", eos_token_id=[2, 9])

    said = (
        "end tokens of rollout: 2, 9: generation_config.json names 2, 9; config.json names 2; the tokenizer names 2"
    )
    assert said in str(workflow(model))


def test_tokens_without_an_embedding_are_found_before_the_run(model: Path) -> None:
    change(model / "config.json", vocab_size=40)  # of the tokenizer's 43 tokens
    cure = r"tokenizer=\), or .*resize_token_embeddings"

    with pytest.raises(ConfigError, match=rf"prompt 1 has token 4\d, and the embedding of .* has 40 tokens.*{cure}"):
        workflow(model, ["12=", "xyz"])
    with pytest.raises(ConfigError, match=rf"prompt 1 has token 42, and the embedding of .* has 40 tokens.*{cure}"):
        workflow(model, {"prompt_ids": af.Ragged.of([[3, 4], [5, 42]])}, rollout={"prompt": "prompt_ids"})
    assert "has 43 tokens, and the embedding of" in str(workflow(model))  # prompts happen to need none of them


def test_a_doubled_beginning_of_a_text_is_a_warning_with_its_cure(model: Path) -> None:
    processor = {
        "type": "TemplateProcessing",
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [1], "tokens": ["<bos>"]}},
    }
    parts = [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    change(
        model / "tokenizer.json",
        post_processor=processor | {"single": parts, "pair": [*parts, {"Sequence": {"id": "B", "type_id": 1}}]},
    )

    (warning,) = workflow(model, ["12=", "<bos>12=", "<bos>3="]).plan.warnings
    assert "begin with the token for the beginning of a text" in warning
    assert "remove it from the prompts' text, or give token ids" in warning
    assert warning in str(workflow(model, ["<bos>12="]))
    assert workflow(model).plan.warnings == []


def test_a_tokenizer_without_its_fast_file_is_refused_with_its_cure(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    cure = r"transformers.AutoTokenizer.from_pretrained\('.*model'\).save_pretrained\('.*model'\) makes this file"

    with pytest.raises(ConfigError, match=f"has no tokenizer.json; .*{cure}"):
        workflow(model)
    with pytest.raises(ConfigError, match=f"there is no tokenizer at .*{cure}"):
        workflow(model, rollout={"tokenizer": model})


def test_restricted_draws_are_named_with_what_they_cost(model: Path) -> None:
    cut = af.Sampling(max_tokens=4, top_p=0.9, top_k=5)

    assert "draws of rollout: top_p, top_k cut them" in str(workflow(model, rollout={"sampling": cut}))
    assert "8 to 27 %" in str(workflow(model, rollout={"sampling": cut}))
    assert "draws of" not in str(workflow(model))


def test_engines_that_cannot_compare_bytes_get_a_probe(model: Path) -> None:
    by_vllm = workflow(model, engine="vllm")
    exact = workflow(model, engine="vllm", rollout={"dtype": "float32"}).plan.chosen_weights.probe
    warm = af.Sampling(max_tokens=4, temperature=0.7)
    off = workflow(model, engine="vllm", rollout={"sampling": warm}, train={"temperature": 0.7})
    own = af.Weights(probe=af.Probe(((3,),), ((4,),), tolerance=0.5))

    assert "probe: 4 sequences at each version: log-probs of vllm must be the trainer's to 2" in str(by_vllm)
    assert exact is not None and exact.tolerance == 0.01
    assert all(10 <= token < 32 for row in (*exact.prompt_ids, *exact.response_ids) for token in row)
    assert "probe: off: one is compared at temperature 1, and training computes at 0.7" in str(off)
    assert off.plan.chosen_weights.probe is None
    unasked = workflow(model, engine="vllm", weights=af.Weights(probe=False))
    assert "probe: off: as asked" in str(unasked)
    assert unasked.plan.chosen_weights.probe is None
    assert workflow(model, engine="vllm", weights=own).plan.chosen_weights.probe == own.probe
    for quiet in (workflow(model), workflow(model, engine="vllm", weights=af.Weights(swap="in_flight"))):
        assert quiet.plan.chosen_weights.probe is None
        assert "probe" not in str(quiet)
