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
from asyncflow_sdk.testing.ends import Ends, layout
from asyncflow_sdk.types import Chunk, Manifest, Shard, TensorInfo
from asyncflow_sdk.weights import Update
from asyncflow_sdk.weights.file import FileSender, FileTransport
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


def ranks_of(path: Path, tmp_path: Path, count: int) -> list[FileSender]:
    hosts = [Host(directory=tmp_path, name=f"{rank}-0", rank=rank, world_size=count) for rank in range(count)]
    senders = [FileTransport(path).sender(host) for host in hosts]
    for sender in senders:
        sender.adopt([])
    return senders


def send(sender: FileSender, version: int, given: dict[str, Any]) -> tuple[Manifest, bytes]:
    """Publish arrays, and pieces of them."""
    plain = {name: array.tensor if isinstance(array, Shard) else array for name, array in given.items()}
    infos, sizes = layout(plain, 512)
    memories = [sender.room(size).memory for size in sizes]
    for each in memories:
        each[:] = 0
    for info in infos:
        raw = np.ascontiguousarray(plain[info.name]).reshape(-1).view(np.uint8)
        memories[info.chunk][info.offset : info.offset + info.nbytes] = raw
    shards = {name: each for name, each in given.items() if isinstance(each, Shard)}
    tensors = tuple(
        msgspec.structs.replace(info, start=shards[info.name].start, whole=shards[info.name].whole)
        if info.name in shards
        else info
        for info in infos
    )
    manifest = Manifest(version, tensors, tuple(Chunk(size) for size in sizes))
    return manifest, sender.send(manifest)


def whole_of(place: Path) -> dict[str, Any]:
    """As Hugging Face tools find them: by the index."""
    where = json.loads((place / "model.safetensors.index.json").read_text())["weight_map"]
    return {name: load_numpy(place / file)[name] for name, file in where.items()}


WHOLE = {
    "rows": np.arange(60, dtype=np.float32).reshape(10, 6),
    "columns": np.arange(100, 160, dtype=np.float32).reshape(6, 10),
    "boxes": np.arange(120, dtype=np.int16).reshape(4, 5, 6),
    "alone": np.arange(7.0),
}


def part_of(rank: int) -> dict[str, Any]:
    """Of two ranks: rows, columns, and boxes of a tensor each; rank 1 has one that is not cut."""
    low, high = (0, 6) if not rank else (6, 10)
    cut = {
        "rows": Shard(WHOLE["rows"][low:high], (low, 0), (10, 6)),
        "columns": Shard(np.ascontiguousarray(WHOLE["columns"][:, low:high]), (0, low), (6, 10)),
        "boxes": Shard(np.ascontiguousarray(WHOLE["boxes"][:, 2 * rank : 2 + 3 * rank]), (0, 2 * rank, 0), (4, 5, 6)),
    }
    return cut | ({"alone": WHOLE["alone"]} if rank else {})


def test_tensors_that_ranks_have_pieces_of_lie_whole_under_their_names_in_one_folder(
    path: Path, tmp_path: Path
) -> None:
    senders = ranks_of(path, tmp_path, 2)
    sent = [send(sender, 3, part_of(rank)) for rank, sender in enumerate(senders)]

    assert names(path) == ["version-00000003"]
    found = whole_of(path / "version-00000003")
    assert found.keys() == WHOLE.keys()
    assert all(np.array_equal(found[name], WHOLE[name]) for name in WHOLE)
    receiver = FileTransport().receiver(Host(directory=tmp_path, name="r-0"))
    update = Update(3, [receiver.fetch(manifest, where, timeout_s=30.0) for manifest, where in sent])
    assert all(np.array_equal(array, WHOLE[name]) for name, array in update.arrays())
    for sender in senders:
        sender.close()


def test_a_rank_that_gives_its_part_up_takes_nothing_from_the_others(path: Path, tmp_path: Path) -> None:
    senders = ranks_of(path, tmp_path, 2)
    first, _ = (send(sender, 3, part_of(rank)) for rank, sender in enumerate(senders))
    place = path / "version-00000003"

    senders[1].abandon()

    assert not (place / "model.safetensors.index.json").exists()  # the version is not whole
    receiver = FileTransport().receiver(Host(directory=tmp_path, name="r-0"))
    receiver.fetch(*first, timeout_s=30.0).release()
    send(senders[1], 3, part_of(1))  # its number is announced again
    assert np.array_equal(whole_of(place)["columns"], WHOLE["columns"])
    # a number below those that are kept is written by nobody any more: whoever hears that first removes all of it
    for rank, sender in enumerate(senders):
        send(sender, 4, part_of(rank))
    senders[0].keep([4])
    assert names(path) == ["version-00000004"]
    senders[1].keep([4])
    assert whole_of(path / "version-00000004").keys() == WHOLE.keys()
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
