"""Parts of several ranks become whole tensors; what does not fit together is refused by name."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from written import same, send

from asyncflow_sdk.errors import VersionGone, WeightMismatch
from asyncflow_sdk.interfaces import Fetched
from asyncflow_sdk.memory import SharedDirectory
from asyncflow_sdk.types import Shard
from asyncflow_sdk.weights import Update
from asyncflow_sdk.weights.shm import ShmReceiver, ShmSender


@pytest.fixture
def shared() -> Iterator[SharedDirectory]:
    shared = SharedDirectory(Path("/dev/shm"))
    yield shared
    shared.close()


_numbers = itertools.count()


def parts(shared: SharedDirectory, *ranks: list[tuple[str, Any]]) -> list[Fetched]:
    fetched = []
    for rank, weights in enumerate(ranks):
        sender, receiver = ShmSender(shared.path, f"{next(_numbers)}-0", rank=rank), ShmReceiver(shared.path)
        fetched.append(send(sender, 3, weights).fetched(receiver))
        receiver.close()
        sender.close()
    return fetched


def test_pieces_of_several_ranks_become_whole_tensors(shared: SharedDirectory) -> None:
    # given rows on one, columns on the other, what only one has, and what both have
    rows, columns, both = torch.randn(7, 5), torch.randn(4, 9).to(torch.bfloat16), torch.randn(3)
    fetched = parts(
        shared,
        [("rows", Shard(rows[:3], (0, 0), (7, 5))), ("columns", Shard(columns[:, 4:], (0, 4), (4, 9))), ("both", both),
         ("none", Shard(torch.empty(0, 2), (0, 0), (3, 2)))],
        [("columns", Shard(columns[:, :4], (0, 0), (4, 9))), ("rows", Shard(rows[3:], (3, 0), (7, 5))), ("both", both),
         ("one", torch.arange(3)), ("none", Shard(torch.ones(3, 2), (0, 0), (3, 2)))],
    )  # fmt: skip
    # when
    update = Update(3, fetched)
    # then
    same({"rows": rows, "columns": columns, "both": both, "none": torch.ones(3, 2), "one": torch.arange(3)}, update)
    assert update.root != Update(3, fetched[::-1]).root
    # and what is whole is where it was fetched, what is not is new each time
    one, again = dict(update), dict(update)
    assert one["both"].data_ptr() == again["both"].data_ptr()
    assert one["rows"].data_ptr() != again["rows"].data_ptr()


@settings(max_examples=60, deadline=None)
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
    shared = SharedDirectory(Path("/dev/shm"))
    try:
        # when / then
        same({"w": whole}, Update(3, parts(shared, *ranks)))
        # and without one of them it is not
        lacking = [[each for each in rank if each[1].start != pieces[-1][0]] for rank in ranks]
        if len(pieces) > 1:
            with pytest.raises(WeightMismatch, match=r"version 3: tensor 'w': .* of its \d+ elements"):
                Update(3, parts(shared, *lacking))
    finally:
        shared.close()


def piece(start: int, stop: int, whole: int = 10, dtype: torch.dtype = torch.float32) -> tuple[str, Shard]:
    return "w", Shard(torch.zeros(stop - start, dtype=dtype), (start,), (whole,))


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        (piece(0, 4), piece(5, 10), "2 pieces have 9 of its 10 elements: some rank did not send its own"),
        (piece(0, 6), piece(5, 10), r"pieces \(6,\) at \(0,\) and \(5,\) at \(5,\) overlap"),
        (piece(0, 5), piece(5, 10, 11), r"it is float32\(11,\) in one part and float32\(10,\) in another"),
        (piece(0, 5), piece(5, 10, dtype=torch.float16), r"float16\(10,\) in one part and float32\(10,\)"),
        (piece(0, 5), ("v", torch.zeros(1)), "1 pieces have 5 of its 10"),
        (("w", torch.zeros(10)), ("w", torch.ones(10)), "two parts have different bytes of it"),
        (("w", torch.zeros(10)), piece(0, 5), r"overlap"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(
    shared: SharedDirectory, one: tuple[str, Any], other: tuple[str, Any], reason: str
) -> None:
    with pytest.raises(WeightMismatch, match=f"version 3: tensor 'w': .*{reason}"):
        Update(3, parts(shared, [one], [other]))


def test_a_manifest_that_lies_is_refused(shared: SharedDirectory) -> None:
    (good,) = parts(shared, [("w", torch.zeros(16))])
    (info,) = good.manifest.tensors
    for wrong in (
        {"chunk": 1}, {"chunk": -1}, {"offset": 64}, {"offset": -4}, {"offset": 2, "shape": (4,)}, {"shape": (-4, -4)},
        {"shape": (1 << 40,)}, {"start": (1,), "whole": (16,)}, {"start": (0, 0), "whole": (16,)},
        {"start": (-1,), "whole": (16,)}, {"whole": (16,)},
    ):  # fmt: skip
        manifest = msgspec.structs.replace(good.manifest, tensors=(msgspec.structs.replace(info, **wrong),))
        with pytest.raises(WeightMismatch, match="version 3: tensor 'w': .* does not lie in"):
            Update(3, [Fetched(manifest, good.chunks)])


def test_an_engine_may_know_other_names(shared: SharedDirectory) -> None:
    fetched = parts(shared, [("a.w", torch.ones(2)), ("b.w", torch.zeros(2))])
    same({"a": torch.ones(2), "b": torch.zeros(2)}, Update(3, fetched, lambda name: name[0]))
    with pytest.raises(WeightMismatch, match="'w': both 'a.w' and 'b.w' are renamed to it"):
        Update(3, fetched, lambda name: "w")


def test_bytes_on_a_device_stay_there(shared: SharedDirectory) -> None:
    """As where chunks are torch tensors: a transport between devices gives such."""
    weights = {"w": torch.randn(5, 3), "b": torch.randn(7).to(torch.bfloat16), "n": torch.arange(4)}
    (fetched,) = parts(shared, list(weights.items()))
    chunks = [torch.from_numpy(chunk) for chunk in fetched.chunks]
    update = Update(3, [Fetched(fetched.manifest, chunks)])
    same(weights, update)
    assert dict(update)["w"].data_ptr() == chunks[0].data_ptr()


def test_what_was_released_is_gone(shared: SharedDirectory) -> None:
    fetched = parts(shared, [("a", torch.ones(2))], [("b", torch.ones(2))])
    update = Update(3, fetched)
    held = dict(update)
    update.release()
    update.release()
    assert all(part.chunks == () for part in fetched)
    assert held["a"].tolist() == [1, 1]
    with pytest.raises(VersionGone, match="version 3 was released"):
        list(update)
