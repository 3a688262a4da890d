"""Version directories: any tool reads them, and they hold what was published."""

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load_file
from transport_ends import names, publishing

from asyncflow_sdk.errors import WeightMismatch
from asyncflow_sdk.interfaces import Host, WeightSender
from asyncflow_sdk.testing.transport_harness import TransportHarness, layout
from asyncflow_sdk.types import Chunk, Manifest, Shard, TensorInfo
from asyncflow_sdk.weights import Update, make_transport

pytestmark = pytest.mark.fast


def tensors_in(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """As the format of safetensors says: dtype, shape and bytes by name."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    found = {}
    for name, info in header.items():
        low, high = info["data_offsets"]
        found[name] = info["dtype"], info["shape"], data[start + low : start + high]
    return found


@settings(max_examples=20)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=25),
    chunk=st.sampled_from([64, 512, 1 << 16]),
)
def test_any_tensors_are_valid_files(
    shapes: list[list[int]], chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kinds = [
        ("F32", np.float32),
        ("BF16", ml_dtypes.bfloat16),
        ("I8", np.int8),
        ("BOOL", np.bool_),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
    ]
    dtypes = [kinds[n % 5] for n in range(len(shapes))]
    weights = {f'ä.{n} " {{': np.full(shape, n % 2, dtypes[n][1]) for n, shape in enumerate(shapes)}
    path = tmp_path_factory.mktemp("any")
    with publishing(path) as ends:
        sent = ends.publish(1, weights, chunk=chunk)
        sent.check(ends.fetch(ends.receiver(), sent))
    found: dict[str, Any] = {}
    for each in sorted((path / "version-00000001").glob("*.safetensors")):
        found |= tensors_in(each)
    assert found == {
        name: (dtypes[n][0], list(array.shape), array.astype(dtypes[n][1]).tobytes())
        for n, (name, array) in enumerate(weights.items())
    }


def ranks_of(path: Path, tmp_path: Path, count: int) -> list[WeightSender]:
    hosts = [Host(directory=tmp_path, name=f"{rank}-0", rank=rank, world_size=count) for rank in range(count)]
    senders = [make_transport("file", path=path).sender(host) for host in hosts]
    for sender in senders:
        sender.adopt([])
    return senders


def send(sender: WeightSender, version: int, given: dict[str, Any]) -> tuple[Manifest, bytes]:
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
    return {name: load_file(place / file)[name] for name, file in where.items()}


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
    receiver = make_transport("file").receiver(Host(directory=tmp_path, name="r-0"))
    update = Update(3, [receiver.fetch(manifest, where, timeout_s=30.0) for manifest, where in sent])
    assert all(np.array_equal(array, WHOLE[name]) for name, array in update.arrays())
    for sender in senders:
        sender.close()


def test_parts_without_bytes_are_published_too(path: Path, tmp_path: Path) -> None:
    receiver = make_transport("file").receiver(Host(directory=tmp_path, name="r-0"))
    none, empty = Manifest(3, (), ()), Manifest(4, (TensorInfo("w", "float32", (0, 4), 0, 0),), ())
    senders = ranks_of(path, tmp_path, 2)
    # given a rank without tensors, and then a version of empty tensors
    for sent in (
        [send(senders[0], 3, {"w": WHOLE["alone"]}), (none, senders[1].send(none))],
        [(empty, sender.send(empty)) for sender in senders],
    ):
        # then each part is fetched, and the folder is a model
        assert [receiver.fetch(*each, timeout_s=30.0).manifest for each in sent] == [manifest for manifest, _ in sent]
    assert whole_of(path / "version-00000003")["w"].tolist() == WHOLE["alone"].tolist()
    assert whole_of(path / "version-00000004") == {}
    for sender in senders:
        sender.close()


def test_a_version_is_no_model_while_a_rank_writes(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ranks_of(path, tmp_path, 2)
    place, plain = path / "version-00000003", os.pwritev

    def write(fd: int, views: Any, at: int) -> int:
        if at and os.readlink(f"/proc/self/fd/{fd}").endswith("model-rank-0-00002-of-00002.safetensors"):
            monkeypatch.undo()
            # when the other rank is done, and this one has written the header of its second file
            send(second, 3, {"other": WHOLE["alone"]})
            # then there is no index, and the file is not taken for whole
            assert not (place / "model.safetensors.index.json").exists()
            with pytest.raises(SafetensorError):
                load_file(place / "model-rank-0-00002-of-00002.safetensors")
        return plain(fd, views, at)

    monkeypatch.setattr(os, "pwritev", write)
    send(first, 3, {"a": np.ones(512, np.uint8), "b": np.ones(512, np.uint8)})
    assert os.pwritev is plain
    assert whole_of(place).keys() == {"a", "b", "other"}
    for sender in (first, second):
        sender.close()


def test_a_rank_that_gives_its_part_up_takes_nothing_from_the_others(path: Path, tmp_path: Path) -> None:
    senders = ranks_of(path, tmp_path, 2)
    first, _ = (send(sender, 3, part_of(rank)) for rank, sender in enumerate(senders))
    place = path / "version-00000003"

    senders[1].abandon()

    assert not (place / "model.safetensors.index.json").exists()  # the version is not whole
    receiver = make_transport("file").receiver(Host(directory=tmp_path, name="r-0"))
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


def test_tensors_that_do_not_fit_into_files_are_refused_by_name(files: TransportHarness) -> None:
    good = TensorInfo("a", "float32", (4,), 0, 0)
    for other, reason in (
        (TensorInfo("b", "float32", (4,), 1, 0), "tensor 'b': it does not lie in chunk 1"),
        (TensorInfo("b", "float32", (40,), 0, 64), "tensor 'b': it does not lie in chunk 0"),
        (TensorInfo("b", "float32", (-4,), 0, 0), "tensor 'b': it does not lie"),
        (TensorInfo("b", "float32", (4,), 0, -16), "tensor 'b': it does not lie"),
        (TensorInfo("b", "float32", (4,), 0, 8), "tensors 'b' and 'a' overlap"),
        (TensorInfo("a", "float32", (4,), 0, 64), "tensor 'a' is there twice"),
        (
            TensorInfo("__metadata__", "float32", (4,), 0, 64),
            "tensor '__metadata__' cannot go into a file: .*rename=",
        ),
    ):
        files.sender.room(128)
        with pytest.raises(WeightMismatch, match=reason):
            files.send(Manifest(1, (good, other), (Chunk(128),)))
        files.sender.abandon()
