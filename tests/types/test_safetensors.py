"""The safetensors codec: files that the library of that name reads, and errors for files that are none."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from asyncflow_sdk.types import carrier
from asyncflow_sdk.types.dtypes import SAFETENSORS_CODES
from asyncflow_sdk.types.safetensors import plan, read_header

pytestmark = pytest.mark.fast
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
tensors = st.dictionaries(
    st.text(min_size=1, max_size=8), st.tuples(st.sampled_from(sorted(SAFETENSORS_CODES)), shapes), max_size=6
)


def written(path: Path, wanted: dict[str, tuple[str, tuple[int, ...]]]) -> Path:
    layout = plan(wanted)
    path.write_bytes(layout.header + bytes(layout.nbytes - len(layout.header)))
    return path


@given(wanted=tensors)
def test_a_header_says_where_each_tensor_lies(
    tmp_path_factory: pytest.TempPathFactory, wanted: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    path = written(tmp_path_factory.mktemp("files") / "model.safetensors", wanted)
    with path.open("rb") as file:
        header = read_header(file)
    assert {name: (each.dtype, each.shape) for name, each in header.tensors.items()} == wanted
    assert header.end == path.stat().st_size
    ends = sorted((each.start, each.stop) for each in header.tensors.values())
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(ends)), "there are no holes"
    assert all(each.start % carrier(each.dtype).itemsize == 0 for each in header.tensors.values())


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    layout = plan({"a": ("int8", (3,)), "b": ("float32", (2, 2))}, align=64)
    b = np.arange(4, dtype=np.float32).reshape(2, 2)
    (tmp_path / "m.safetensors").write_bytes(layout.header + b.tobytes() + bytes([1, 2, 3]))
    assert len(layout.header) % 64 == 0
    with safe_open(tmp_path / "m.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("b").tolist() == b.tolist()
        assert file.get_tensor("a").tolist() == [1, 2, 3]


def test_a_dtype_without_a_code_is_stored_as_bytes(tmp_path: Path) -> None:
    path = written(tmp_path / "m.safetensors", {"z": ("complex128", (2,))})
    with path.open("rb") as file:
        header = read_header(file)
    assert header.tensors["z"][:2] == ("uint8", (2, 16))
    assert header.metadata == {"format": "pt", "dtype of z": "complex128"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "a header of 0 bytes|damaged"),
        (b"\xff" * 8, "a header of"),
        (b"\x02" + bytes(7) + b"[]", "damaged"),
        (b"\x02" + bytes(7) + b"{]", "damaged"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with (tmp_path / "x").open("rb") as file, pytest.raises(ValueError, match=reason):
        read_header(file)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
    ],
)
def test_an_entry_that_does_not_fit_the_file_is_refused(tmp_path: Path, entry: dict[str, object]) -> None:
    text = json.dumps({"w": entry}).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + b"1234")
    with (tmp_path / "x").open("rb") as file, pytest.raises(ValueError, match="'w'|damaged"):
        read_header(file)
