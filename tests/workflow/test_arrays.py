"""Arrays in a file: what was written is read, by us and by others, and nothing is read from what is torn."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from asyncflow_sdk.workflow.arrays import reading, write_arrays

ARRAYS = {
    "flags": np.array([True, False, True]),
    "ids": np.arange(5),
    "empty": np.empty((0, 3), np.float32),
    "half": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
    "across": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    "one": np.array(7, np.int16),
}


def test_what_was_written_is_read_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    write_arrays(path, ARRAYS)
    with reading(path) as stored:
        assert set(stored) == set(ARRAYS)
        for name in ("across", "flags", "empty", "one", "ids"):
            assert stored[name].dtype == ARRAYS[name].dtype
            np.testing.assert_array_equal(stored[name], ARRAYS[name])
        np.testing.assert_array_equal(stored["half"].view(ml_dtypes.bfloat16)[..., 0], ARRAYS["half"])
        assert stored.get("none") is None
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_the_library_of_safetensors_reads_it(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy", reason="safetensors comes with transformers")
    write_arrays(tmp_path / "some.safetensors", ARRAYS)
    found = library.load_file(tmp_path / "some.safetensors")
    np.testing.assert_array_equal(found["across"], ARRAYS["across"])
    np.testing.assert_array_equal(found["flags"], ARRAYS["flags"])


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_a_torn_file_is_not_read(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "some.safetensors"
    write_arrays(path, ARRAYS)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises((ValueError, KeyError)), reading(path) as stored:
        stored["ids"]
