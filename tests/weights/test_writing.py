"""A version is written tensor by tensor: bit for bit, ties once, in the dtype and under the name asked for."""

import itertools
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from replicas import LIMIT_S, Served
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor import distribute_tensor

from asyncflow_sdk.errors import SchemaError, WeightMismatch
from asyncflow_sdk.types import Manifest, Shard, from_torch
from asyncflow_sdk.weights.writer import WIDE

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


class Publishing:
    """A publisher and a replica of a run that the tests of this module share."""

    def __init__(self, run: Served) -> None:
        self._run = run
        self._updates = iter(run.replica("reader"))

    def send(self, weights: Any, **policy: Any) -> Manifest:
        """Publish the next version. The last manifest is what the replica checks."""
        with self._run.trainer(**policy) as trainer:
            manifest: Manifest = trainer.publish(trainer.current + 1, weights).wait(LIMIT_S)
        return manifest

    def arrays(self) -> dict[str, Any]:
        """Of the version that was published last, which is loaded."""
        with next(self._updates) as update:
            return {name: array.copy() for name, array in update.arrays()}

    def check(self, weights: dict[str, Any], **policy: Any) -> Manifest:
        """Names in order, dtypes, shapes and every bit, as numpy and as torch."""
        manifest = self.send(weights, **policy)
        with next(self._updates) as update:
            arrays, tensors = dict(update.arrays()), dict(update)
            assert list(arrays) == list(tensors) == list(weights) == list(update.tensors)
            for name, given in weights.items():
                wanted = plain(given)
                assert (arrays[name].dtype, arrays[name].shape) == (wanted.dtype, wanted.shape), name
                assert arrays[name].tobytes() == wanted.tobytes(), name
                assert tuple(tensors[name].shape) == wanted.shape == update.tensors[name].shape
                if isinstance(given, torch.Tensor):
                    assert str(tensors[name].dtype) == str(given.dtype) == f"torch.{update.tensors[name].dtype}"
                    raw = tensors[name].contiguous().reshape(-1).view(torch.uint8)
                    assert raw.numpy().tobytes() == wanted.tobytes(), name
        return manifest


def plain(tensor: Any) -> Any:
    """As numpy, in native byte order."""
    array = from_torch(tensor) if isinstance(tensor, torch.Tensor) else np.asarray(tensor)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


@pytest.fixture(scope="module")
def ends() -> Iterator[Publishing]:
    with Served() as run:
        yield Publishing(run)


def places(manifest: Manifest) -> dict[str, tuple[int, int]]:
    return {t.name: (t.chunk, t.offset) for t in manifest.tensors}


def test_every_dtype_and_shape_arrives_bit_for_bit(ends: Publishing) -> None:
    # given tensors of every dtype of torch, large ones, many small ones, some empty or 0-dimensional
    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (8, 48), np.uint8))
    names = {str(d).removeprefix("torch.") for d in vars(torch).values() if type(d) is torch.dtype}
    weights: dict[str, Any] = {
        f"all.{name}": (raw % 2 if name == "bool" else raw & 63 if name in WIDE else raw).view(getattr(torch, name))
        for name in sorted(names)
        if not name.startswith("q")
    }
    live = torch.nn.Linear(300, 200)
    weights |= {
        "large": torch.from_numpy(np.random.default_rng(0).random((3, 1 << 17))),
        "parameter": live.weight,
        "transposed": live.weight.t(),
        "strided": torch.arange(100.0)[::3],
        "conjugate": torch.complex(torch.randn(5), torch.randn(5)).conj(),
        "infinite": torch.tensor([float("inf"), -0.0, -float("inf")], dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "empty.bfloat16": torch.empty(3, 0, dtype=torch.bfloat16),
        "scale": torch.tensor(0.125, dtype=torch.float64),
        "numpy": np.arange(7, dtype=ml_dtypes.float8_e5m2),
        "numpy.big": np.arange(7, dtype=">f4"),
        "numpy.fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "numpy.reversed": np.arange(12.0)[::-1],
        "numpy.scalar": np.float32(3),
        **{f"small.{i}": torch.full((i % 5,), float(i)) for i in range(500)},
    }
    # when / then
    manifest = ends.check(weights)
    assert manifest.digested
    assert all(tensor.offset % 64 == 0 for tensor in manifest.tensors)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_version_with_nan_is_refused_by_the_name_of_its_tensor(ends: Publishing, dtype: str, threads: int) -> None:
    # given a large tensor and a strided one
    weights = {"good": torch.ones(3), "large": torch.ones(3 << 20).to(getattr(torch, dtype))}
    weights["strided"] = weights["large"].clone()[::2]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        current = ends.send(weights)
        for name in ("large", "strided"):
            for value, how in itertools.product((float("nan"), -float("nan")), (plain, lambda tensor: tensor)):
                # when one of its numbers is none
                weights[name][-1] = value
                with pytest.raises(SchemaError, match=f"tensor '{name}' has NaN among its numbers"):
                    ends.send({each: how(tensor) for each, tensor in weights.items()})
                weights[name][-1] = 1.0
    finally:
        torch.set_num_threads(before)
    # then the version before is loaded
    assert ends.arrays()["large"].tobytes() == plain(weights["large"]).tobytes()
    assert current.tensors[1].dtype == dtype


def test_digests_are_the_same_whoever_copied_the_bytes(ends: Publishing) -> None:
    numbers, weights = np.random.default_rng(3), dict[str, Any]()
    for n, size in enumerate((1, 63, 4096, (5 << 20) + 7, 64)):
        values = numbers.standard_normal((2, size)).astype(np.float32)
        weights |= {f"torch{n}": torch.from_numpy(values[0]), f"numpy{n}": values[1]}
        weights[f"strided{n}"] = torch.from_numpy(values).t()
    before, roots = torch.get_num_threads(), set()
    try:
        for count, lasting in itertools.product((1, 2), (False, True)):
            torch.set_num_threads(count)
            roots.add(ends.check(weights).root if lasting else ends.send(iter(weights.items())).root)
    finally:
        torch.set_num_threads(before)
    assert len(roots) == 1


def test_a_buffer_that_is_filled_anew_for_each_tensor_is_read_before_that(ends: Publishing) -> None:
    buffer, array = torch.empty(300_000), np.empty(3000)  # of many buckets, and of a part of one

    def gathered() -> Iterator[tuple[str, Any]]:
        for number in range(20):
            buffer.fill_(number)
            array.fill(-number)
            yield f"t{number}", buffer
            yield f"n{number}", array

    ends.send(gathered())
    for name, value in ends.arrays().items():
        assert np.unique(value).tolist() == [float(name[1:]) * (1 if name[0] == "t" else -1)]
    # and equal values are no tie
    manifest = ends.send((f"w{n}", buffer.zero_()) for n in range(3))
    assert len(set(places(manifest).values())) == 3


def test_tied_weights_are_sent_once(ends: Publishing) -> None:
    # given
    tied, other = torch.randn(40, 30), np.arange(77.0)
    weights: dict[str, Any] = {
        "embed": tied, "equal": tied.clone(), "head": tied, "numpy": other, "numpy.again": other[:],
        "view": tied[:20], "transposed": tied.t(), "transposed.again": tied.t(),
    }  # fmt: skip
    # when
    at = places(ends.check(weights))
    # then the same elements of the same memory are in one place, and nothing else is
    assert at["embed"] == at["head"]
    assert at["numpy"] == at["numpy.again"]
    assert at["transposed"] == at["transposed.again"]
    assert len(set(at.values())) == 5
    # in another dtype too
    converted = ends.send([("a", tied), ("b", tied)], dtype="bfloat16")
    assert converted.nbytes == -(-tied.numel() * 2 // 64) * 64


def test_ties_are_found_behind_views_that_are_made_as_they_are_asked_for(ends: Publishing) -> None:
    tied, array, mapped = torch.nn.Parameter(torch.ones(500)), np.ones(500), mmap.mmap(-1, 4000)
    with torch.inference_mode():
        inference = torch.ones(500)
    made: dict[str, Callable[[], Any]] = {
        "parameter": tied.detach, "inference": lambda: inference[:], "array": array.view, "numpy": lambda: tied.detach().numpy(),
        "mapped": lambda: np.frombuffer(mapped, np.float64), "asarray": lambda: np.asarray(memoryview(array)),
    }  # fmt: skip
    at = places(ends.send((f"{name}{n}", make()) for n in range(2) for name, make in made.items()))
    for name in made:
        assert at[f"{name}0"] == at[f"{name}1"], name


def test_tensors_that_lie_one_after_another_in_the_same_place_are_not_tied(ends: Publishing) -> None:
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
    manifest = ends.send(gathered())
    # then
    assert min(map(len, same_place.values())) < 5, "nothing was tried"
    assert len(set(places(manifest).values())) == 10


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_distributed_tensor_is_refused_with_what_to_give_instead(ends: Publishing, mesh: Any) -> None:
    whole = torch.arange(6.0).reshape(3, 2)
    tensor = distribute_tensor(whole, mesh, [Split(0)])
    for odd in (tensor, Shard(tensor, (0, 0), (3, 2))):
        with pytest.raises(
            SchemaError, match=r"version \d+: tensor 'w': it is a DTensor: yield Shard.*to_local.*full_tensor\(\)"
        ):
            ends.send([("w", odd)])
    ends.send({"local": Shard(tensor.to_local(), (0, 0), (3, 2)), "gathered": tensor.full_tensor()})
    for value in ends.arrays().values():
        assert value.tolist() == whole.tolist()


def test_what_a_block_held_before_is_not_part_of_a_version(ends: Publishing) -> None:
    weights = [(f"w{n}", np.full(n, 7, np.uint8)) for n in (1, 63, 64, 65, 700)]
    roots = set()
    for seed in range(4):
        roots.add(ends.send(weights).root)
        for _ in range(2):
            ends.send([("noise", np.random.default_rng(seed).integers(0, 255, 1088, np.uint8))])
    assert len(roots) == 1


@pytest.mark.parametrize(
    ("given_as", "wanted"),
    [(lambda t: t, "bfloat16"), (from_torch, "bfloat16"), (from_torch, "float16"), (from_torch, "float32")],
    ids=["torch", "numpy", "numpy", "numpy"],
)
def test_floating_point_is_published_in_the_dtype_of_the_policy(
    ends: Publishing, given_as: Callable[[Any], Any], wanted: str
) -> None:
    # given values that are halfway between two of the narrower dtype, too large for it, and none at all
    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 32, 50_000, np.uint32).view(np.int32))
    wide = torch.cat([raw.view(torch.float32), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1e39, -0.0, float("inf")])])
    wide = wide[~wide.isnan()]
    weights = {
        "wide": wide, "double": wide.double() * 1.0000001, "strided": wide[::3], "half": torch.randn(50).half(),
        "count": torch.arange(5), "mask": torch.tensor([True]), "small": torch.ones(3).to(torch.float8_e4m3fn),
    }  # fmt: skip
    # when
    ends.send([(n, given_as(t)) for n, t in weights.items()], dtype=wanted)
    # then it is rounded as torch rounds, and what is no such number stays
    for name, array in ends.arrays().items():
        to = getattr(torch, wanted) if name in ("wide", "double", "strided", "half") else weights[name].dtype
        assert array.tobytes() == plain(weights[name].to(to)).tobytes(), name


def test_a_function_chooses_the_dtype_of_each(ends: Publishing) -> None:
    asked = []

    def policy(name: str, dtype: str) -> str:
        asked.append((name, dtype))
        return "float32" if "norm" in name else "bfloat16" if dtype == "float32" else dtype

    weights = {"norm": torch.ones(3).half(), "w": torch.randn(3), "count": torch.arange(3)}
    manifest = ends.send(weights.items(), dtype=policy)
    assert asked == [("norm", "float16"), ("w", "float32"), ("count", "int64")]
    assert [t.dtype for t in manifest.tensors] == ["float32", "bfloat16", "int64"]
    for wrong, reason in (
        (lambda n, d: "bfloat16", "tensor 'count': int64 is not converted to bfloat16"),
        (lambda n, d: "int64", "tensor 'norm': float16 is not converted to int64"),
        (lambda n, d: "nonsense", "tensor 'norm': dtype 'nonsense' is not supported"),
    ):
        with pytest.raises(SchemaError, match=reason):
            ends.send(weights.items(), dtype=wrong)


def test_names_are_those_of_the_checkpoint(ends: Publishing) -> None:
    weights = [("module.a", torch.ones(2)), ("module.b", torch.zeros(2))]
    manifest = ends.send(weights, rename=lambda name: name.removeprefix("module."))
    assert [t.name for t in manifest.tensors] == ["a", "b"]
    for rename, error, reason in (
        (lambda name: "x", WeightMismatch, r"version \d+: 'module.a' and 'module.b' are both 'x'"),
        (lambda name: None, SchemaError, r"version \d+: None, for tensor 'module.a', is no name"),
    ):
        with pytest.raises(error, match=reason):
            ends.send(weights, rename=rename)


@pytest.mark.parametrize(
    ("weights", "error", "reason"),
    [
        ([("head", torch.ones(4)), ("embed", np.ones(2)), ("head", torch.ones(4))], WeightMismatch,
         r"version \d+: tensor 'head' is sent twice"),
        ([("w", torch.eye(3).to_sparse())], SchemaError, "tensor 'w': .*sparse"),
        ([("w", torch.empty(3, device="meta"))], SchemaError, "tensor 'w': .*meta device"),
        ([(7, torch.ones(3))], SchemaError, "7, for tensor 7, is no name"),
        ([("w", Shard(torch.ones(3), (2,), (4,)))], SchemaError, r"tensor 'w': a piece of shape \(3,\) at \(2,\)"),
        ([("w", Shard(torch.ones(3), (0, 0), (4, 4)))], SchemaError, "tensor 'w': a piece of shape"),
        ([("w", Shard(torch.ones(2), (0,), (4,)))] * 2, WeightMismatch, "tensor 'w' is sent twice"),
    ],
)  # fmt: skip
def test_what_cannot_be_sent_is_refused_and_the_next_version_comes(
    ends: Publishing, weights: Any, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        ends.send(weights)
    ends.check({"w": torch.zeros(4)})
