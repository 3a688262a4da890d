"""Parts of several ranks become whole tensors; what does not fit together is refused by name."""

import itertools
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_sdk.errors import VersionGone, WeightMismatch
from asyncflow_sdk.interfaces import Fetched
from asyncflow_sdk.testing.transport_harness import layout
from asyncflow_sdk.types import Chunk, Manifest, Shard
from asyncflow_sdk.weights import Update

Weights = list[tuple[str, Any]]


def parts(*ranks: Weights) -> list[Fetched]:
    """What transports would fetch of each rank."""
    fetched = []
    for weights in ranks:
        plain = {str(n): np.asarray(getattr(given, "tensor", given)) for n, (_, given) in enumerate(weights)}
        infos, sizes = layout(plain, 1 << 16)
        chunks = [np.zeros(size, np.uint8) for size in sizes]
        for number, (info, (name, tensor)) in enumerate(zip(infos, weights, strict=True)):
            raw = np.frombuffer(plain[info.name].tobytes(), np.uint8)
            chunks[info.chunk][info.offset : info.offset + info.nbytes] = raw
            piece = {"start": tensor.start, "whole": tensor.whole} if isinstance(tensor, Shard) else {}
            infos[number] = msgspec.structs.replace(info, name=name, **piece)
        manifest = Manifest(3, tuple(infos), tuple(Chunk(size) for size in sizes), 1 << 16)
        fetched.append(Fetched(manifest, chunks))
    return fetched


def same(weights: dict[str, Any], update: Update) -> None:
    """Names, dtypes, shapes and every bit."""
    arrays = dict(update.arrays())
    assert arrays.keys() == weights.keys() == update.tensors.keys()
    for name, wanted in weights.items():
        have = arrays[name]
        assert (have.dtype, have.shape, have.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes()), name
        assert update.tensors[name].shape == wanted.shape


def test_pieces_of_several_ranks_become_whole_tensors() -> None:
    # given rows on one, columns on the other, what only one has, and what both have
    random = np.random.default_rng(0)
    rows, columns = random.standard_normal((7, 5)), random.standard_normal((4, 9)).astype(ml_dtypes.bfloat16)
    both, one, none = random.standard_normal(3), np.arange(3), np.ones((3, 2))
    fetched = parts(
        [("rows", Shard(rows[:3], (0, 0), (7, 5))), ("columns", Shard(columns[:, 4:], (0, 4), (4, 9))), ("both", both),
         ("none", Shard(np.empty((0, 2)), (0, 0), (3, 2)))],
        [("columns", Shard(columns[:, :4], (0, 0), (4, 9))), ("rows", Shard(rows[3:], (3, 0), (7, 5))), ("both", both),
         ("one", one), ("none", Shard(none, (0, 0), (3, 2)))],
    )  # fmt: skip
    # when
    update = Update(3, fetched)
    # then
    same({"rows": rows, "columns": columns, "both": both, "none": none, "one": one}, update)
    assert update.root != Update(3, fetched[::-1]).root
    # and what is whole is where it was fetched, what is not is new each time
    first, again = dict(update.arrays()), dict(update.arrays())
    assert np.shares_memory(first["both"], again["both"])
    assert not np.shares_memory(first["rows"], again["rows"])


@settings(max_examples=60)
@given(st.data())
def test_any_grid_of_pieces_is_put_together(data: st.DataObject) -> None:
    # given a tensor cut along each of its dimensions, and its pieces on ranks anyhow
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    whole = np.random.default_rng(0).integers(0, 1 << 15, shape, np.int16)
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    pieces: list[tuple[tuple[int, ...], np.ndarray[Any, Any]]] = [((), whole)]
    for dimension, at in enumerate(cuts):
        pieces = [
            ((*start, a), piece[(slice(None),) * dimension + (slice(a, b),)])
            for start, piece in pieces
            for a, b in itertools.pairwise(at)
        ]
    ranks: list[list[tuple[str, Any]]] = [[], [], []]
    for start, piece in pieces:
        ranks[data.draw(st.integers(0, 2))].append(("w", Shard(piece, start, tuple(shape))))
    # when / then
    same({"w": whole}, Update(3, parts(*ranks)))
    # and without one of them it is not
    lacking = [[each for each in rank if each[1].start != pieces[-1][0]] for rank in ranks]
    if len(pieces) > 1:
        with pytest.raises(WeightMismatch, match=r"version 3: tensor 'w': .* of its \d+ elements"):
            Update(3, parts(*lacking))


def piece(start: int, stop: int, whole: int = 10, dtype: Any = np.float32) -> tuple[str, Shard]:
    return "w", Shard(np.zeros(stop - start, dtype), (start,), (whole,))


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        (piece(0, 4), piece(5, 10), "2 pieces have 9 of its 10 elements: some rank did not send its own"),
        (piece(0, 6), piece(5, 10), r"pieces \(6,\) at \(0,\) and \(5,\) at \(5,\) overlap"),
        (piece(0, 5), piece(5, 10, 11), r"it is float32\(11,\) in one part and float32\(10,\) in another"),
        (piece(0, 5), piece(5, 10, dtype=np.float16), r"float16\(10,\) in one part and float32\(10,\)"),
        (piece(0, 5), ("v", np.zeros(1)), "1 pieces have 5 of its 10"),
        (("w", np.zeros(10)), ("w", np.ones(10)), "two parts have different bytes of it"),
        (("w", np.zeros(10, np.float32)), piece(0, 5), r"overlap"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(one: tuple[str, Any], other: tuple[str, Any], reason: str) -> None:
    with pytest.raises(WeightMismatch, match=f"version 3: tensor 'w': .*{reason}"):
        Update(3, parts([one], [other]))


def test_a_manifest_that_lies_is_refused() -> None:
    (good,) = parts([("w", np.zeros(16, np.float32))])
    (info,) = good.manifest.tensors
    for wrong in (
        {"chunk": 1}, {"chunk": -1}, {"offset": 64}, {"offset": -4}, {"offset": 2, "shape": (4,)}, {"shape": (-4, -4)},
        {"shape": (1 << 40,)}, {"start": (1,), "whole": (16,)}, {"start": (0, 0), "whole": (16,)},
        {"start": (-1,), "whole": (16,)}, {"whole": (16,)},
    ):  # fmt: skip
        manifest = msgspec.structs.replace(good.manifest, tensors=(msgspec.structs.replace(info, **wrong),))
        with pytest.raises(WeightMismatch, match="version 3: tensor 'w': .* does not lie in"):
            Update(3, [Fetched(manifest, good.chunks)])


def test_an_engine_may_know_other_names() -> None:
    fetched = parts([("a.w", np.ones(2)), ("b.w", np.zeros(2))])
    same({"a": np.ones(2), "b": np.zeros(2)}, Update(3, fetched, lambda name: name[0]))
    with pytest.raises(WeightMismatch, match="'w': both 'a.w' and 'b.w' are renamed to it"):
        Update(3, fetched, lambda name: "w")


def test_bytes_on_a_device_stay_there() -> None:
    """As where chunks are torch tensors: a transport between devices gives such."""
    torch = pytest.importorskip("torch")
    weights = {"w": np.arange(15.0).reshape(5, 3), "b": np.arange(7).astype(ml_dtypes.bfloat16), "n": np.arange(4)}
    (fetched,) = parts(list(weights.items()))
    chunks = [torch.from_numpy(chunk) for chunk in fetched.chunks]
    update = Update(3, [Fetched(fetched.manifest, chunks)])
    same(weights, update)
    tensors = dict(update)
    assert tensors["w"].data_ptr() == chunks[0].data_ptr()
    assert {name: (str(t.dtype), t.tolist()) for name, t in tensors.items()} == {
        name: (f"torch.{update.tensors[name].dtype}", array.tolist()) for name, array in weights.items()
    }


def test_what_was_released_is_gone() -> None:
    fetched = parts([("a", np.ones(2))], [("b", np.ones(2))])
    update = Update(3, fetched)
    held = dict(update.arrays())
    update.release()
    update.release()
    assert all(part.chunks == () for part in fetched)
    assert held["a"].tolist() == [1, 1]
    with pytest.raises(VersionGone, match="version 3 was released"):
        list(update)
