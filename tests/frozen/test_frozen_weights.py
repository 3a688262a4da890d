"""Versions that are published have the bytes and digests that they had, and files of then are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import asyncflow_sdk as af

pytestmark = pytest.mark.fast
HERE = Path(__file__).parent
FROZEN = HERE / "version-00000000"
ROOTS = json.loads((HERE / "expected.json").read_text())["roots"]
"""Root digests, over names, dtypes, shapes, layout and the digests of all buckets: of versions 0 and 1, small and large, and as
bfloat16."""
OTHERS = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
NAMES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
    "complex64", "complex128", *OTHERS,
)  # fmt: skip


def weights(version: int, large: bool = False) -> dict[str, np.ndarray[Any, Any]]:
    """Return arrays of all dtypes, of other bytes in each version; large ones are of two buckets, and change little."""
    found: dict[str, np.ndarray[Any, Any]] = {"empty": np.empty((0, 3), np.float32), "scalar": np.array(1.5)}
    for number, name in enumerate(NAMES):
        dtype = np.dtype(getattr(ml_dtypes, name) if name in OTHERS else name)
        count = (3 + number) * 5 * dtype.itemsize
        raw = (np.arange(count) * 37 + 11 * number + version) % (2 if name == "bool" else 64)
        found[f"layer.{name}"] = raw.astype(np.uint8).view(dtype).reshape(3 + number, 5)
    if large:
        found["large"] = np.arange(1_200_000, dtype=np.float32)
        found["large"][:100] += version
    return found


def same(update: af.WeightUpdate, wanted: dict[str, np.ndarray[Any, Any]]) -> None:
    found = dict(update.arrays())
    assert list(found) == list(update.tensors) == list(wanted)
    for name, array in wanted.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype), name
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("transport", ["shm", "tcp", "file"])
def test_a_replica_gets_the_bytes_and_the_root_digest(transport: str, tmp_path: Path) -> None:
    options = {"path": tmp_path / "weights"} if transport == "file" else {}
    with (
        af.serve() as run,
        run.weight_publisher(transport, **options) as publisher,
        af.connect(run.address, name="replica") as replica,
    ):
        publisher.publish(0, weights(0, large=True).items()).wait()
        for update in replica.weight_updates():
            with update:
                same(update, weights(update.version, large=True))
            assert update.root == ROOTS[f"large {update.version}"]
            if update.version == 1:
                break
            publisher.publish(1, weights(1, large=True).items()).wait()


def test_a_published_dtype_has_its_digest() -> None:
    floats = {name: array for name, array in weights(0).items() if array.dtype in (np.float32, np.float16)}
    with af.serve() as run, run.weight_publisher("shm", dtype="bfloat16") as publisher:
        publisher.publish(0, floats.items()).wait()
        assert run.queue.status().versions[0].root == ROOTS["bfloat16"]


def test_a_version_of_files_has_the_bytes_it_had_and_those_are_read(tmp_path: Path) -> None:
    with af.serve() as run, run.weight_publisher("file", path=tmp_path / "weights") as publisher:
        publisher.publish(0, weights(0).items()).wait()
        written = tmp_path / "weights" / FROZEN.name
        files = sorted(path.name for path in FROZEN.iterdir())
        assert sorted(path.name for path in written.iterdir()) == files
        assert [name for name in files if (written / name).read_bytes() != (FROZEN / name).read_bytes()] == []
        for name in files:
            shutil.copy(FROZEN / name, written / name)
        with af.connect(run.address, name="replica") as replica:
            for update in replica.weight_updates():
                with update:
                    same(update, weights(0))
                assert update.root == ROOTS["small 0"]
                break
