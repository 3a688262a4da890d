"""The map between a model and its folder, over tiny models of the families that people train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import Chunk, Interleave, WeightConverter

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.types import Shard
from asyncflow_torch.families import FAMILIES, family
from asyncflow_torch.folder_map import FlatRun, FolderMap, Region, runs_of
from asyncflow_torch.policy import load_policy

RANKS = 3


def runs_of_rank(model: Any, rank: int, ranks: int) -> dict[str, FlatRun]:
    """A rank's elements of each parameter."""
    found = {}
    for name, weight in model.named_parameters():
        flat, low, high = (
            weight.detach().view(-1),
            weight.numel() * rank // ranks,
            weight.numel() * (rank + 1) // ranks,
        )
        if low < high:
            found[name] = FlatRun(flat[low:high], low)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_each_tensor_of_the_folder_is_a_part_of_the_model(name: str, tmp_path: Path) -> None:
    # given a model in its folder's dtype
    path = family(name, tmp_path, dtype="bfloat16")
    given = load_file(tmp_path / "model.safetensors")
    model = load_policy(path, dtype="auto", device="cpu")

    # when
    folder = FolderMap.of(model, path)
    made = dict(folder.published(runs_of(model).items()))

    # then the whole model is the folder: names, dtypes, shapes, bytes
    assert made.keys() | {*folder.untrained} == given.keys()
    assert made.keys().isdisjoint(folder.untrained)
    assert all(made[each].dtype == given[each].dtype and torch.equal(made[each], given[each]) for each in made)
    assert {*FAMILIES[name].untrained} <= {*folder.untrained}

    # and so are the elements of ranks, published, in a file, and read back
    whole = {each: torch.zeros_like(tensor) for each, tensor in made.items()}
    file = {each: torch.zeros_like(tensor).view(-1) for each, tensor in made.items()}
    empty = load_policy(path, dtype="auto", device="cpu")
    for weight in empty.parameters():
        weight.data.zero_()
    for rank in range(RANKS):
        runs = runs_of_rank(model, rank, RANKS)
        for each, piece in folder.published(runs.items(), bucket_bytes=1000):
            shard = piece if isinstance(piece, Shard) else Shard(piece, (0,) * piece.dim(), tuple(piece.shape))
            whole[each][tuple(slice(a, a + n) for a, n in zip(shard.start, shard.tensor.shape, strict=True))] += (
                shard.tensor
            )
        for each, piece, start in folder.pieces(made.keys(), runs.items()):
            file[each][start : start + piece.numel()] += piece.reshape(-1)
        for each in made:
            folder.fill(each, given[each], runs_of_rank(empty, rank, RANKS))
    assert all(torch.equal(whole[each], given[each]) for each in made)
    assert all(torch.equal(file[each], given[each].view(-1)) for each in made)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), empty.parameters(), strict=True))


def test_a_run_cuts_any_view_of_a_parameter() -> None:
    """Every run of a parameter of 4 × 6 × 5, and a transposed slice of it."""
    values = torch.arange(120)
    part = Region("w", "live", (0, 0, 0), (4, 3, 2), 7, (30, 5, 1))._replace(shape=(2, 4, 3), strides=(1, 30, 5))
    for low in range(0, 120, 3):
        for high in range(low, 121, 4):
            seen = torch.zeros(2, 4, 3, dtype=torch.long)
            for each in part.cut(low, high):
                each.of(seen).add_(each.within(FlatRun(values[low:high], low)))
            wanted = part.within(FlatRun(values))
            assert torch.equal(seen, torch.where((wanted >= low) & (wanted < high), wanted, 0))


def test_a_folder_of_a_fused_form_is_taken_as_it_is(tmp_path: Path) -> None:
    # given a folder with the names of the live model
    path = family("qwen3_moe", tmp_path / "made")
    model = load_policy(path, dtype="auto", device="cpu")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)

    # when
    loaded = load_policy(str(tmp_path / "fused"), dtype="auto", device="cpu")
    folder = FolderMap.of(loaded, str(tmp_path / "fused"))

    # then
    assert folder.kinds.keys() == load_file(tmp_path / "fused" / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.gate_up_proj" in folder.kinds


def test_a_folder_of_other_names_is_refused_by_name(tmp_path: Path) -> None:
    path = family("llama", tmp_path / "other")
    model = load_policy(family("qwen3", tmp_path / "mine"), dtype="auto", device="cpu")
    with pytest.raises(ConfigError, match=r"cannot be written back:\n.*k_norm"):
        FolderMap.of(model, path)


def _saved_with(operations: list[Any], parts: list[str], whole: str, path: Path) -> tuple[Any, str]:
    """A Llama whose folder has ``whole`` in place of ``parts``."""
    model = load_policy(family("llama", path / "made"), dtype="auto", device="cpu")
    model._weight_conversions = [WeightConverter(whole, parts, operations=operations)]  # noqa: SLF001
    model.save_pretrained(path / "joined")
    return model, str(path / "joined")


def test_a_tensor_of_the_folder_may_be_several_parameters(tmp_path: Path) -> None:
    # given a folder with one tensor for two parameters
    parts = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    model, path = _saved_with([Chunk(dim=0)], parts, "mlp.gate_up_proj.weight", tmp_path)
    given = load_file(Path(path, "model.safetensors"))
    assert "model.layers.0.mlp.gate_up_proj.weight" in given

    # then each parameter is a part of it, there and back
    folder, runs = FolderMap.of(model, path), runs_of(model)
    assert not folder.untrained
    assert all(torch.equal(folder.whole(name, runs), tensor) for name, tensor in given.items())
    for name, tensor in given.items():
        folder.fill(name, tensor + 1, runs)
    assert all(torch.equal(folder.whole(name, runs), tensor + 1) for name, tensor in given.items())


def test_numbers_in_another_order_are_refused_where_they_are_trained(tmp_path: Path) -> None:
    """Their reversal is no view, so it could not be written back in part."""
    model, path = _saved_with([Interleave(0)], ["mlp.down_proj.weight"], "mlp.down_proj.weight", tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be written back:\n.*mlp.down_proj") as refused:
        FolderMap.of(model, path)
    assert "save_pretrained" not in str(refused.value)  # which would put them in that order again
    assert not FolderMap.of(model, path, frozen=True).freeze(model, ()).kinds


def test_quantised_weights_are_refused_where_they_are_trained(tmp_path: Path) -> None:
    path = Path(family("llama", tmp_path))
    model = load_policy(str(path), dtype="auto", device="cpu")
    config, weights = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    for told, stored, says in (
        ({"quantization_config": {"quant_method": "mxfp4"}}, torch.float32, "quantization_config in config.json"),
        ({}, torch.float8_e4m3fn, "float8_e4m3fn in model"),
    ):
        (path / "config.json").write_text(json.dumps(config | told))
        save_file({name: each.to(stored) for name, each in weights.items()}, path / "model.safetensors")
        with pytest.raises(ConfigError, match=rf"{says}.*save it dequantised"):
            FolderMap.of(model, str(path))
        assert not FolderMap.of(model, str(path), frozen=True).kinds
