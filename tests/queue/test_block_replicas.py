"""The server's index of blocks with two places, against a model of it in a few lines."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_sdk.queue.block_index import BlockCheck, BlockIndex, OwnedPlace
from asyncflow_sdk.queue.snapshot import decode, encode
from asyncflow_sdk.queue.stores.replica_choice import choose, has_replicas
from asyncflow_sdk.types.blocks import Block, BlockPlace, BlockSlices

HOMES = ("s1-", "h1.1!s1-", "h2.1!s1-00000000-")
pytestmark = pytest.mark.fast


@dataclass
class Model:
    """``rows``: the places of each row, as (home, serial), first the one that is read by default."""

    index: BlockIndex = field(default_factory=BlockIndex)
    rows: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    entries: dict[int, int] = field(default_factory=dict)
    serials: Any = field(default_factory=lambda: itertools.count(1))
    first: int = 0

    def put(self, rows: int, homes: tuple[int, int | None]) -> None:
        places = [(home, next(self.serials)) for home in homes if home is not None]
        (home, serial), *other = places
        block = Block(f"{HOMES[home]}1", 64 * serial, serial, rows, 64, ("x",))
        replica = [OwnedPlace("", BlockPlace(f"{HOMES[h]}1", 64 * s, s)) for h, s in other]
        self.index.put(self.first, block, f"owner {home}", 1, *replica)
        for entry in range(rows):
            self.rows[self.first + entry], self.entries[self.first + entry] = list(places), entry
        self.first += rows

    def retire(self, ids: list[int]) -> None:
        gone = [self.rows.pop(i) for i in ids]
        left = {place for places in self.rows.values() for place in places}
        freed = {
            (HOMES.index(segment[:-1]), int(serial))
            for _, segment, serials in self.index.retire(np.array(ids))
            for serial in np.frombuffer(serials, np.int64)
        }
        assert freed == {place for places in gone for place in places} - left

    def lose(self, home: int, serials: set[int] | None = None) -> None:
        """Lose a home, or blocks of it."""

        def gone(place: tuple[int, int]) -> bool:
            return place[0] == home and (serials is None or place[1] in serials)

        lost = [i for i, places in self.rows.items() if all(map(gone, places))]
        left = {place for places in self.rows.values() for place in places if gone(place)}
        among = None if serials is None else np.array(sorted(serials), np.int64)
        rows, freed = self.index.drop(lambda segment: segment[:-1] == HOMES[home], among)
        dropped = [i for ids, _ in rows for i in ids.tolist()]
        assert sorted(dropped) == lost
        assert {serial for each in freed for serial in np.frombuffer(each.serials, np.int64)} == {s for _, s in left}
        for i in lost:
            del self.rows[i]
        for places in self.rows.values():
            places[:] = [place for place in places if not gone(place)]

    def check(self, ids: list[int]) -> None:
        if ids:
            (slices,) = self.index.locate(np.array(ids), ("x",))
            assert has_replicas(slices) == any(len(self.rows[i]) == 2 for i in ids)
            for order in itertools.permutations(range(3)):
                costs = {f"{name}1": cost for name, cost in zip(HOMES, order, strict=True)}
                wanted = [min(self.rows[i], key=lambda place: costs[f"{HOMES[place[0]]}1"])[1] for i in ids]
                found = choose(slices, costs.__getitem__)
                assert rows_of(found) == [(s, self.entries[i]) for s, i in zip(wanted, ids, strict=True)]
            default = choose(slices, lambda segment: 0)
            assert [serial for serial, _ in rows_of(default)] == [self.rows[i][0][1] for i in ids]
        places = {place for places in self.rows.values() for place in places}
        for number, name in enumerate(HOMES):
            found = [each for there in self.index.places_in(f"{name}1".__eq__).values() for each in there.tolist()]
            assert sorted(found) == sorted([64 * s, s, 64] for home, s in places if home == number)
        assert self.index.segments() == {f"{HOMES[home]}1" for home, _ in places}
        blocks = {tuple(each) for each in self.rows.values()}
        assert self.index.live_bytes == 64 * len(blocks)
        assert self.index.replicated_bytes == 64 * sum(len(each) == 2 for each in blocks)
        for home in range(3):
            lost = [i for i, each in self.rows.items() if {h for h, _ in each} == {home}]
            gone = self.index.find_lost(all_but(HOMES[home]))
            assert gone.tolist() == lost


def all_but(home: str) -> BlockCheck:
    return lambda segment, starts, *_: np.full(len(starts), segment[:-1] != home)


def rows_of(slices: BlockSlices) -> list[tuple[int, int]]:
    """The serial of each row's block, and its entry."""
    assert not has_replicas(slices)
    out = []
    runs = iter(zip(np.frombuffer(slices.entries, np.int32), np.frombuffer(slices.counts, np.int32), strict=True))
    for number, start, serial, _, _, count in np.frombuffer(slices.blocks, np.int64).reshape(-1, 6).tolist():
        assert 0 <= number < len(slices.segments)
        assert start == 64 * serial
        for entry, rows in itertools.islice(runs, count):
            out += [(serial, int(entry) + n) for n in range(rows)]
    return out


PLACES = st.tuples(st.integers(0, 2), st.none() | st.integers(0, 2)).filter(lambda homes: homes[0] != homes[1])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_places_of_rows_are_those_of_the_model(data: st.DataObject) -> None:
    model = Model()
    for _ in range(data.draw(st.integers(1, 12))):
        known = sorted(model.rows)
        what = data.draw(st.sampled_from(["put", "put", "put", "retire", "lose", "lose blocks", "resume"]))
        if what == "put":
            model.put(data.draw(st.integers(1, 4)), data.draw(PLACES))
        elif what == "retire" and known:
            model.retire(data.draw(st.lists(st.sampled_from(known), unique=True, min_size=1)))
        elif what == "lose":
            model.lose(data.draw(st.integers(0, 2)))
        elif what == "lose blocks":
            serials = {serial for places in model.rows.values() for _, serial in places} | {1 << 40}
            model.lose(data.draw(st.integers(0, 2)), data.draw(st.sets(st.sampled_from(sorted(serials)))))
        elif what == "resume":
            model.index = decode(encode(model.index))
        known = sorted(model.rows)
        model.check(data.draw(st.lists(st.sampled_from(known), max_size=8)) if known else [])
