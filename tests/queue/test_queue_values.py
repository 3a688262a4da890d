"""Values read are bit-identical to values written, however the rows were put together and are taken."""

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_runs import KINDS, Served, running, runs_over

from asyncflow_sdk.types import Batch, Ragged, from_torch

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


run = runs_over(*KINDS)


def plain(value: Any) -> Any:
    """Something that is equal only when every bit is."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Ragged):
        return value.values.dtype.str, [row.tobytes() for row in value], value.values.shape[1:]
    return list(value)


def test_very_many_rows_in_one_put(run: Served) -> None:
    # given columns of every kind, one of a byte a row
    queue = run.queue()
    n = 20_000
    lengths = np.arange(n) % 5
    columns = {
        "flag": np.arange(n) % 3 == 0,
        "x": np.random.default_rng(0).random((n, 2)).astype(np.float32),
        "ids": Ragged.from_lengths(np.arange(lengths.sum(), dtype=np.int32), lengths),
        "name": [f"row {i}" for i in range(n)],
    }
    queue.declare("read", needs=list(columns))
    # when
    queue.put(columns)
    with queue.get("read", n) as batch:
        # then
        assert batch.ids.tolist() == list(range(n))
        for name, value in columns.items():
            assert plain(batch[name]) == plain(value)
        batch.ack()


def test_rows_put_one_at_a_time_and_taken_by_the_hundreds(run: Served) -> None:
    # given
    queue = run.queue()
    queue.declare("read", needs=["x", "ids", "t"])
    numbers = np.random.default_rng(0)
    rows = [
        (numbers.random(), numbers.integers(0, 9, int(numbers.integers(0, 7))).astype(np.int32), f"{i}\u00e9")
        for i in range(400)
    ]
    # when
    for x, ids, text in rows:
        queue.put({"x": np.array([x]), "ids": [ids], "t": [text]})
    # then they come in order
    taken = 0
    while taken < len(rows):
        with queue.get("read", 256) as batch:
            wanted = rows[taken : taken + batch.rows]
            assert batch.ids.tolist() == list(range(taken, taken + batch.rows))
            assert batch.array("x").tolist() == [row[0] for row in wanted]
            assert [row.tobytes() for row in batch.ragged("ids")] == [row[1].tobytes() for row in wanted]
            assert batch.texts("t") == [row[2] for row in wanted]
            taken += batch.rows
            batch.ack()


def test_every_dtype_of_torch_through_a_queue(run: Served) -> None:
    # given a column for each, of random bits
    names = sorted({str(d).removeprefix("torch.") for d in vars(torch).values() if type(d) is torch.dtype})
    names = [name for name in names if not name.startswith("q")]
    raw = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (3, 32), np.uint8))
    tensors = {name: (raw % 2 if name == "bool" else raw).view(getattr(torch, name)) for name in names}
    queue = run.queue()
    queue.declare("read", needs=names)
    # when
    queue.put(tensors)
    batch = queue.get("read", 3)
    # then
    assert len(names) > 30
    for name, tensor in tensors.items():
        found = batch.torch(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found.contiguous().view(torch.uint8), raw % 2 if name == "bool" else raw), name
        assert batch.array(name).tobytes() == from_torch(tensor).tobytes()


def test_torch_writes_reach_nobody_and_lie_in_shared_memory(run: Served) -> None:
    # given two consumers of the same rows
    queue = run.queue()
    for task in ("one", "two"):
        queue.declare(task, needs=["x", "r"])
    queue.put({"x": np.arange(2000.0), "r": [np.arange(i % 4, dtype=np.int64) for i in range(2000)]})
    one, two = queue.get("one", 2000), queue.get("two", 2000)
    # when
    x, (r, seqlens) = one.torch("x"), one.torch("r")
    x.mul_(2).add_(1)
    r.fill_(-1)
    seqlens.zero_()
    # then
    for batch in (one, two):
        assert batch.array("x").tolist() == list(range(2000))
        assert batch.ragged("r").values.tolist() == [v for i in range(2000) for v in range(i % 4)]
        assert batch.torch("x").tolist() == list(range(2000))
    assert x[1999] == 3999
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(run.memory) in line]
    spans = [tuple(int(part, 16) for part in line.split()[0].split("-")) for line in maps if " rw-p " in line]
    for tensor in (x, r):
        assert any(low <= tensor.data_ptr() < high for low, high in spans) == run.shares_memory


@pytest.mark.parametrize("rows", [1, 63, 1000, 60_000])
def test_narrow_columns_at_the_end_of_a_segment(rows: int) -> None:
    # given a block of one byte a row that ends where its segment of 8 MiB ends
    with running() as run:
        queue = run.queue()
        queue.declare("read", needs=["flag"])
        queue.put({"first": np.zeros(1, np.uint8)})  # 128 bytes: a header and a line
        queue.put({"other": np.zeros((1, (8 << 20) - 256 - -(-rows // 64) * 64), np.uint8)})
        flags = np.arange(rows) % 7 == 0
        queue.put({"flag": flags})
        # when / then
        assert len(list(run.memory.glob("s*"))) == 1
        assert queue.get("read", rows).array("flag").tobytes() == flags.tobytes()


OPAQUE = np.dtype([("re", np.float16), ("im", np.float16)])
DTYPES = [np.dtype(d) for d in (np.bool_, np.int8, np.int16, np.float32, np.int64, np.complex128)]
DTYPES += [np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn), OPAQUE]


def random_columns(numbers: np.random.Generator, rows: int, dtypes: list[Any], shapes: list[Any]) -> dict[str, Any]:
    """A fixed and a ragged column of each dtype, of random bits, and text and bytes."""
    made: dict[str, Any] = {}
    for number, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True)):
        lengths = numbers.integers(0, 6, rows) * numbers.integers(0, 2, rows) * (1 + 40 * numbers.integers(0, 2))
        for name, count in ((f"fixed{number}", rows), (f"ragged{number}", int(lengths.sum()))):
            raw = numbers.integers(0, 2 if dtype.kind == "b" else 256, (count, *shape, dtype.itemsize), np.uint8)
            made[name] = raw.view(dtype).reshape(count, *shape) if raw.size else np.empty((count, *shape), dtype)
        made[f"ragged{number}"] = Ragged.from_lengths(made[f"ragged{number}"], lengths)
    made["text"] = ["\u00fc" * int(n) for n in numbers.integers(0, 9, rows)]
    made["bytes"] = [bytes(int(n)) for n in numbers.integers(0, 900, rows)]
    return made


@settings(max_examples=200 if LONG else 30)
@given(
    seed=st.integers(0, 1 << 30),
    sizes=st.lists(st.sampled_from([1, 1, 1, 2, 3, 30]), min_size=1, max_size=10),
    shapes=st.lists(st.sampled_from([(), (3,), (2, 2), (0,)]), min_size=1, max_size=3),
    group_size=st.sampled_from([1, 1, 3]),
    kind=st.sampled_from(KINDS),
)
def test_any_rows_of_any_blocks_in_any_order_are_the_loop(
    seed: int, sizes: list[int], shapes: list[Any], group_size: int, kind: str
) -> None:
    # given rows in several blocks, some of which have ended
    numbers = np.random.default_rng(seed)
    dtypes = [DTYPES[int(numbers.integers(len(DTYPES)))] for _ in shapes]
    wanted: dict[int, Batch] = {}
    with running(kind) as run:
        queue = run.queue()
        for size in sizes:
            made = random_columns(numbers, size, dtypes, shapes)
            rows, singles = queue.put(made, group_size=group_size), Batch.of(made)
            wanted |= {rows.first + at: singles.take([at // group_size]) for at in range(rows.count)}
            if numbers.random() < 0.2:
                gone = numbers.permutation(list(wanted))[: len(wanted) // 3]
                queue.cancel(gone)
                gone = {int(row) // group_size for row in gone}
                wanted = {row: one for row, one in wanted.items() if row // group_size not in gone}
        queue.declare("read", needs=list(made))
        if not wanted:
            return
        # when some columns are read of all that come, in some order
        batch = queue.get("read", len(wanted), at_least=len(wanted))
        for at in numbers.permutation(batch.rows):
            batch.give_back(index=[at])
        left = set(wanted)
        while left:
            names = numbers.permutation(list(made))[: 1 + int(numbers.integers(len(made)))].tolist()
            batch = queue.get("read", 1 + int(numbers.integers(12)), columns=names)
            # then each row equals what was put
            for at, row in enumerate(batch.ids.tolist()):
                one = batch.take([at])
                for name in names:
                    assert plain(one[name]) == plain(wanted[row][name])
            left -= set(batch.ids.tolist())
            batch.ack()
        # and with the rows goes what they took
        assert queue.status().payload_bytes == 0


def test_columns_that_rows_got_in_different_company(run: Served) -> None:
    # given rows whose columns a, b, c were written together, apart, and in another order
    queue = run.queue()
    queue.declare("ab", needs=["x"], gives=["a", "b"])
    queue.declare("c", needs=["a"], gives=["c"])
    queue.declare("read", needs=["a", "b", "c", "x"])
    queue.put({"x": np.arange(9)})
    batch = queue.get("ab", 9)
    batch.complete({"a": [0.0] * 3, "b": ["0", "1", "2"]}, index=[0, 1, 2])
    batch.complete({"b": ["3", "4"], "a": [0.0] * 2}, index=[3, 4])
    batch.complete({"a": [0.0] * 4, "b": ["8", "7", "6", "5"]}, index=[8, 7, 6, 5])
    queue.put({"x": np.array([9, 10])})
    batch = queue.get("ab", 2)
    batch.complete({"a": [9.0, 10.0], "b": ["9", "10"], "d": [1, 2]})
    while True:
        batch = queue.get("c", 4)
        batch.complete({"c": [[int(i)] * int(i % 3) for i in batch.ids]})
        if 10 in batch.ids:
            break
    # when
    with queue.get("read", 11) as batch:
        # then
        ids = batch.ids.tolist()
        assert sorted(ids) == list(range(11))
        assert batch.texts("b") == [str(i) for i in ids]
        assert batch.array("x").tolist() == ids
        assert batch.array("a").tolist() == [float(i) if i > 8 else 0.0 for i in ids]
        assert [row.tolist() for row in batch.ragged("c")] == [[i] * (i % 3) for i in ids]
        # and torch too, though nothing of it lies together
        assert batch.torch("x").tolist() == ids
        batch.ack()


def test_rows_of_a_group_share_what_was_put_once(run: Served) -> None:
    # given
    queue = run.queue()
    queue.declare("read", needs=["p"])
    queue.put({"p": [[1, 2], [3]]}, group_size=4)
    # when
    batch = queue.get("read", 8)
    # then
    assert batch.groups.tolist() == [0] * 4 + [4] * 4
    assert [row.tolist() for row in batch.ragged("p")] == [[1, 2]] * 4 + [[3]] * 4
