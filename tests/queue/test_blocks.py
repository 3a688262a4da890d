"""Rows find their values in many blocks: every reading equals the loop, and nothing that lies there can break a reader."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from block_children import read_damaged, read_while_it_changes
from children import Child
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_sdk.errors import AsyncFlowError, LeaseLost, SchemaError
from asyncflow_sdk.memory import Arena, Mapper, SharedDirectory
from asyncflow_sdk.memory.locks import COPYING, try_lock
from asyncflow_sdk.queue.blocks import Located, pack_columns, write
from asyncflow_sdk.queue.places import Places
from asyncflow_sdk.queue.reader import Reader
from asyncflow_sdk.types import Batch, ColumnSpec, Ragged

OPAQUE = np.dtype([("re", np.float16), ("im", np.float16)])
DTYPES = [np.dtype(d) for d in (np.bool_, np.int8, np.int16, np.float32, np.int64, np.complex128)]
DTYPES += [np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn), OPAQUE]


STORES: list["Store"] = []


class Store:
    """What a server and its clients do with payload, without them."""

    def __init__(self, directory: Path, segment_bytes: int = 1 << 14) -> None:
        self.arena = Arena(directory, "s1-", segment_bytes)
        self.mapper = Mapper(directory)
        self.places, self.reader = Places(), Reader(self.mapper)
        STORES.append(self)
        self.schema: dict[str, ColumnSpec] = {}
        self.rows = 0

    def close(self) -> None:
        self.arena.close(unlink=False)
        self.mapper.close()

    def put(self, columns: dict[str, Any], group_size: int = 1) -> np.ndarray:  # type: ignore[type-arg]
        packed = pack_columns(columns)
        block, _ = write(self.arena, packed)
        self.schema.update({name: column.spec for name, column in packed.items()})
        first, self.rows = self.rows, self.rows + block.rows * group_size
        self.places.put(first, block, "p", group_size)
        return np.arange(first, self.rows)

    def complete(self, ids: np.ndarray, columns: dict[str, Any]) -> None:  # type: ignore[type-arg]
        packed = pack_columns(columns)
        block, _ = write(self.arena, packed)
        self.schema.update({name: column.spec for name, column in packed.items()})
        self.places.add(ids, block, "p", np.arange(block.rows))

    def read(self, ids: np.ndarray, columns: tuple[str, ...]) -> Batch:  # type: ignore[type-arg]
        return self.take(self.places.locate(ids, columns), ids)

    def take(self, located: tuple[Located, ...], ids: np.ndarray) -> Batch:  # type: ignore[type-arg]
        found = {}
        for part in located:
            found.update(self.reader.read(part, self.schema))
        return Batch(ids, ids, found)

    def end(self, ids: np.ndarray) -> None:  # type: ignore[type-arg]
        for freed in self.places.retire(ids):
            assert (freed.owner, freed.segment[:3]) == ("p", "s1-")
            self.arena.free(np.frombuffer(freed.serials, np.int64).tolist())


@pytest.fixture
def directory() -> Iterator[Path]:
    shared = SharedDirectory(Path("/dev/shm"))
    yield shared.path
    while STORES:
        STORES.pop().close()
    shared.close()


def plain(value: Any) -> Any:
    """Something that is equal only when every bit is."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Ragged):
        return value.values.dtype.str, value.offsets.tolist(), value.values.tobytes(), value.values.shape[1:]
    return list(value)


def random_columns(numbers: np.random.Generator, rows: int, dtypes: list[Any], shapes: list[Any]) -> dict[str, Any]:
    """A fixed and a ragged column of each dtype, of random bits, and text and bytes."""
    made: dict[str, Any] = {}
    for number, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True)):
        lengths = numbers.integers(0, 6, rows) * numbers.integers(0, 2, rows) * (1 + 40 * numbers.integers(0, 2))
        for name, count in ((f"fixed{number}", rows), (f"ragged{number}", int(lengths.sum()))):
            raw = numbers.integers(0, 2 if dtype.kind == "b" else 256, (count, *shape, dtype.itemsize), np.uint8)
            made[name] = raw.view(dtype).reshape(count, *shape) if raw.size else np.empty((count, *shape), dtype)
        made[f"ragged{number}"] = Ragged.from_lengths(made[f"ragged{number}"], lengths)
    made["text"] = ["ü" * int(n) for n in numbers.integers(0, 9, rows)]
    made["bytes"] = [bytes(int(n)) for n in numbers.integers(0, 900, rows)]
    return made


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    sizes=st.lists(st.sampled_from([1, 1, 1, 2, 3, 30]), min_size=1, max_size=12),
    shapes=st.lists(st.sampled_from([(), (3,), (2, 2), (0,)]), min_size=1, max_size=3),
    group_size=st.sampled_from([1, 1, 3]),
)
def test_any_rows_of_any_blocks_in_any_order_are_the_loop(
    seed: int, sizes: list[int], shapes: list[Any], group_size: int
) -> None:
    # given rows in blocks of several sizes, in small segments, some of which have ended
    numbers = np.random.default_rng(seed)
    dtypes = [DTYPES[int(numbers.integers(len(DTYPES)))] for _ in shapes]
    shared = SharedDirectory(Path("/dev/shm"))
    try:
        store = Store(shared.path, int(numbers.choice([1 << 12, 1 << 14, 1 << 20])))
        wanted: dict[int, tuple[dict[str, Any], int]] = {}
        for rows in sizes:
            made = random_columns(numbers, rows, dtypes, shapes)
            for at, row in enumerate(store.put(made, group_size).tolist()):
                wanted[row] = made, at // group_size
            if numbers.random() < 0.2:
                gone = numbers.permutation(list(wanted))[: len(wanted) // 3]
                store.end(gone)
                for row in gone.tolist():
                    del wanted[row]
        singles = {row: Batch.of(made).take([at]) for row, (made, at) in wanted.items()}
        for _ in range(4):
            # when some are read, in some order, some columns
            ids = numbers.permutation(list(wanted))[: 1 + int(numbers.integers(len(wanted)))]
            ids = np.sort(ids) if numbers.random() < 0.5 else ids
            names = tuple(numbers.permutation(list(made))[: 1 + int(numbers.integers(len(made)))].tolist())
            batch = store.read(ids, names)
            # then each is what was put
            for name in names:
                if isinstance(batch[name], Ragged):
                    assert [row.tobytes() for row in batch.ragged(name)] == [
                        singles[row].ragged(name)[0].tobytes() for row in ids.tolist()
                    ]
                for at in (0, len(ids) // 2, len(ids) - 1):
                    assert plain(batch.take([at])[name]) == plain(singles[int(ids[at])][name])
        # and with the rows goes the memory
        store.end(numbers.permutation(list(wanted)))
        assert (store.arena.blocks, store.places.live_bytes, store.places.segments_of("p")) == (0, 0, set())
    finally:
        STORES.pop().close()
        shared.close()


def test_columns_written_apart_in_any_company(directory: Path) -> None:
    # given rows that got a and b together, apart, and in another order
    store = Store(directory)
    ids = store.put({"x": np.arange(60)})
    store.complete(ids[:20], {"a": np.arange(20) * 1.5, "b": [[int(i)] * int(i % 3) for i in range(20)]})
    store.complete(ids[20:40], {"b": [[int(i)] * int(i % 3) for i in range(20, 40)]})
    store.complete(ids[40:], {"b": [[int(i)] * int(i % 3) for i in range(40, 60)], "a": np.arange(40, 60) * 1.5})
    store.complete(ids[20:40], {"a": np.arange(20, 40) * 1.5})
    for order in (ids, ids[::-1], ids[::3], np.random.default_rng(0).permutation(ids)):
        # when
        batch = store.read(order, ("b", "a", "x"))
        # then
        assert batch.array("a").tolist() == (order * 1.5).tolist()
        assert batch.array("x").tolist() == order.tolist()
        assert [row.tolist() for row in batch.ragged("b")] == [[i] * (i % 3) for i in order.tolist()]


def test_rows_that_got_nothing_for_long_find_what_they_get_at_last(directory: Path) -> None:
    # given so many rows that the front of the list was forgotten, where nothing lay
    store = Store(directory)
    store.rows = 5000
    for _ in range(20):
        store.end(store.put({"x": np.zeros(500)}))
    kept = store.put({"x": np.arange(3.0)})
    # when
    store.complete(np.array([7, 3]), {"x": np.array([70.0, 30.0])})
    # then
    assert store.read(np.array([3, 7]), ("x",)).array("x").tolist() == [30.0, 70.0]
    assert store.read(kept, ("x",)).array("x").tolist() == [0.0, 1.0, 2.0]
    store.end(np.array([3, 7, 1, *kept]))
    assert store.arena.blocks == 0


def test_what_lies_together_is_a_view_and_the_rest_is_not(directory: Path) -> None:
    store = Store(directory, 1 << 20)
    one, two = (store.put({"x": np.arange(5000.0) + n}) for n in range(2))
    view, copy = store.read(one[10:2000], ("x",)), store.read(np.concatenate([one, two]), ("x",))
    used = store.arena.nbytes
    store.end(one)
    store.end(two)
    for _ in range(30):
        store.end(store.put({"x": np.full(5000, -1.0)}))
    assert view.array("x").tolist() == list(range(10, 2000))
    assert copy.array("x")[4999:5001].tolist() == [4999.0, 1.0]
    assert store.arena.nbytes <= used + (1 << 20)
    assert not view.array("x").flags.writeable
    assert not copy.array("x").flags.writeable


@pytest.mark.parametrize("rows", [1, 3000, 0])
def test_a_late_reader_gets_lease_lost(directory: Path, rows: int) -> None:
    # given where rows lie: one small block, a large one, or many
    store = Store(directory)
    parts = [store.put({"x": np.arange(float(rows or 2)), "t": ["a"] * (rows or 2)}) for _ in range(1 if rows else 9)]
    ids = np.concatenate(parts)
    located = store.places.locate(ids, ("x", "t"))
    # when they end, and when their memory is used again
    store.end(parts[-1])
    for _ in range(2):
        with pytest.raises(LeaseLost, match="used again"):
            store.take(located, ids)
        store.put({"x": np.full(rows or 2, -1.0), "t": ["b"] * (rows or 2)})
    # then the others are there, and what holds nothing holds nothing up
    if len(parts) > 1:
        assert store.read(np.concatenate(parts[:-1]), ("t",)).texts("t") == ["a"] * 16


def test_pages_that_were_given_back_do_not_come_back_through_a_late_reader(directory: Path) -> None:
    # given located rows, and a segment whose other pages were given back
    store = Store(directory, 1 << 20)
    ids = [store.put({"x": np.full(6000, float(n))}) for n in range(20)]
    located = store.places.locate(np.concatenate(ids), ("x",))
    few = np.concatenate([ids[3], ids[11][::2]])
    for n, each in enumerate(ids):
        if n not in (3, 11):
            store.end(each)
    store.arena._shrink(0)
    held = sum(path.stat().st_blocks * 512 for path in directory.glob("s*"))
    assert held == store.arena.nbytes < 200_000
    # when
    with pytest.raises(LeaseLost):
        store.take(located, np.concatenate(ids))
    batch = store.read(few, ("x",))
    # then
    assert batch.array("x").tolist() == [3.0] * 6000 + [11.0] * 3000
    assert sum(path.stat().st_blocks * 512 for path in directory.glob("s*")) == held
    # and the rest is used again
    again = [store.put({"x": np.full(6000, float(n))}) for n in range(18)]
    assert store.read(np.concatenate(again), ("x",)).array("x")[::6000].tolist() == list(range(18))


def test_a_writer_stopped_while_it_takes_memory_back_holds_up_nobody(directory: Path) -> None:
    # given a writer that was stopped with its locks in hand: on a block that ended, and to give pages back
    store = Store(directory, 1 << 20)
    parts = [store.put({"x": np.full(3000, float(n))}) for n in range(5)]
    located = store.places.locate(parts[2], ("x",))
    store.end(parts[2])
    _, start, _, _, nbytes, _ = np.frombuffer(located[0].blocks, np.int64).tolist()
    fd = os.open(directory / "s1-1", os.O_RDWR)
    assert try_lock(fd, start, start + nbytes, exclusive=True)
    assert try_lock(fd, COPYING, COPYING + 1, exclusive=True)
    # when
    rest = np.concatenate([*parts[:2], *parts[3:]])
    (everything,) = store.places.locate(rest, ("x",))
    held = store.reader.hold(everything)
    # then rows that live are read, viewed and held; those that ended are not
    assert store.read(rest, ("x",)).array("x")[::3000].tolist() == [0.0, 1.0, 3.0, 4.0]
    assert store.read(parts[3], ("x",)).array("x")[5] == 3.0
    with pytest.raises(LeaseLost):
        store.take(located, parts[2])
    with pytest.raises(LeaseLost):
        store.reader.hold(located[0])
    # and what is held stays, though it ends
    os.close(fd)
    store.end(rest)
    for _ in range(5):
        store.put({"x": np.full(3000, -1.0)})
    assert store.take((everything,), rest).array("x")[::3000].tolist() == [0.0, 1.0, 3.0, 4.0]
    for hold in held:
        hold.close()
    store.put({"x": np.full(3000, -1.0)})
    with pytest.raises(LeaseLost):
        store.take((everything,), rest)


def test_readers_see_whole_rows_or_none_while_a_writer_uses_memory_again(directory: Path) -> None:
    # given a process that reads what it is told while the rows end, one small block at a time
    store = Store(directory)
    numbers = np.random.default_rng(0)
    with Child(read_while_it_changes, str(directory)) as child:
        stop = threading.Event()

        def churn() -> None:
            alive: list[Any] = []
            while not stop.is_set():
                value = int(numbers.integers(1, 200))
                rows = int(numbers.integers(1, 4))
                alive.append(store.put({"x": np.full(rows, value), "r": [np.full(value * 4, value)] * rows}))
                if len(alive) > 40:
                    store.end(alive.pop(0))
                if len(alive) == 40 and not value % 8:
                    (located,) = store.places.locate(np.concatenate(alive[:: -1 if value % 3 else 1]), ("x", "r"))
                    child.say(msgspec.msgpack.encode(located).hex())
                    stop.wait(0.004 * numbers.random())  # not so fast that the reader only ever comes too late

        writer = threading.Thread(target=churn)
        writer.start()
        # when it has read a few hundred times
        try:
            seen = child.hear()
        finally:
            stop.set()
            writer.join(60)
            child.say("end")
        # then every reading was right or refused
        assert seen["wrong"] == []
        assert seen["right"] + seen["lost"] == 300
        assert seen["right"] > 0


@pytest.mark.parametrize("seed", range(3))
def test_damaged_blocks_never_crash_a_reader(directory: Path, seed: int) -> None:
    # when a process reads blocks in which bytes were changed at random, headers and offsets above all
    with Child(read_damaged, str(directory), seed, 1500) as child:
        outcome = child.hear()
        assert child.wait() == 0
    # then each time it got values or an error of ours
    assert outcome["strange"] == []
    assert outcome["refused"] > 100
    assert outcome["read"] > 100


@pytest.mark.parametrize(
    "change",
    [
        (2, 5), (2, -1), (3, 0), (3, 1 << 60), (4, 64), (4, 1 << 62),  # rows, columns, bytes
        (5, 0), (5, 65), (5, -64), (5, 1 << 62), (6, -8), (6, 1 << 62), (6, 8), (7, 64), (7, 1 << 62),  # of x
        (8, 0), (8, 65), (8, 1 << 62), (9, -8), (9, 1 << 62), (9, 1 << 20), (9, 8),  # values of r
        (10, -1), (10, 64), (10, 1 << 62), (10, 1 << 10), (10, -(1 << 63)), (10, 193),  # offsets of r
    ],
)  # fmt: skip
def test_a_header_that_does_not_fit_is_a_clear_error(directory: Path, change: tuple[int, int]) -> None:
    # given a word of a header that says something else, and many values behind, so that much could be read
    store = Store(directory)
    values = {"x": np.arange(3.0), "r": [np.arange(3), np.arange(1), np.arange(1)]}
    ids, more = store.put(values), store.put(values)
    store.put({"x": np.full(1000, 1 << 40, np.int64)})
    for each in (ids, np.concatenate([ids, more])):
        located = store.places.locate(each, ("x", "r"))
        start = np.frombuffer(located[0].blocks, np.int64)[1]
        with open(directory / "s1-1", "r+b") as file:
            file.seek(start + 8 * change[0])
            file.write(int(change[1]).to_bytes(8, "little", signed=True))
        # when / then
        with pytest.raises(SchemaError, match="damaged"):
            store.take(located, each)


@pytest.mark.parametrize(
    ("at", "offset"), [(0, -8), (0, 4), (1, 9), (2, 1), (3, 6), (3, 1 << 40), (3, 1 << 62), (1, -(1 << 62))]
)
def test_offsets_that_do_not_fit_are_a_clear_error(directory: Path, at: int, offset: int) -> None:
    store = Store(directory)
    values = {"r": [np.arange(3), np.arange(1), np.arange(1)]}
    parts = [store.put(values) for _ in range(3)]
    located = store.places.locate(parts[0], ("r",))
    start = int(np.frombuffer(located[0].blocks, np.int64)[1])
    with open(directory / "s1-1", "r+b") as file:
        file.seek(start + 64 + 64 + 8 * at)
        assert file.read(8) == [0, 3, 4, 5][at].to_bytes(8, "little")
        file.seek(start + 64 + 64 + 8 * at)
        file.write(offset.to_bytes(8, "little", signed=True))
    for ids in (parts[0], np.concatenate(parts)):
        with pytest.raises(SchemaError, match="damaged|offsets"):
            store.read(ids, ("r",)).ragged("r")
    # and the others are as they were
    assert [row.tolist() for row in store.read(np.concatenate(parts[1:]), ("r",)).ragged("r")] == [
        [0, 1, 2],
        [0],
        [0],
    ] * 2


def test_a_block_must_be_of_the_schema(directory: Path) -> None:
    store = Store(directory)
    ids = store.put({"x": np.arange(3.0)})
    for spec in (
        ColumnSpec("fixed", "float32"), ColumnSpec("ragged", "float64"), ColumnSpec("fixed", "float64", (2,)),
        ColumnSpec("text", "uint8"), ColumnSpec("fixed", "float64", (1 << 62,)),
    ):  # fmt: skip
        store.schema["x"] = spec
        with pytest.raises(AsyncFlowError, match="'x'"):
            store.read(ids, ("x",))
