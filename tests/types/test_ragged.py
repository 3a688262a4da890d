"""Ragged against plain loops over its rows."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_sdk.errors import SchemaError
from asyncflow_sdk.types import Ragged, VersionSpan, one_version, token_staleness, token_steps, token_versions

pytestmark = pytest.mark.fast

DTYPES: list[Any] = [np.int32, np.float32, ml_dtypes.bfloat16, np.bool_]


@st.composite
def raggeds(draw: st.DrawFn, trailing: tuple[int, ...] | None = None) -> Ragged:
    lengths = np.array(draw(st.lists(st.integers(0, 6), max_size=8)), np.int64)
    shape = draw(st.sampled_from([(), (2,), (2, 3)])) if trailing is None else trailing
    count = int(lengths.sum())
    values = np.arange(count * int(np.prod(shape, dtype=int)), dtype=np.float64).reshape(count, *shape)
    return Ragged.from_lengths(values.astype(draw(st.sampled_from(DTYPES))), lengths)


def rows(ragged: Ragged) -> list[Any]:
    return [ragged[i].tolist() for i in range(len(ragged))]


@settings(max_examples=30)
@given(ragged=raggeds(), side=st.sampled_from(["left", "right"]), extra=st.integers(0, 3))
def test_padded_is_the_loop(ragged: Ragged, side: str, extra: int) -> None:
    # given
    width = int(ragged.lengths.max(initial=0)) + extra
    wanted = np.full((len(ragged), width, *ragged.values.shape[1:]), 1, ragged.values.dtype)
    for i, row in enumerate(ragged):
        if side == "right":
            wanted[i, : len(row)] = row
        else:
            wanted[i, width - len(row) :] = row
    # when
    found = ragged.padded(1, length=width, side=side)
    # then
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert found.tobytes() == wanted.tobytes()
    if not extra:
        assert ragged.padded(1, side=side).tobytes() == wanted.tobytes()


@settings(max_examples=30)
@given(ragged=raggeds(), data=st.data())
def test_take_is_the_loop(ragged: Ragged, data: st.DataObject) -> None:
    index = data.draw(
        st.lists(st.integers(-len(ragged), len(ragged) - 1), max_size=10) if len(ragged) else st.just([])
    )
    taken = ragged.take(np.array(index, np.int64))
    assert rows(taken) == [ragged[i].tolist() for i in index]
    assert taken.values.dtype == ragged.values.dtype


@settings(max_examples=30)
@given(ragged=raggeds(), data=st.data())
def test_slice_is_the_loop(ragged: Ragged, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(ragged)))
    stop = data.draw(st.integers(start, len(ragged)))
    part = ragged.slice(start, stop)
    assert rows(part) == rows(ragged)[start:stop]
    assert not part.values.size or np.shares_memory(part.values, ragged.values)


@settings(max_examples=30)
@given(parts=st.lists(raggeds(trailing=(2,)), min_size=1, max_size=4))
def test_concat_is_the_loop(parts: list[Ragged]) -> None:
    same = [Ragged(part.values.astype(np.float32), part.offsets) for part in parts]
    assert rows(Ragged.concat(same)) == [row for part in same for row in rows(part)]


@settings(max_examples=30)
@given(ragged=raggeds())
def test_cu_seqlens_are_what_attention_kernels_take(ragged: Ragged) -> None:
    found = ragged.cu_seqlens
    assert found.dtype == np.int32
    assert found.tolist() == [sum(len(row) for row in list(ragged)[:i]) for i in range(len(ragged) + 1)]
    assert ragged.lengths.tolist() == [len(row) for row in ragged]


@settings(max_examples=30)
@given(ragged=raggeds())
def test_packing_the_rows_again_gives_the_same(ragged: Ragged) -> None:
    again = Ragged.of([np.asarray(row) for row in ragged])
    assert rows(again) == rows(ragged)
    assert not len(ragged) or again.values.dtype == ragged.values.dtype


def test_what_is_no_ragged() -> None:
    values = np.arange(4)
    for offsets in ([], [0], [1, 4], [0, 3], [0, 5, 4], [[0, 4]]):
        with pytest.raises(SchemaError, match="offsets"):
            Ragged(values, np.array(offsets, np.int64))
    ragged = Ragged.of([[1, 2], [3]])
    with pytest.raises(SchemaError, match="length 2 does not fit into length=1"):
        ragged.padded(length=1)
    with pytest.raises(ValueError, match="'left' or 'right'"):
        ragged.padded(side="top")
    for i in (2, -3):
        with pytest.raises(IndexError, match="of 2"):
            ragged[i]
    assert ragged[-1].tolist() == [3]


def test_version_spans_say_which_version_made_which_token() -> None:
    # given two responses: one of two versions, one of one
    spans = Ragged.of([[VersionSpan(3, 0, 2), VersionSpan(4, 2, 5)], [VersionSpan(4, 0, 3)]])
    # when / then
    assert rows(token_versions(spans)) == [[3, 3, 4, 4, 4], [4, 4, 4]]
    assert token_staleness(spans, 5).tolist() == [2, 2, 1, 1, 1, 1, 1, 1]
    made = one_version(7, np.array([2, 0, 1]))
    assert rows(token_versions(made)) == [[7, 7], [], [7]]


def test_a_token_is_as_old_as_the_steps_between_also_where_numbers_were_skipped() -> None:
    spans = one_version(3, np.array([1]))
    later = Ragged.of([np.array([[v, 0, 1]]) for v in (4, 7, 9)], np.int64)

    assert token_steps(spans).tolist() == [3]
    assert token_steps(later, ((-1, 0), (7, 5), (9, 6))).tolist() == [4, 2, 3]


def test_rows_as_plain_lists() -> None:
    assert Ragged.of([[1, 2], [], [3]], np.int32).tolist() == [[1, 2], [], [3]]
    assert [row.tolist() for row in Ragged.of([[1, 2], [], [3]], np.int32)] == [[1, 2], [], [3]]
