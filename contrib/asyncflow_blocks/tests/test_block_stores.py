"""The payload store made of a BlockStore, and its storage unit: faults of the store, and the end of blocks."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from faults import before, refuses, with_fault
from folder_store import FolderStore
from waiting import until

from asyncflow_blocks import BlockPayloadStore
from asyncflow_blocks.sealed import PIECE_BYTES, PieceReader, SealedBlock
from asyncflow_sdk.errors import ConfigError, LeaseLost, MemoryFull, SchemaError, StoreUnavailable
from asyncflow_sdk.interfaces import HomeCatalog, HomeOffer, StorageHome, StoreContext, StoredBlock
from asyncflow_sdk.memory import GrowthNeeded
from asyncflow_sdk.queue.block_index import BlockIndex
from asyncflow_sdk.queue.stores.blocks import pack_columns
from asyncflow_sdk.queue.stores.homes import SERVER_MEMORY, home_of
from asyncflow_sdk.types.blocks import BlockSlices

RUN = "asyncflow-0-1-run"


class Catalog(HomeCatalog):
    """The homes of a run in this process: the rules of the ledger in a few lines. ``segments``,
    ``sessions``: needed by the server."""

    def __init__(self) -> None:
        self.by_number: dict[int, StorageHome] = {}
        self.identities: dict[int, str] = {}
        self.segments, self.sessions = set[str](), {1, 2}

    def open(self, offer: HomeOffer) -> tuple[int, int]:
        number = next((n for n, home in self.by_number.items() if home.name == offer.name), len(self.by_number) + 1)
        known = self.by_number.get(number)
        same = known is not None and not known.lost and self.identities[number] == offer.identity
        epoch = 1 if known is None else known.epoch if same else known.epoch + 1
        listed = msgspec.structs.asdict(offer) | {"identity": ""}
        self.by_number[number] = StorageHome(**listed, home=number, epoch=epoch)
        self.identities[number] = offer.identity
        return number, epoch

    def lose(self, number: int, reason: str = "evicted") -> None:
        self.by_number[number] = msgspec.structs.replace(self.by_number[number], lost=reason)

    def homes(self) -> Sequence[StorageHome]:
        return list(self.by_number.values())

    def needed(self, home: int, epoch: int) -> tuple[Set[str], Set[int]]:
        return self.segments, self.sessions


class Place:
    """One home in a folder, and its rows. ``store``: of session 1."""

    def __init__(self, folder: Path, **options: int) -> None:
        self.blocks, self.catalog = FolderStore(str(folder), **options), Catalog()
        self.unit = self.client(0).open_unit(self.catalog, "a", "host")
        self.index = BlockIndex()
        self.store = self.client(1)
        self._rows = 0

    def client(self, session: int, **context: Any) -> BlockPayloadStore:
        settings: dict[str, Any] = {"check_size": lambda nbytes: None, "homes": self.catalog, **context}
        made = StoreContext(run=RUN, session=session, **settings)
        return BlockPayloadStore("folder", self.blocks, made)

    def put(self, columns: Mapping[str, Any]) -> StoredBlock:
        stored = self.store.write(pack_columns(columns), copy=False)
        assert stored.block is not None
        self.index.add(self._rows + (rows := np.arange(stored.block.rows)), stored.block, rows)
        self._rows += stored.block.rows
        return stored

    def locate(self, ids: Sequence[int], *columns: str) -> tuple[BlockSlices, ...]:
        return self.index.locate(np.array(ids), columns)

    def read(self, ids: Sequence[int], columns: Mapping[str, Any]) -> dict[str, Any]:
        return self.client(2).read(self.locate(ids, *columns), specs(columns))


def specs(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {name: column.spec for name, column in pack_columns(columns).items()}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


LARGE = {
    "x": np.arange(64 * 4096.0).reshape(64, 4096),
    "tokens": [np.arange(n * 100, dtype=np.int32) for n in range(64)],
}


def test_only_the_bytes_that_rows_need_are_read(place: Place) -> None:
    place.put(LARGE)
    asked: list[tuple[int, int]] = []
    with_fault(place.blocks, {"read": before(lambda *args: [asked.extend(each.ranges) for each in args[-1]])})
    found = place.read([7, 40], LARGE)
    assert found["x"].values.tolist() == LARGE["x"][[7, 40]].tolist()  # type: ignore[call-overload]
    assert [len(found["tokens"].values), found["tokens"].offsets.tolist()] == [4700, [0, 700, 4700]]
    assert sum(stop - start for start, stop in asked) < 10 * PIECE_BYTES


@pytest.mark.parametrize("at", [0, 8, 100, 70_000, -1, -20])
def test_damaged_bytes_are_not_returned(place: Place, at: int) -> None:
    place.put(LARGE)
    (file,) = place.blocks.files()
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)
    with pytest.raises(StoreUnavailable, match="damaged in its store, or on their way, twice"):
        place.read(range(64), LARGE)


def test_a_block_of_another_serial_is_lost(place: Place) -> None:
    first, second = place.put({"x": np.zeros(5)}), place.put({"x": np.ones(5)})
    assert first.block is not None
    one, other = place.blocks.files()
    shutil.copy(other, one)
    with pytest.raises(LeaseLost):
        place.read(range(5), {"x": np.zeros(5)})
    assert second.block is not None


def test_a_location_that_no_writer_made_is_refused(place: Place) -> None:
    stored = place.put({"x": np.zeros(5)})
    assert stored.block is not None
    (slices,) = place.locate(range(5), "x")
    for column, value in ((4, 7), (4, 0), (4, 1 << 60), (3, 99), (2, 5)):
        blocks = np.frombuffer(slices.blocks, np.int64).copy()
        blocks[column] = value
        wrong = BlockSlices(
            slices.columns, slices.fields, slices.segments, blocks.tobytes(), slices.entries, slices.counts
        )
        with pytest.raises((LeaseLost, SchemaError, StoreUnavailable)):
            place.store.read([wrong], specs({"x": np.zeros(5)}))


def test_freed_blocks_make_room(tmp_path: Path) -> None:
    place = Place(tmp_path, limit_bytes=1 << 20)
    columns = pack_columns({"x": np.zeros(100_000)})
    stored = place.store.write(columns, copy=False, grow=False)
    assert stored.block is not None
    with pytest.raises(GrowthNeeded):
        place.store.write(columns, copy=False, grow=False)
    with pytest.raises(MemoryFull):
        place.store.write(columns, copy=False)
    place.store.free([stored.block.serial])
    assert place.store.write(columns, copy=False).block is not None


def test_a_read_that_hangs_ends_at_its_deadline(place: Place) -> None:
    place.put({"x": np.arange(5)})
    place.blocks.fetch_s = 0.2
    goes_on = threading.Event()
    with_fault(place.blocks, {"read": before(lambda *_: goes_on.wait(60))})
    with pytest.raises(StoreUnavailable, match=r"home 1 \(a\): no answer in 0.2 s"):
        place.read(range(5), {"x": np.arange(5)})
    goes_on.set()
    place.blocks.fetch_s = 60.0
    assert place.read(range(5), {"x": np.arange(5)})["x"].values.tolist() == list(range(5))


def test_columns_go_to_the_server_while_the_store_is_away(place: Place) -> None:
    away = refuses(lambda *_: True, StoreUnavailable)
    with_fault(place.blocks, {"write": away})
    with_fault(place.unit.memory, {"check": away})
    assert place.store.write(pack_columns({"x": np.zeros(5)}), copy=False).image is not None
    with pytest.raises(StoreUnavailable):
        place.unit.beat()


def test_contents_that_are_lost_are_another_epoch(place: Place, tmp_path: Path) -> None:
    stored = place.put({"x": np.arange(5)})
    for file in [path for path in tmp_path.rglob("*") if path.is_file()]:
        file.unlink()
    # before the unit has noticed, rows are late
    with pytest.raises(StoreUnavailable, match="has not noticed yet"):
        place.read(range(5), {"x": np.arange(5)})
    place.unit.beat()
    assert place.unit.where == (1, 2)
    with pytest.raises(LeaseLost, match="epoch 1 of home 1"):
        place.read(range(5), {"x": np.arange(5)})
    # a call with a block of the lost epoch is repeated with one of the next
    again = place.store.rewrite(stored)
    assert again is not None and again.block is not None
    assert home_of(again.block.segment) == (1, 2)
    place.index.add(np.arange(100, 100 + again.block.rows), again.block, np.arange(again.block.rows))
    assert place.read(range(100, 105), {"x": np.arange(5)})["x"].values.tolist() == list(range(5))
    assert place.store.rewrite(again) is None


def test_without_a_home_columns_go_to_the_server_and_a_lost_block_too(place: Place) -> None:
    stored = place.put({"x": np.arange(5)})
    place.catalog.lose(1)
    again = place.store.rewrite(stored)
    assert again is not None and again.image is not None
    assert place.client(2).write(pack_columns({"x": np.zeros(5)}), copy=False).image is not None


def test_the_unit_frees_blocks_of_ended_sessions_and_of_lost_epochs(place: Place) -> None:
    first, second = place.put({"x": np.zeros(5)}), place.client(2).write(pack_columns({"x": np.zeros(5)}), copy=False)
    assert first.block is not None and second.block is not None
    place.catalog.sessions, place.catalog.segments = {3}, {first.block.segment}
    place.unit.beat()
    assert [file.name.rpartition("%2F")[2] for file in place.blocks.files()] == [str(first.block.serial)]
    place.catalog.segments = set()
    place.unit.beat()
    assert not place.blocks.files()
    # a home that was evicted, and is still there
    place.catalog.sessions = {1}
    place.put({"x": np.zeros(5)})
    place.catalog.lose(1)
    place.unit.beat()
    assert place.unit.where == (1, 2)
    assert not place.blocks.files()


def test_a_discarded_block_is_freed(place: Place) -> None:
    stored = place.put({"x": np.zeros(5)})
    place.store.discard(stored)
    place.store.discard(stored)
    until(lambda: not place.blocks.files(), "the end of the block")


def test_payload_on_disk_is_refused(place: Place) -> None:
    with pytest.raises(ConfigError, match="durability='host'"):
        place.client(3, synced=True)
    with pytest.raises(ConfigError, match="a list of homes"):
        place.client(3, homes=None)


def test_pieces_are_read_once_and_with_their_digests() -> None:
    block = SealedBlock(pack_columns({"x": np.arange(50_000)}), 1)
    reader = PieceReader(block.nbytes)
    end = len(block.sealed)
    assert reader.missing([(0, 10), (20, 30)]) == [(0, PIECE_BYTES), (block.nbytes, end)]
    request = reader.missing([(PIECE_BYTES - 1, PIECE_BYTES + 1)])
    assert request == [(0, 2 * PIECE_BYTES), (block.nbytes, end)]
    reader.sealed[:] = block.sealed
    reader.check(request)
    assert reader.missing([(5, 5), (0, 2 * PIECE_BYTES)]) == []
    assert reader.missing([(0, block.nbytes)]) == [(2 * PIECE_BYTES, block.nbytes)]
    assert home_of("s1-0") == SERVER_MEMORY
