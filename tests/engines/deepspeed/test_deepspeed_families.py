"""Models of several families under DeepSpeed: published and exported as their folder has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed_parts import RANKS, engine_of, options
from safetensors.torch import load_file, save_file

from asyncflow_sdk.algorithms import GRPO
from asyncflow_sdk.testing.kit.updates import HeldUpdate
from asyncflow_sdk.types import Batch, Shard
from asyncflow_sdk.types.dtypes import from_torch
from asyncflow_torch.families import family
from asyncflow_torch.train import TorchEngine


@contextmanager
def started(ranks: int, folder: str, **given: Any) -> Iterator[Any]:
    if ranks == 2:
        RANKS.path = f"{engine_of.__module__}:{engine_of.__qualname__}"
    engine = (RANKS if ranks == 2 else engine_of)(model=folder, algorithm=GRPO(), **given)
    try:
        yield engine
    finally:
        engine.close()


def published(engine: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The published tensors, put together from their pieces."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name, given in engine.named_weights():
        piece = given.tensor if isinstance(given, Shard) else given
        array = from_torch(piece) if isinstance(piece, torch.Tensor) else piece
        start, whole = (given.start, given.whole) if isinstance(given, Shard) else ((0,) * array.ndim, array.shape)
        into = found.setdefault(name, np.zeros(whole, array.dtype))
        into[tuple(slice(a, a + n) for a, n in zip(start, array.shape, strict=True))] = array
    return found


def unlike(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of tensors that are not the same to the bit."""
    return [
        name
        for name in one.keys() | other.keys()
        if name not in one
        or name not in other
        or (one[name].dtype, one[name].shape) != (other[name].dtype, other[name].shape)
        or one[name].tobytes() != other[name].tobytes()
    ]


def stored(folder: str | Path) -> dict[str, np.ndarray[Any, Any]]:
    return {name: from_torch(tensor) for name, tensor in load_file(Path(folder, "model.safetensors")).items()}


def rows() -> Batch:
    """Two groups of four rows."""
    random = np.random.default_rng(3)
    responses = [random.integers(10, 300, 5 + n).astype(np.int32) for n in range(8)]
    logprobs = [np.full(len(each), -5.0, np.float32) for each in responses]
    prompts = [np.arange(20, 26, dtype=np.int32)] * 8
    columns = {"prompt_ids": prompts, "response_ids": responses, "logprobs": logprobs}
    return Batch.of({**columns, "reward": np.arange(8, dtype=np.float32) % 3}, groups=[0] * 4 + [1] * 4)


def made_folder(name: str, path: Path) -> str:
    """In bfloat16, with norms in float32."""
    made = family(name, path, dtype="bfloat16")
    file = Path(made, "model.safetensors")
    precise = {name: each * 1.0001 if "norm" in name else each for name, each in load_file(file).items()}
    precise |= {name: each.float() * 1.0001 for name, each in precise.items() if "norm" in name}
    save_file(precise, file, metadata={"format": "pt"})
    return made


@pytest.mark.parametrize(
    ("model", "ranks", "stage"),
    [
        # tied
        ("qwen3", 2, 1), ("qwen3", 1, 0),
        # experts, fused when they are loaded
        ("qwen3_moe", 2, 2), ("qwen3_moe", 2, 3),
        # prefixes, and parts that are not trained
        ("qwen3_5", 2, 3), ("gemma3", 1, 3),
    ],
)  # fmt: skip
def test_a_folder_is_published_exported_and_taken_back_as_it_is(
    model: str, ranks: int, stage: int, tmp_path: Path
) -> None:
    folder, batch = made_folder(model, tmp_path / "start"), rows()
    held = stored(folder)
    untrained = {name for name in held if name.startswith(("mtp.", "model.visual."))} if model == "qwen3_5" else set()
    first = {name: array for name, array in held.items() if name not in untrained}

    with started(ranks, folder, **options(stage)) as engine:
        assert not unlike(published(engine), first)
        engine.train_step(batch)
        later, logprobs = published(engine), engine.logprobs(batch)
        engine.export(tmp_path / "export")
        engine.load_weights(HeldUpdate(0, first))
        assert not unlike(published(engine), first)

    assert {name for name in first if (later[name] != first[name]).any()}
    assert not unlike(stored(tmp_path / "export"), held | later)
    plain = TorchEngine(str(tmp_path / "export"), frozen=True, device="cpu")
    # bfloat16 has 8 bits: kernels of different processors differ in the last one
    np.testing.assert_allclose(plain.logprobs(batch).values, logprobs.values, rtol=2**-8, atol=0.05)
    plain.close()
