"""Model folders: weights of the index or of model.safetensors, a tied output layer, folders compared, small files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_runs import echo_workflow

from asyncflow_http.model_folder import check_fit
from asyncflow_sdk.errors import ConfigError, WeightMismatch
from asyncflow_sdk.testing.kit.updates import HeldUpdate
from asyncflow_sdk.types.safetensors import plan
from asyncflow_sdk.workflow.model_folder import ModelFolder, copy_small_files, write_model_folder

BODY, HEAD, EMBEDDING = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"


def write(file: Path, **tensors: int) -> None:
    """Write a file with float32 tensors of shape [4, 2], each full of one number."""
    file.parent.mkdir(parents=True, exist_ok=True)
    layout = plan(dict.fromkeys(tensors, ("float32", (4, 2))))
    data = {layout.offsets[name]: np.full((4, 2), number, np.float32) for name, number in tensors.items()}
    file.write_bytes(layout.header + b"".join(data[at].tobytes() for at in sorted(data)))


def folder(path: Path, tie: bool = False, **tensors: int) -> Path:
    """Write a model folder with one file of weights."""
    write(path / "model.safetensors", **tensors)
    (path / "config.json").write_text(json.dumps({"vocab_size": 1024, "tie_word_embeddings": tie}))
    return path


def version(**tensors: int) -> HeldUpdate:
    return HeldUpdate(1, {name: np.full((4, 2), number, np.float32) for name, number in tensors.items()})


def index(path: Path, **files: str) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_other_files_of_weights_are_not_of_the_model(tmp_path: Path) -> None:
    # given copies in another format and an adapter beside the weights, in one file and in several
    for single in (True, False):
        path = folder(tmp_path / str(single), w=1, v=2)
        for name in ("consolidated", "adapter_model"):
            write(path / f"{name}.safetensors", **{"layers.0.wq.weight": 1})
        if not single:
            write(path / "model-1.safetensors", w=1)
            (path / "model.safetensors").rename(path / "model-2.safetensors")
            index(path, w="model-1.safetensors", v="model-2.safetensors")

        assert ModelFolder(path).tensors.keys() == {"w", "v"}


def test_a_folder_that_engines_would_read_differently_is_refused(tmp_path: Path) -> None:
    both = folder(tmp_path / "both", w=1)
    index(both, w="model-1.safetensors")
    lacking = folder(tmp_path / "lacking", w=1)
    index(lacking, w="model-1.safetensors")
    (lacking / "model.safetensors").unlink()
    (empty := tmp_path / "empty").mkdir()

    for path, reason in (
        (both, "lists 'model-1.safetensors', and engines may read model.safetensors instead: remove one"),
        (lacking, "model-1.safetensors cannot be read"),
        (empty, "has no model.safetensors and no index"),
        (tmp_path / "nowhere", "does not exist"),
    ):
        with pytest.raises(ConfigError, match=reason):
            ModelFolder(path)


@pytest.mark.parametrize(
    "config",
    [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}, {"model_type": "gemma3_text"}],
)
def test_a_tied_output_layer_is_a_copy_or_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    for name, head in (("equal", 1), ("other", 3)):
        path = folder(tmp_path / name, **{BODY: 0, HEAD: head, EMBEDDING: 1})
        (path / "config.json").write_text(json.dumps({"vocab_size": 1024} | config))

    assert ModelFolder(tmp_path / "equal").redundant == {HEAD}
    with pytest.raises(ConfigError, match=r"its lm_head.weight is not its model.embed_tokens.weight.*Set tie_word"):
        ModelFolder(tmp_path / "other")
    assert ModelFolder(folder(tmp_path / "untied", **{HEAD: 1, EMBEDDING: 1})).redundant == frozenset()


@pytest.mark.parametrize(
    "config", ["{}", '{"text_config": null}', '{"text_config": {"model_type": "qwen3"}}', "no JSON"]
)
def test_a_configuration_that_says_little_ties_nothing(tmp_path: Path, config: str) -> None:
    path = folder(tmp_path / "untied", **{BODY: 0, HEAD: 3, EMBEDDING: 1})
    (path / "config.json").write_text(config)

    found = ModelFolder(path)

    assert found.redundant == frozenset()
    if config != "no JSON":
        assert found.vocabulary == found.tensors[EMBEDDING].shape[0]


def test_folders_of_trainer_and_rollouts_are_compared_before_anything_starts(tmp_path: Path) -> None:
    # given a folder, one with and one without a copy of the tied embedding, one of another model, one that contradicts itself
    base = folder(tmp_path / "base", tie=True, **{BODY: 0, EMBEDDING: 1, HEAD: 1})
    bare = folder(tmp_path / "bare", tie=True, **{BODY: 5, EMBEDDING: 6})
    other = folder(tmp_path / "other", **{BODY: 0, "model.embed_tokens.weight": 1, "mtp.fc.weight": 2})
    wrong = folder(tmp_path / "wrong", tie=True, **{BODY: 0, EMBEDDING: 1, HEAD: 3})

    def planned(trained: Path, served: Path) -> Any:
        return echo_workflow(train={"model": str(trained)}, rollout={"model": str(served)})

    # when the plan is made, only the last two are refused
    for trained, served in ((base, base), (base, bare), (bare, base)):
        planned(trained, served)
    with pytest.raises(ConfigError, match=rf"mtp.fc.weight: {base} has no such weight") as refused:
        planned(base, other)
    assert "give both the same model=" in str(refused.value)
    assert HEAD not in str(refused.value)
    with pytest.raises(ConfigError, match="Set tie_word_embeddings=false") as refused:
        planned(wrong, wrong)
    assert str(refused.value).count("engines differ") == 1


def test_a_quantised_folder_is_refused_to_the_trainer_before_anything_starts(tmp_path: Path) -> None:
    base, quantised = folder(tmp_path / "base", w=1), folder(tmp_path / "quantised", w=1)
    (quantised / "config.json").write_text(json.dumps({"vocab_size": 1024, "quantization_config": {"bits": 4}}))

    echo_workflow(train={"model": str(base)}, rollout={"model": str(quantised)})
    with pytest.raises(ConfigError, match="quantization_config in config.json.*save it dequantised"):
        echo_workflow(train={"model": str(quantised)}, rollout={"model": str(quantised)})


def test_a_version_brings_a_copy_of_the_tied_embedding_with_equal_bytes_or_none(tmp_path: Path) -> None:
    both = ModelFolder(folder(tmp_path / "both", tie=True, **{BODY: 0, EMBEDDING: 1, HEAD: 1}))
    bare = ModelFolder(folder(tmp_path / "bare", tie=True, **{BODY: 0, EMBEDDING: 1}))
    plain, twice = version(**{BODY: 2, EMBEDDING: 3}), version(**{BODY: 2, EMBEDDING: 3, HEAD: 3})
    for held in (both, bare):
        assert check_fit(plain, held, lambda dtype: (dtype,)) == {}
        assert check_fit(twice, held, lambda dtype: (dtype,)) == {HEAD: EMBEDDING}
        with pytest.raises(WeightMismatch, match=HEAD):
            check_fit(version(**{BODY: 2, EMBEDDING: 3, HEAD: 4}), held, lambda dtype: (dtype,))


def test_the_best_version_keeps_what_is_not_trained(tmp_path: Path) -> None:
    base = folder(tmp_path / "base", **{BODY: 0, "mtp.fc.weight": 7})
    update = version(**{BODY: 5})
    update.untrained = ("mtp.fc.weight",)

    write_model_folder(update, str(base), tmp_path / "best")

    best = ModelFolder(tmp_path / "best")
    assert {name: float(best.array(name).max()) for name in best.tensors} == {BODY: 5.0, "mtp.fc.weight": 7.0}


def test_small_files_travel_and_weights_stay(tmp_path: Path) -> None:
    # given a folder as published, read-only
    source, target = folder(tmp_path / "source", w=1), tmp_path / "target"
    small = {
        "processor_config.json", "preprocessor_config.json", "chat_template.jinja", "spiece.model", "own.tiktoken",
        "modeling_own.py", "__init__.py", "README.md", "LICENSE", "config.json", "additional_chat_templates/tool.jinja",
    }  # fmt: skip
    large = {
        "consolidated.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "original/params.json",
        "original/consolidated.00.pth", ".cache/huggingface/lock", "__pycache__/modeling_own.pyc", "video.mp4",
    }  # fmt: skip
    for name in small | large:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("{}")
        (source / name).chmod(0o444)
    os.truncate(source / "video.mp4", (64 << 20) + 1)
    target.mkdir()
    (within := source / "out" / "first").mkdir(parents=True)

    copy_small_files(source, target)
    copy_small_files(source, within)

    found = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
    assert found == small
    assert not (within / "out").exists()
    assert os.stat(target / "config.json").st_mode & 0o200, "an export changes it"
