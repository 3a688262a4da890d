"""What callers hand in becomes columns: fixed, ragged, text and bytes; what is not a column is refused by name."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_sdk.errors import SchemaError
from asyncflow_sdk.types import Batch, Ragged, pack, unpack

TEXTS = st.lists(st.text(max_size=20), min_size=1, max_size=20)


@settings(max_examples=30)
@given(texts=TEXTS)
def test_any_text_comes_back(texts: list[str]) -> None:
    column = pack("t", texts)
    assert str(column.spec) == "text"
    assert unpack(column) == texts


@settings(max_examples=30)
@given(rows=st.lists(st.binary(max_size=20), min_size=1, max_size=20))
def test_any_bytes_come_back(rows: list[bytes]) -> None:
    # given bytes in each of Python's three forms
    for form in (bytes, bytearray, memoryview):
        assert unpack(pack("b", [form(row) for row in rows])) == rows


def test_memoryviews_count_bytes_and_not_items() -> None:
    # given memory of wider items, not all of it contiguous
    numbers = np.arange(6, dtype=np.int32)
    rows = [memoryview(numbers), memoryview(numbers)[::2]]
    # when / then
    assert unpack(pack("b", rows)) == [numbers.tobytes(), numbers[::2].tobytes()]


@pytest.mark.parametrize("text", ["\ud800", "ok\udfff"])
def test_text_with_surrogates_is_refused(text: str) -> None:
    with pytest.raises(SchemaError, match="column 'answer': text that is not valid Unicode"):
        pack("answer", ["fine", text])


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        ([1, 2, 3], "fixed int64[]"),
        ([1.5, 2], "fixed float64[]"),
        ([True, False], "fixed bool[]"),
        (np.zeros((3, 2, 5), np.float32), "fixed float32[2, 5]"),
        ([torch.tensor(1, dtype=torch.bfloat16)], "fixed bfloat16[]"),
        ([torch.zeros(2, dtype=torch.bfloat16), torch.zeros(0, dtype=torch.bfloat16)], "ragged bfloat16[n]"),
        ([[1, 2], [], [3]], "ragged int64[n]"),
        ([[], np.empty(0, np.int16), []], "ragged int16[n]"),
        ([torch.empty(0, dtype=torch.bfloat16), []], "ragged bfloat16[n]"),
        ([np.empty((0, 4), np.int16)], "ragged int16[n, 4]"),
        ([np.zeros((2, 4), np.float16), np.zeros((0, 4), np.float16)], "ragged float16[n, 4]"),
        ([np.zeros((3, 0), np.float16), np.zeros((1, 0), np.float16)], "ragged float16[n, 0]"),
        (np.array(["a", "bc"]), "text"),
        (np.array(["a", "bc"], object), "text"),
        ((b"a", b""), "bytes"),
    ],
)
def test_kinds(value: object, spec: str) -> None:
    column = pack("x", value)
    assert str(column.spec) == spec
    assert len(column) == len(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.float32(1.0), "is not a column"),
        (np.array(1.0), "a single number is not a column"),
        (torch.tensor(1.0), "a single number is not a column"),
        ("text", "a str is not a column"),
        ({"a": 1}, "a dict is not a column"),
        (None, "a NoneType is not a column"),
        ([None, None], "entry 0 is None; a column has one number, array of numbers, text, bytes or record a row"),
        ([1.0, 2.0, None], "entry 2 is None"),
        (["a", None], "entry 1 is None"),
        ([[1, 2], [3, None]], "entry 1 is a list of NoneType and int"),
        ([["a", "b"], ["c"]], "entry 0 is a list of str"),
        ([{"a": 1}, [1]], "entry 1 is a list, and others are records"),
        ([{"a": 1}, {"b": {1j}}], "entry 1 has no form in JSON"),
        (np.array([[1, "a"], [2, "b"]], object), "entry 0 is an array of dtype object"),
        (["a", b"b"], "entries of different types are mixed: bytes, str"),
        ([1, "a"], "entries of different types are mixed: int, str"),
        ([np.zeros(2), 1.0], "single numbers and arrays are mixed"),
        ([[1, 2], [3.5]], "rows have different dtypes"),
        ([np.zeros(2, np.int32), np.zeros(2, np.int64)], "rows have different dtypes"),
        ([np.zeros((2, 3)), np.zeros((2, 4))], "row 1 has shape"),
        ([[[1, 2]], [[1]]], "row 1 has shape"),
        ([1, 2**63 + 1], "neither int64 nor float64 represents exactly"),
        ([2**64], "entry 0 is 18446744073709551616, which does not fit 64 bits"),
        ([[], [], ()], "every row is an empty list without a dtype"),
        ([[[]], []], "every row is an empty list without a dtype"),
    ],
)
def test_what_is_no_column_is_refused_by_name(value: object, reason: str) -> None:
    with pytest.raises(SchemaError, match=f"column 'reward': .*{reason}"):
        pack("reward", value)


def test_memory_that_is_not_plain_is_taken_as_it_lies() -> None:
    # given the same numbers behind strides, in a foreign byte order, read-only, and transposed
    wanted = np.arange(12, dtype=np.int32).reshape(4, 3)
    read_only = wanted.copy()
    read_only.flags.writeable = False
    odd = {
        "strided": np.repeat(wanted, 2, axis=0)[::2],
        "reversed": wanted[::-1][::-1],
        "big": wanted.astype(">i4"),
        "fortran": np.asfortranarray(wanted),
        "read_only": read_only,
        "torch": torch.from_numpy(wanted.copy()).t().contiguous().t(),
    }
    for name, value in odd.items():
        # when
        column = pack(name, value)
        # then
        if name != "torch":
            assert np.shares_memory(column.values, value) == (name != "big"), name
        assert column.values.dtype == np.dtype("=i4"), name
        assert column.values.tolist() == wanted.tolist(), name


def test_big_endian_floats_in_ragged_rows() -> None:
    column = pack("x", Ragged.of([np.array([1.5, -0.0], ">f8"), np.array([2.5], ">f8")]))
    assert column.values.dtype == np.dtype("=f8")
    assert column.values.tobytes() == np.array([1.5, -0.0, 2.5]).tobytes()


def test_contiguous_memory_is_not_copied() -> None:
    array, tensor = np.arange(4.0), torch.arange(4.0)
    assert pack("x", array).values.base is array or pack("x", array).values is array
    assert pack("x", tensor).values.ctypes.data == tensor.data_ptr()


def test_a_batch_reads_only_and_torch_may_write() -> None:
    # given
    mine = np.arange(3.0)
    batch = Batch.of({"x": mine, "ids": [[1, 2], [3], []], "t": ["a", "b", "c"]})
    # when / then: what is read cannot be written into
    with pytest.raises(ValueError, match="read-only"):
        batch.array("x")[0] = 9
    with pytest.raises(ValueError, match="read-only"):
        batch.ragged("ids").values[0] = 9
    # and what torch writes reaches nobody
    batch.torch("x").fill_(7)
    batch.torch("ids")[0].fill_(7)
    assert batch.array("x").tolist() == [0, 1, 2]
    assert [row.tolist() for row in batch.ragged("ids")] == [[1, 2], [3], []]
    # and the caller's own array stays writable
    mine[0] = 5
    with pytest.raises(SchemaError, match="torch has no such tensors"):
        batch.torch("t")
    with pytest.raises(SchemaError, match=r"no column 'y'.*ids, t, x"):
        batch["y"]


def test_columns_of_different_lengths_make_no_batch() -> None:
    with pytest.raises(SchemaError, match="different numbers of rows"):
        Batch.of({"x": [1, 2], "y": [1, 2, 3]})


def test_rows_of_a_batch_by_position_and_by_mask() -> None:
    # given
    batch = Batch.of({"x": [10, 11, 12, 13], "r": [[1], [2, 2], [], [3]], "t": list("abcd")}, groups=[0, 0, 2, 2])
    # when
    for index in ([3, 0, 0], np.array([True, False, True, False])):
        part = batch.take(index)
        rows = np.arange(4)[index].tolist()
        # then
        assert part.ids.tolist() == rows
        assert part.groups.tolist() == [[0, 0, 2, 2][i] for i in rows]
        assert part.array("x").tolist() == [10 + i for i in rows]
        assert part.texts("t") == ["abcd"[i] for i in rows]
        assert [r.tolist() for r in part.ragged("r")] == [[[1], [2, 2], [], [3]][i] for i in rows]
