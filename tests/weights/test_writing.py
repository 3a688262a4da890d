"""A version is written tensor by tensor: once, as it comes, where its layout says, in the dtype and under the name asked for."""

import mmap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor import distribute_tensor
from written import same, send, write

from asyncflow_sdk.errors import SchemaError, WeightMismatch
from asyncflow_sdk.memory import SharedDirectory
from asyncflow_sdk.types import Shard, from_torch
from asyncflow_sdk.weights import writing
from asyncflow_sdk.weights.shm import ShmReceiver, ShmSender


@pytest.fixture
def ends() -> Iterator[tuple[ShmSender, ShmReceiver]]:
    shared = SharedDirectory(Path("/dev/shm"))
    sender, receiver = ShmSender(shared.path, "1-0"), ShmReceiver(shared.path)
    yield sender, receiver
    receiver.close()
    sender.close()
    shared.close()


Ends = tuple[ShmSender, ShmReceiver]


def test_tensors_that_are_made_as_they_are_asked_for_live_one_at_a_time(ends: Ends) -> None:
    # given an engine that gathers each tensor when it is asked for
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number in range(50):
            tensor = torch.full((1000,), float(number))
            alive.add(tensor)
            most = max(most, len(alive))
            yield f"w{number}", tensor
            del tensor

    # when
    sent = send(ends[0], 1, gathered())
    # then
    assert most == 1
    assert len(alive) == 0
    same({f"w{n}": torch.full((1000,), float(n)) for n in range(50)}, sent.update(ends[1]))


def test_a_buffer_that_is_filled_anew_for_each_tensor_is_read_before_that(ends: Ends) -> None:
    buffer, array = torch.empty(300_000), np.empty(3000)  # of many buckets, and of a part of one

    def gathered() -> Iterator[tuple[str, Any]]:
        for number in range(20):
            buffer.fill_(number)
            array.fill(-number)
            yield f"t{number}", buffer
            yield f"n{number}", array

    update = send(ends[0], 1, gathered()).update(ends[1])
    for name, value in update:
        assert set(value.unique().tolist()) == {float(name[1:]) * (1 if name[0] == "t" else -1)}


def test_tied_weights_are_sent_once(ends: Ends) -> None:
    # given
    tied, other = torch.randn(40, 30), np.arange(77.0)
    weights: dict[str, Any] = {
        "embed": tied, "equal": tied.clone(), "head": tied, "numpy": other, "numpy.again": other[:],
        "view": tied[:20], "transposed": tied.t(), "transposed.again": tied.t(),
    }  # fmt: skip
    # when
    sent = send(ends[0], 1, weights.items())
    # then the same elements of the same memory are in one place, and nothing else is
    places = {t.name: (t.chunk, t.offset) for t in sent.manifest.tensors}
    assert places["embed"] == places["head"]
    assert places["numpy"] == places["numpy.again"]
    assert places["transposed"] == places["transposed.again"]
    assert len(set(places.values())) == 5
    same(weights, sent.update(ends[1]))
    # in another dtype too
    converted = send(ends[0], 2, [("a", tied), ("b", tied)], dtype="bfloat16").manifest
    assert converted.nbytes == -(-tied.numel() * 2 // 64) * 64


def test_tensors_that_lie_one_after_another_in_the_same_place_are_not_tied(ends: Ends) -> None:
    # given an engine that makes each tensor when it is asked for, where the one before lay, and all are equal
    same_place: dict[str, set[int]] = {"torch": set(), "numpy": set()}

    def gathered() -> Iterator[tuple[str, Any]]:
        for number in range(5):
            tensor = torch.zeros(4096)
            same_place["torch"].add(tensor.data_ptr())
            yield f"t{number}", tensor
            del tensor
        for number in range(5):
            array = np.zeros(100_000)
            same_place["numpy"].add(array.ctypes.data)
            yield f"n{number}", array[:]
            del array

    # when
    sent = send(ends[0], 1, gathered())
    # then
    assert min(map(len, same_place.values())) < 5, "nothing was tried"
    assert len({(t.chunk, t.offset) for t in sent.manifest.tensors}) == 10
    arrays = dict(sent.update(ends[1]).arrays())
    arrays["n0"] += 1
    assert not arrays["n1"].any()


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_distributed_tensor_is_refused_with_what_to_give_instead(ends: Ends, mesh: Any) -> None:
    whole = torch.arange(6.0).reshape(3, 2)
    tensor = distribute_tensor(whole, mesh, [Split(0)])
    for odd in (tensor, Shard(tensor, (0, 0), (3, 2))):
        with pytest.raises(
            SchemaError, match=r"version 1: tensor 'w': it is a DTensor: yield Shard.*to_local.*full_tensor\(\)"
        ):
            send(ends[0], 1, [("w", odd)])
        ends[0].abandon()
    pieces = {"local": Shard(tensor.to_local(), (0, 0), (3, 2)), "gathered": tensor.full_tensor()}
    for _, value in send(ends[0], 1, pieces.items()).update(ends[1]):
        assert torch.equal(value, whole)


def test_a_buffer_that_is_filled_with_equal_values_for_each_tensor_is_not_a_tie(ends: Ends) -> None:
    buffer = torch.empty(3000)
    sent = send(ends[0], 1, ((f"w{n}", buffer.zero_()) for n in range(3)))
    assert len({t.offset for t in sent.manifest.tensors}) == 3


def test_ties_are_found_behind_views_that_are_made_as_they_are_asked_for(ends: Ends) -> None:
    tied, array, mapped = torch.nn.Parameter(torch.ones(500)), np.ones(500), mmap.mmap(-1, 4000)
    with torch.inference_mode():
        inference = torch.ones(500)
    made: dict[str, Callable[[], Any]] = {
        "parameter": tied.detach, "inference": lambda: inference[:], "array": array.view, "numpy": lambda: tied.detach().numpy(),
        "mapped": lambda: np.frombuffer(mapped, np.float64), "asarray": lambda: np.asarray(memoryview(array)),
    }  # fmt: skip
    sent = send(ends[0], 1, ((f"{name}{n}", make()) for n in range(2) for name, make in made.items()))
    places = {t.name: (t.chunk, t.offset) for t in sent.manifest.tensors}
    for name in made:
        assert places[f"{name}0"] == places[f"{name}1"], name


def test_what_a_block_held_before_is_not_part_of_a_version(ends: Ends) -> None:
    weights = [(f"w{n}", np.full(n, 7, np.uint8)) for n in (1, 63, 64, 65, 700)]
    roots = set()
    for version in range(0, 12, 2):
        sent = send(ends[0], version, weights, sizes=[1088])
        roots.add(sent.manifest.root)
        ends[0].keep([])
        noise = np.random.default_rng(version).integers(0, 255, 1088, np.uint8)
        send(ends[0], version + 1, [("noise", noise)], sizes=[1088])
        ends[0].keep([])
    assert len(roots) == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9000), min_size=1, max_size=12), min_size=1, max_size=4))
def test_equal_weights_have_equal_roots_whatever_came_before(versions: list[list[int]]) -> None:
    shared = SharedDirectory(Path("/dev/shm"))
    sender, receiver = ShmSender(shared.path, "1-0"), ShmReceiver(shared.path)
    before = writing.BUCKET_BYTES, writing.CHUNK_BYTES
    writing.BUCKET_BYTES, writing.CHUNK_BYTES = 1 << 10, 1 << 12
    try:
        expected: list[int] = []
        for number, sizes in enumerate(versions):
            weights = {f"t{n}": np.full(size, n, np.uint8) for n, size in enumerate(sizes)}
            told: list[int] = []
            # a version after another model's, then one after its like, then one that is the first
            for expect in (expected, told, []):
                sent = send(sender, number, weights.items(), sizes=expect, bucket=256)
                same(weights, sent.update(receiver))
                told[:] = layout(sizes)
                if expect is not expected:
                    assert [chunk.nbytes for chunk in sent.manifest.chunks] == told
                    assert all(n <= 1 << 12 or n in [-(-s // 64) * 64 for s in sizes] for n in told)
            expected = told
            sender.keep([])
    finally:
        writing.BUCKET_BYTES, writing.CHUNK_BYTES = before
        receiver.close()
        sender.close()
        shared.close()


def layout(sizes: list[int]) -> list[int]:
    planned = writing.Layout()
    for size in sizes:
        if size:
            planned.add(-(-size // 64) * 64)
    return planned.sizes


@pytest.mark.parametrize("given_as", [lambda t: t, from_torch], ids=["torch", "numpy"])
@pytest.mark.parametrize("wanted", ["bfloat16", "float16", "float32"])
def test_floating_point_is_published_in_the_dtype_of_the_policy(
    ends: Ends, given_as: Callable[[Any], Any], wanted: str
) -> None:
    # given values that are halfway between two of the narrower dtype, too large for it, and none at all
    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint32).view(np.int32))
    wide = torch.cat([raw.view(torch.float32), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1e39, -0.0, float("inf")])])
    wide = wide[~wide.isnan()]
    weights = {
        "wide": wide, "double": wide.double() * 1.0000001, "strided": wide[::3], "half": torch.randn(50).half(),
        "count": torch.arange(5), "mask": torch.tensor([True]), "small": torch.ones(3).to(torch.float8_e4m3fn),
    }  # fmt: skip
    # when
    update = send(ends[0], 1, [(n, given_as(t)) for n, t in weights.items()], dtype=wanted).update(ends[1])
    # then it is rounded as torch rounds, and what is no such number stays
    same(
        {
            n: t.to(getattr(torch, wanted)) if n in ("wide", "double", "strided", "half") else t
            for n, t in weights.items()
        },
        update,
    )


def test_a_function_chooses_the_dtype_of_each(ends: Ends) -> None:
    asked = []

    def policy(name: str, dtype: str) -> str:
        asked.append((name, dtype))
        return "float32" if "norm" in name else "bfloat16" if dtype == "float32" else dtype

    weights = {"norm": torch.ones(3).half(), "w": torch.randn(3), "count": torch.arange(3)}
    update = send(ends[0], 1, weights.items(), dtype=policy).update(ends[1])
    assert asked == [("norm", "float16"), ("w", "float32"), ("count", "int64")]
    assert [t.dtype for t in update.tensors.values()] == ["float32", "bfloat16", "int64"]
    for wrong, reason in (
        (lambda n, d: "bfloat16", "tensor 'count': int64 is not converted to bfloat16"),
        (lambda n, d: "int64", "tensor 'norm': float16 is not converted to int64"),
        (lambda n, d: "nonsense", "tensor 'norm': dtype 'nonsense' is not supported"),
    ):
        with pytest.raises(SchemaError, match=reason):
            send(ends[0], 2, weights.items(), dtype=wrong)
        ends[0].abandon()


def test_names_are_those_of_the_checkpoint(ends: Ends) -> None:
    weights = [("module.a", torch.ones(2)), ("module.b", torch.zeros(2))]
    update = send(ends[0], 1, weights, rename=lambda name: name.removeprefix("module.")).update(ends[1])
    assert list(update.tensors) == ["a", "b"]
    for rename, error, reason in (
        (lambda name: "x", WeightMismatch, "version 2: 'module.a' and 'module.b' are both 'x'"),
        (lambda name: None, SchemaError, "version 2: None, for tensor 'module.a', is no name"),
    ):
        with pytest.raises(error, match=reason):
            send(ends[0], 2, weights, rename=rename)
        ends[0].abandon()


@pytest.mark.parametrize(
    ("weights", "error", "reason"),
    [
        ([("head", torch.ones(4)), ("embed", np.ones(2)), ("head", torch.ones(4))], WeightMismatch,
         "version 2: tensor 'head' is sent twice"),
        ([("w", np.array([object()]))], SchemaError, "version 2: tensor 'w': numpy dtype object"),
        ([("w", torch.eye(3).to_sparse())], SchemaError, "tensor 'w': .*sparse"),
        ([("w", torch.empty(3, device="meta"))], SchemaError, "tensor 'w': .*meta device"),
        ([(7, torch.ones(3))], SchemaError, "7, for tensor 7, is no name"),
        ([("w", Shard(torch.ones(3), (2,), (4,)))], SchemaError, r"tensor 'w': a piece of shape \(3,\) at \(2,\)"),
        ([("w", Shard(torch.ones(3), (0, 0), (4, 4)))], SchemaError, "tensor 'w': a piece of shape"),
        ([("w", Shard(torch.ones(2), (0,), (4,)))] * 2, WeightMismatch, "tensor 'w' is sent twice"),
    ],
)  # fmt: skip
def test_what_cannot_be_sent_is_refused_and_costs_nothing(
    ends: Ends, weights: Any, error: type[Exception], reason: str
) -> None:
    # given
    sent = send(ends[0], 1, [("w", torch.ones(4))])
    ends[0].keep([1])
    # when
    with pytest.raises(error, match=reason):
        write(ends[0], 2, weights)
    ends[0].abandon()
    # then
    same({"w": torch.ones(4)}, sent.update(ends[1]))
    same({"w": torch.zeros(4)}, send(ends[0], 2, [("w", torch.zeros(4))]).update(ends[1]))
    assert ends[0].nbytes <= 6 << 20


def test_numpy_rounds_as_torch_does() -> None:
    """Of everything that is a number; what is none stays none."""
    values = np.random.default_rng(1).integers(0, 1 << 32, 1 << 20, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        ours = values.astype(ml_dtypes.bfloat16)
    theirs = from_torch(torch.from_numpy(values).to(torch.bfloat16))
    nan = np.isnan(values)
    assert np.array_equal(ours[~nan].view(np.uint16), theirs[~nan].view(np.uint16))
    assert np.isnan(ours[nan].astype(np.float32)).all()
