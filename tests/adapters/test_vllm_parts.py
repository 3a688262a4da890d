"""What of the adapter for vLLM works without vLLM: end tokens, answers of a server, and a folder's weights where they lie."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from asyncflow_sdk.errors import ConfigError, EngineError
from asyncflow_sdk.interfaces import Request
from asyncflow_sdk.testing.kit.updates import HeldUpdate
from asyncflow_sdk.types import Sampling
from asyncflow_sdk.workflow.model_folder import ModelFolder
from asyncflow_vllm.folder import FolderWeights, WholeLayers
from asyncflow_vllm.handover import Handover, map_handover
from asyncflow_vllm.requests import Limits

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request(np.zeros(0, np.int32), Sampling(max_tokens=4)), "a prompt has one token or more"),
        (Request(np.full(9, 5, np.int32), Sampling(max_tokens=8)), "9 tokens and max_tokens=8 need 17; the context is 16"),
        (Request(np.array([43], np.int32), Sampling(max_tokens=4)), "token id 43 is not in the vocabulary of 43"),
        (Request(np.array([5], np.int32), Sampling(max_tokens=4, top_p=0.5)), "under the whole vocabulary"),
        (Request(np.array([5], np.int32), Sampling(max_tokens=4, temperature=0.001)), "not at 0.001"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_answered_is_told_why(request_: Request, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        Limits(vocabulary=43, context=16, rows=8).check(request_)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_weights_of_a_folder_are_told_of_where_they_lie(tmp_path: Path, dtype: str) -> None:
    from asyncflow_torch.reference import tiny_model

    folder = tiny_model(tmp_path, dtype=dtype)
    weights = FolderWeights(ModelFolder(folder), 3)
    handover = Handover()

    with handover.give(weights) as told:
        found = {name: np.array(array) for name, array in map_handover(told)}

    assert handover.nbytes == 0
    assert found.keys() == weights.tensors.keys()
    read = dict(weights.arrays())
    for name, tensor in weights:
        assert found[name].dtype == read[name].dtype
        assert found[name].tobytes() == read[name].tobytes() == tensor.view(torch.uint8).numpy().tobytes()
    handover.close()


def test_a_layer_trained_in_part_is_handed_over_whole(tmp_path: Path) -> None:
    # given a folder of links, as the hub's cache, and a version without a fused part of layer 0, all of layer 1 and the head
    from safetensors.numpy import load_file, save_file

    down, up = (f"model.layers.0.mlp.experts.1.{each}_proj.weight" for each in ("down", "up"))
    kept = [down, "model.layers.1.mlp.up_proj.weight", "lm_head.weight", "mtp.norm.weight"]
    held = {name: np.full(2, number, np.float32) for number, name in enumerate([up, "model.norm.weight", *kept])}
    save_file(held, tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to("blob")
    update = HeldUpdate(1, {name: held[name] + 9 for name in held.keys() - {*kept}})
    update.untrained = kept

    # when
    with Handover().give(WholeLayers(update, ModelFolder(tmp_path))) as told:
        found = {name: np.array(array) for name, array in map_handover(told)}

    # then the rest of layer 0 comes from the folder
    wanted = {**dict(update.arrays()), down: held[down]}
    assert found.keys() == wanted.keys() == load_file(tmp_path / "blob").keys() - {*kept[1:]}
    assert all(np.array_equal(found[name], array) for name, array in wanted.items())


def test_weights_across_the_grain_of_their_dtype_are_copied(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(
        {"a": np.arange(3, dtype=np.uint8), "b": np.arange(4, dtype=np.float32)}, tmp_path / "model.safetensors"
    )
    file = tmp_path / "model.safetensors"
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    data = {name: raw[8 + size :][slice(*header[name]["data_offsets"])] for name in ("a", "b")}
    header["a"]["data_offsets"], header["b"]["data_offsets"] = [0, 3], [3, 19]
    text = json.dumps({name: header[name] for name in ("a", "b")}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data["a"] + data["b"])
    weights = FolderWeights(ModelFolder(str(tmp_path)), 0)
    assert weights.place("a") is not None

    with Handover().give(weights) as told:
        found = {name: array.tolist() for name, array in map_handover(told)}

    assert found == {"a": [0, 1, 2], "b": [0.0, 1.0, 2.0, 3.0]}
    assert (weights.place("b") is None) == bool((8 + len(text) + 3) % 4)


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path) -> None:
    from asyncflow_torch.reference import tiny_model

    folder = tiny_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        ModelFolder(folder)
