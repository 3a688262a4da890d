"""Weights through shared memory: bit-exact, proven by digests, and no receiver holds up the sender."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from children import Child
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_children import hold

from asyncflow_sdk.errors import DigestMismatch, MemoryFull, SchemaError, VersionGone, WeightMismatch
from asyncflow_sdk.memory import Mapper, SharedDirectory
from asyncflow_sdk.types import Manifest, from_torch
from asyncflow_sdk.weights import ShmReceiver, ShmSender

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
BUCKET = 1 << 16


@pytest.fixture
def directory() -> Iterator[Path]:
    shared = SharedDirectory(Path("/dev/shm"))
    yield shared.path
    shared.close()


def same(weights: dict[str, Any], update: Any) -> None:
    """Names in order, dtypes, shapes and every bit."""
    plain = {n: from_torch(w) if isinstance(w, torch.Tensor) else np.asarray(w) for n, w in weights.items()}
    arrays, tensors = dict(update.arrays()), dict(update)
    assert list(arrays) == list(tensors) == list(weights)
    for name, wanted in plain.items():
        native = wanted.astype(wanted.dtype.newbyteorder("="))
        assert (arrays[name].dtype, arrays[name].shape) == (native.dtype, wanted.shape), name
        assert arrays[name].tobytes() == native.tobytes(), name
        assert tuple(tensors[name].shape) == wanted.shape
        if isinstance(weights[name], torch.Tensor):
            assert tensors[name].dtype == weights[name].dtype
            raw = tensors[name].contiguous().reshape(-1).view(torch.uint8)
            assert raw.numpy().tobytes() == native.tobytes(), name


def test_every_dtype_and_shape_arrives_bit_for_bit(directory: Path) -> None:
    # given tensors of every dtype of torch, some larger than a bucket, many smaller, some empty or 0-dimensional
    numbers = np.random.default_rng(0)
    raw = torch.from_numpy(numbers.integers(0, 256, (8, 48), np.uint8))
    names = {str(d).removeprefix("torch.") for d in vars(torch).values() if type(d) is torch.dtype}
    weights: dict[str, Any] = {
        f"all.{name}": (raw % 2 if name == "bool" else raw).view(getattr(torch, name))
        for name in sorted(names)
        if not name.startswith("q")
    }
    live = torch.nn.Linear(300, 200)
    weights |= {
        "large": torch.from_numpy(numbers.random((3, BUCKET // 8 + 7))),
        "transposed": live.weight.t(),
        "strided": torch.arange(100.0)[::3],
        "bfloat16": torch.randn(129, 65).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
        "empty.bfloat16": torch.empty(3, 0, dtype=torch.bfloat16),
        "scale": torch.tensor(0.125, dtype=torch.float64),
        "numpy": np.arange(7, dtype=ml_dtypes.float8_e5m2),
        "numpy.big": np.arange(7, dtype=">f4"),
        "numpy.fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "numpy.scalar": np.float32(3),
        **{f"small.{i}": torch.full((i % 5,), float(i)) for i in range(500)},
    }
    sender = ShmSender(directory, "w1-", bucket_bytes=BUCKET)
    # when
    manifest, where = sender.send(1, weights.items())
    # then
    same(weights, ShmReceiver(directory).fetch(manifest, where))
    assert len(manifest.digests) == -(-manifest.nbytes // BUCKET) > 3
    assert all(tensor.offset % 64 == 0 for tensor in manifest.tensors)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=20), bucket=st.sampled_from([64, 128, 192, 1000, 4096])
)
def test_buckets_of_any_size_cover_every_byte(sizes: list[int], bucket: int) -> None:
    # given
    shared = SharedDirectory(Path("/dev/shm"))
    sender, receiver = ShmSender(shared.path, "w", bucket_bytes=bucket), ShmReceiver(shared.path)
    weights = {f"t{i}": np.random.default_rng(i).integers(0, 256, size, np.uint8) for i, size in enumerate(sizes)}
    try:
        # when
        manifest, where = sender.send(1, weights.items())
        # then
        same(weights, receiver.fetch(manifest, where))
        assert manifest.root == sender.send(2, weights.items())[0].root
        # and whatever single byte of a tensor is flipped, it is found, with bucket and tensor named
        for name in [t.name for t in manifest.tensors if t.nbytes][:4]:
            flip(shared.path, manifest, where, name, at=-1)
            with pytest.raises(DigestMismatch, match=rf"version 1: bucket \d+ .*holds .*{name}"):
                receiver.fetch(manifest, where)
            flip(shared.path, manifest, where, name, at=-1)
        receiver.fetch(manifest, where)
    finally:
        receiver.close()
        sender.close()
        shared.close()


def flip(directory: Path, manifest: Manifest, where: bytes, name: str, at: int) -> None:
    """Change a byte of a tensor where it lies in shared memory."""
    segment, start, _ = msgspec.msgpack.decode(where)
    tensor = next(t for t in manifest.tensors if t.name == name)
    place = start + 64 + tensor.offset + at % tensor.nbytes
    with (directory / segment).open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))


def test_what_cannot_be_sent_is_refused_and_costs_nothing(directory: Path) -> None:
    # given
    sender, receiver = ShmSender(directory, "w1-"), ShmReceiver(directory)
    tied = torch.ones(4)
    first = sender.send(1, [("w", tied)])
    held = sender.nbytes
    # when
    for weights, error, reason in (
        ([("head", tied), ("embed", tied), ("head", tied)], WeightMismatch, "version 2: tensor 'head' is sent twice"),
        ([], WeightMismatch, "version 2 has no tensors"),
        ([("w", np.array([object()]))], SchemaError, "numpy dtype object"),
        ([("w", torch.eye(3).to_sparse())], SchemaError, "sparse"),
    ):
        with pytest.raises(error, match=reason):
            sender.send(2, weights)
    # then
    assert sender.nbytes == held
    same({"w": tied}, receiver.fetch(*first))


def test_tied_weights_under_two_names_are_two_tensors(directory: Path) -> None:
    tied = torch.ones(4)
    weights = {"head": tied, "embed": tied}
    same(weights, ShmReceiver(directory).fetch(*ShmSender(directory, "w1-").send(1, weights.items())))


def test_an_engine_may_work_in_place(directory: Path) -> None:
    # given two replicas of one version
    place = ShmSender(directory, "w1-").send(1, [("w", torch.arange(1000.0))])
    one, two = (ShmReceiver(directory).fetch(*place) for _ in range(2))
    # when
    dict(one)["w"].mul_(3)
    # then
    assert float(dict(one)["w"][10]) == 30
    assert float(dict(two)["w"][10]) == 10
    assert float(dict(ShmReceiver(directory).fetch(*place))["w"][10]) == 10
    one.release()
    one.release()
    with pytest.raises(VersionGone, match="version 1 was released"):
        list(one)


def test_a_reader_that_holds_an_old_version_for_ever_holds_up_nobody(directory: Path) -> None:
    # given a replica in another process, frozen with version 0 in hand
    model = 1 << 20
    sender, receiver = ShmSender(directory, "w1-"), ShmReceiver(directory)
    manifest, where = sender.send(0, [("w", np.zeros(model, np.float32))])
    encoded = msgspec.json.encode(manifest).decode()
    with Child(hold, str(directory), encoded, where.hex()) as reader:
        assert reader.hear() == 0.0
        reader.stop()
        # when twenty more are published
        for version in range(1, 21):
            place = sender.send(version, [("w", np.full(model, version, np.float32))])
            same({"w": np.full(model, version, np.float32)}, receiver.fetch(*place))
        # then memory is that of three versions and of the one that is held
        assert sender.nbytes <= 4 * (4 * model + (1 << 17))
        assert sum(path.stat().st_size for path in directory.glob("w1-*")) == sender.nbytes
        # and the reader sees what it saw
        reader.resume()
        reader.say("look")
        assert reader.hear() == [0.0, 0.0]


def test_memory_is_that_of_three_versions(directory: Path) -> None:
    sender = ShmSender(directory, "w1-")
    for version in range(20):
        sender.send(version, [("w", np.zeros(1 << 20, np.float32))])
    assert sender.nbytes <= 3 * ((4 << 20) + (1 << 17))


def test_models_that_change_their_size_leave_nothing_behind(directory: Path) -> None:
    sender = ShmSender(directory, "w1-")
    for version in range(20):
        sender.send(version, [("w", np.zeros((1 << 20) + version * 10_000, np.float32))])
    assert sender.nbytes <= 4 * (5 << 20)


def test_a_late_reader_learns_that_its_version_is_gone(directory: Path) -> None:
    # given
    sender, receiver = ShmSender(directory, "w1-"), ShmReceiver(directory)
    places = [sender.send(version, [("w", np.full(1 << 19, version, np.float32))]) for version in range(6)]
    # when / then: the newest two are there, older ones are gone and nothing else is taken for them
    for version, place in enumerate(places):
        if version >= 4:
            same({"w": np.full(1 << 19, version, np.float32)}, receiver.fetch(*place))
        else:
            with pytest.raises(VersionGone, match=f"version {version} is no longer kept"):
                receiver.fetch(*place)


def test_a_version_that_was_withdrawn_pushes_out_none(directory: Path) -> None:
    sender, receiver = ShmSender(directory, "w1-"), ShmReceiver(directory)
    place = sender.send(1, [("w", np.full(1 << 19, 1, np.float32))])
    for _ in range(5):
        sender.send(1, [("w", np.full(1 << 19, 9, np.float32))])
        sender.withdraw(1)
    sender.withdraw(7)  # not the newest: nothing happens
    same({"w": np.full(1 << 19, 1, np.float32)}, receiver.fetch(*place))


def test_a_send_that_fails_half_way_keeps_what_there_was(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given
    sender, receiver = ShmSender(directory, "w1-"), ShmReceiver(directory)
    place = sender.send(1, [("w", np.ones(1 << 19, np.float32))])
    # when there is no room, again and again
    monkeypatch.setattr("asyncflow_sdk.memory.segment.os.posix_fallocate", no_room)
    for version in range(2, 6):
        with pytest.raises(MemoryFull):
            sender.send(version, [("w", np.ones(1 << 21, np.float32))])
    # then
    same({"w": np.ones(1 << 19, np.float32)}, receiver.fetch(*place))
    assert isinstance(Mapper(directory).view(*msgspec.msgpack.decode(place[1]), 8), np.ndarray)


def no_room(*arguments: object) -> None:
    raise OSError(28, "No space left on device")
