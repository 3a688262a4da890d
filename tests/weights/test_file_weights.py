"""Version directories: any tool reads them, and they hold what was published."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from file_ends import names
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file

from asyncflow_sdk.errors import WeightMismatch
from asyncflow_sdk.interfaces import Host
from asyncflow_sdk.testing.ends import Ends, Sent
from asyncflow_sdk.types import Chunk, Manifest, TensorInfo
from asyncflow_sdk.weights.file import FileTransport
from asyncflow_sdk.weights.safetensor_files import chunk_files
from asyncflow_sdk.weights.writing import Writer


def test_a_model_is_loaded_from_a_version_directory_by_its_library(path: Path) -> None:
    # given a model with tied weights
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=97, hidden_size=36, intermediate_size=50, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=18, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    transport = FileTransport(path)
    with Ends(lambda: transport, FileTransport) as ends:
        # when it is published
        writer = Writer(12, ends.sender.room, None)
        sizes = writer.write(model.state_dict(keep_vars=True).items())
        ends.send(Manifest(12, writer.tensors, tuple(Chunk(size) for size in sizes)))
    # then
    place = path / "version-00000012"
    config.save_pretrained(place)
    loaded = AutoModelForCausalLM.from_pretrained(place)
    assert loaded.dtype == torch.bfloat16
    for name, wanted in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], wanted), name
    index = json.loads((place / "model.safetensors.index.json").read_text())
    assert index["metadata"]["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert set(index["weight_map"]) == set(model.state_dict()) - {"lm_head.weight"}
    assert index["metadata"]["version"] == 12


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=25),
    chunk=st.sampled_from([64, 512, 1 << 16]),
)
def test_any_tensors_are_valid_files(
    shapes: list[list[int]], chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    dtypes = [np.float32, ml_dtypes.bfloat16, np.int8, np.complex128, np.bool_, ml_dtypes.float8_e4m3fn]
    weights = {f'ä.{n} " {{': np.ones(shape, dtypes[n % 6]) * (n % 2) for n, shape in enumerate(shapes)}
    path = tmp_path_factory.mktemp("any")
    with Ends(lambda: FileTransport(path), FileTransport) as ends:
        sent = ends.publish(1, weights, chunk=chunk)
        sent.check(ends.fetch(ends.receiver(), sent))
    found: dict[str, Any] = {}
    for each in sorted((path / "version-00000001").glob("*.safetensors")):
        found |= load_file(each)
    assert found.keys() == weights.keys()
    for name, array in weights.items():
        assert found[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes(), name


def test_pieces_of_a_tensor_are_told_apart_by_where_they_begin(path: Path) -> None:
    with Ends(lambda: FileTransport(path), FileTransport) as ends:
        manifest, memories = ends.write(1, {"a": np.ones((2, 16), np.float32), "b": np.zeros((2, 16), np.float32)})
        pieces = tuple(
            TensorInfo("w", "float32", (2, 16), 0, each.offset, (2 * n, 0), (8, 16))
            for n, each in enumerate(manifest.tensors)
        )
        manifest = msgspec.structs.replace(manifest, tensors=pieces)
        sent = Sent(manifest, [memories[0].copy()], ends.send(manifest))
        sent.check(ends.fetch(ends.receiver(), sent))
    found = load_numpy(path / "version-00000001" / "model-00001-of-00001.safetensors")
    assert {name: float(array.sum()) for name, array in found.items()} == {"w@0,0": 32.0, "w@2,0": 0.0}


def test_ranks_have_directories_of_their_own(path: Path, tmp_path: Path) -> None:
    senders = [
        FileTransport(path).sender(Host(directory=tmp_path, name=f"{rank}-0", rank=rank, world_size=2))
        for rank in (0, 1)
    ]
    manifest = Manifest(3, (), ())
    for sender in senders:
        sender.adopt([])
        sender.send(manifest)
    assert names(path) == ["version-00000003-rank-0-of-2", "version-00000003-rank-1-of-2"]
    senders[1].keep([])
    assert names(path) == ["version-00000003-rank-0-of-2"]
    for sender in senders:
        sender.close()


def test_tensors_that_do_not_fit_into_files_are_refused_by_name() -> None:
    good = TensorInfo("a", "float32", (4,), 0, 0)
    for other, reason in (
        (TensorInfo("b", "float32", (4,), 1, 0), "tensor 'b' does not lie in chunk 1"),
        (TensorInfo("b", "float32", (40,), 0, 64), "tensor 'b' does not lie in chunk 0"),
        (TensorInfo("b", "float32", (-4,), 0, 0), "tensor 'b' does not lie"),
        (TensorInfo("b", "float32", (4,), 0, -16), "tensor 'b' does not lie"),
        (TensorInfo("b", "float32", (4,), 0, 8), "tensors 'b' and 'a' overlap"),
        (TensorInfo("a", "float32", (4,), 0, 64), "tensor 'a' is there twice"),
        (
            TensorInfo("__metadata__", "float32", (4,), 0, 64),
            "tensor '__metadata__' cannot go into a file: .*rename=",
        ),
    ):
        with pytest.raises(WeightMismatch, match=reason):
            chunk_files(Manifest(1, (good, other), (Chunk(128),)))
