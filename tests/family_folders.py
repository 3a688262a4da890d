"""Model folders of families as their users have them: experts apart, prefixes, tensors that nobody trains, two dtypes, a
second name of a tied weight, and small files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from asyncflow_torch.families import family

KINDS = ("qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "qwen3_5", "gemma3", "mistral3", "qwen2_5_vl")
"""Of each kind: tied, experts, buffers, a hybrid in a multimodal folder, multimodal folders."""


def family_folder(name: str, path: Path) -> str:
    """Write a bfloat16 folder whose vectors are float32, with digits that bfloat16 has not."""
    family(name, path, dtype="bfloat16")
    file = path / "model.safetensors"
    tensors = {each: t.float() * 1.0001 + 0.0001 if t.dim() == 1 else t for each, t in load_file(file).items()}
    if name == "qwen3":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    return str(path)


def tensors_in(folder: Path | str) -> dict[str, Any]:
    return load_file(Path(folder, "model.safetensors"))


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True for equal names, dtypes, and bytes."""
    return one.keys() == other.keys() and all(
        each.dtype == other[name].dtype and torch.equal(each, other[name]) for name, each in one.items()
    )


def kinds_of(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: (each.dtype, each.shape) for name, each in tensors.items()}
