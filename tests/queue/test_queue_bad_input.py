"""What a caller can get wrong: each gets an error that says what, where and what to do, and nothing else happens."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from queue_runs import Served, running

from asyncflow_sdk.errors import ConfigError, DeadlineExceeded, MemoryFull, SchemaError
from asyncflow_sdk.interfaces import TransferQueue
from asyncflow_sdk.types import Batch, Ragged


@pytest.fixture(scope="module")
def run() -> Iterator[Served]:
    with running() as run:
        yield run


@pytest.fixture(scope="module")
def queue(run: Served) -> TransferQueue:
    queue = run.queue()
    queue.declare("work", needs=["x"], gives=["y"], max_attempts=10_000)
    queue.declare("end", needs=["y"])
    queue.put({"x": np.array([1.0, 2.0, 3.0])})
    return queue


def unharmed(queue: TransferQueue) -> None:
    """The three rows are there, and nothing else."""
    assert queue.audit().put == 3
    with queue.get("work", 9) as batch:
        assert batch.array("x").tolist() == [1, 2, 3]
        batch.give_back()


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"x": [1.0], "z": [1.0, 2.0]}, r"different numbers of rows: \{'x': 1, 'z': 2\}"),
        ({}, "a put needs rows"),
        ({"x": np.zeros(0)}, "a put needs rows"),
        ({"x": []}, "a put needs rows"),
        ({"x": np.float64(1)}, "column 'x': a float64 is not a column|column 'x': a single number"),
        ({"x": np.array(1.0)}, "column 'x': a single number is not a column; give one entry a row"),
        ({"x": np.array([{}, {}])}, r"column 'x' is fixed float64\[\]; it cannot take json"),
        ({"x": np.array([1, None])}, "column 'x': entry 1 is None"),
        ({"x": [object()]}, "column 'x': entry 0 is of type object; a column has one number, array of numbers, text, bytes"),
        ({"x": ["a", 1]}, "column 'x': entries of different types are mixed: int, str"),
        ({"x": ["a", b"a"]}, "column 'x': entries of different types are mixed: bytes, str"),
        ({"x": [1, [2]]}, "column 'x': single numbers and arrays are mixed"),
        ({"x": [[1], [[2]]]}, r"column 'x': row 1 has shape \(1, 1\)"),
        ({"x": [[1], [1.5]]}, "column 'x': rows have different dtypes: .*float64.*int64"),
        ({"x": ["\ud800"]}, "column 'x': text that is not valid Unicode"),
        ({"x": "abc"}, "column 'x': a str is not a column; give a sequence with one entry a row"),
        ({"x": {"a": 1}}, "column 'x': a dict is not a column"),
        ({"x": iter([1])}, "column 'x': a list_iterator is not a column"),
        ({"x": np.array(["2020-01-01"], "M8[D]")}, r"column 'x': numpy dtype datetime64\[D\] cannot be stored"),
        ({"x": np.zeros(2, [("a", "i4")])}, "column 'x': numpy dtype .* cannot be stored"),
        ({"x": np.longdouble([1.0])}, "column 'x': numpy dtype (float128|longdouble) cannot be stored"),
        ({"x": np.ma.masked_array([1.0], [True])}, "column 'x': a masked array cannot be stored: its mask would be lost"),
        ({"x": [2**70]}, "column 'x'.*(integers|does not fit 64 bits)"),
        ({"x": torch.zeros(2).to_sparse()}, "column 'x': a torch.sparse_coo tensor of float32 cannot be stored"),
        ({"x": torch.zeros(2, device="meta")}, "column 'x': a tensor of float32 on the meta device holds no values"),
        ({"x": [1]}, r"column 'x' is fixed float64\[\]; it cannot take fixed int64\[\]"),
        ({"x": [[1.0]]}, r"column 'x' is fixed float64\[\]; it cannot take ragged float64\[n\]"),
        ({"x": np.zeros((1, 2))}, r"column 'x' is fixed float64\[\]; it cannot take fixed float64\[2\]"),
        ({"x": ["text"]}, r"column 'x' is fixed float64\[\]; it cannot take text"),
        ({5: [1.0]}, "a column cannot be named 5: use 1 to 100 letters of A-Z and a-z, digits,"),
        ({"": [1.0]}, "a column cannot be named ''"),
        ({"\ud800": [1.0]}, r"a column cannot be named '\\ud800'"),
        ({"a b": [1.0]}, "a column cannot be named 'a b'"),
        ({"a\n": [1.0]}, "a column cannot be named 'a.n'"),
        ({"0": [1.0]}, "a column cannot be named '0'.*starting with a letter or '_'"),
        ({"w@0": [1.0]}, "a column cannot be named 'w@0'"),
        ({"\xe4": [1.0]}, "a column cannot be named"),
        ({"n" * 101: [1.0]}, "a column cannot be named 'nnn"),
        ([("x", [1.0])], "columns must be a dict of columns by name, not a list"),
        ("x", "columns must be a dict of columns by name, not a str"),
        ({f"c{i}": [1] for i in range(70)}, "at most 64 columns; 'c.*' is one too many"),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value)),
)  # fmt: skip
def test_columns_that_are_none(queue: TransferQueue, columns: Any, error: str) -> None:
    with pytest.raises(SchemaError, match=error):
        queue.put(columns)
    unharmed(queue)


@pytest.mark.parametrize(
    ("arguments", "kind", "error"),
    [
        ({"group_size": 0}, SchemaError, "1 groups of 0"),
        ({"group_size": -3}, SchemaError, "1 groups of -3"),
        ({"group_size": 10**7}, SchemaError, "1 groups of 10000000 rows exceed the largest put, 4,194,304 rows"),
        ({"group_size": 2**62}, SchemaError, "exceed the largest put"),
        ({"group_size": 2**64}, SchemaError, "group_size is beyond 64 bits"),
        ({"group_size": 1.0}, TypeError, "group_size must be int, not float: 1.0"),
        ({"group_size": "2"}, TypeError, "group_size must be int, not str: '2'"),
        ({"group_size": True}, TypeError, "group_size must be int, not bool"),
        ({"key": 5}, TypeError, "key must be str, not int: 5"),
        ({"key": "\ud800"}, SchemaError, "key: text that is not valid Unicode"),
        ({"partition": None}, TypeError, "partition must be str, not NoneType"),
        ({"partition": "*"}, SchemaError, '"\\*" is no partition'),
        ({"priority": 2**40}, SchemaError, "a priority is an int32"),
        ({"timeout_s": float("nan")}, SchemaError, "timeout_s is not a number"),
        ({"timeout_s": "1"}, TypeError, "timeout_s must be float or int, not str: '1'"),
    ],
)
def test_a_put_with_arguments_that_make_no_sense(
    queue: TransferQueue, arguments: Any, kind: type[Exception], error: str
) -> None:
    with pytest.raises(kind, match=error):
        queue.put({"x": [4.0]}, **arguments)
    unharmed(queue)


@pytest.mark.parametrize(
    ("arguments", "kind", "error"),
    [
        ({"task": "no such"}, SchemaError, "no task 'no such'; declared: end, work"),
        ({"task": 5}, TypeError, "task must be str, not int: 5"),
        ({"task": None}, TypeError, "task must be str, not NoneType"),
        ({"count": 0}, SchemaError, "a lease needs a count of 1 or more, not 0"),
        ({"count": -1}, SchemaError, "a lease needs a count of 1 or more, not -1"),
        ({"count": 1.5}, TypeError, "count must be int, not float: 1.5"),
        ({"count": 2**64}, SchemaError, "count is beyond 64 bits"),
        (
            {"columns": ["no such"]},
            SchemaError,
            "task 'work' is not declared to need column 'no such'; it needs: 'x'",
        ),
        ({"columns": "x"}, SchemaError, r"'x' is one text: write \['x'\]"),
        ({"columns": [5]}, SchemaError, "a name is text of 1 to 1,000 characters, not 5"),
        ({"partition": "eval"}, SchemaError, "task 'work' takes no rows of partition 'eval', only of ''"),
        ({"at_least": 5}, SchemaError, "at_least is a number of rows up to 1, not 5"),
        ({"timeout_s": float("nan")}, SchemaError, "timeout_s is not a number"),
        ({"task": "end", "timeout_s": -5}, DeadlineExceeded, "3 rows lack column 'y'"),
    ],
)
def test_a_get_with_arguments_that_make_no_sense(
    queue: TransferQueue, arguments: Any, kind: type[Exception], error: str
) -> None:
    with pytest.raises(kind, match=error):
        queue.get(**{"task": "work", **arguments})
    unharmed(queue)


@pytest.mark.parametrize(
    ("arguments", "kind", "error"),
    [
        ({"name": ""}, SchemaError, "a task: a name is text of 1 to 1,000 characters, not ''"),
        ({"name": 5}, SchemaError, "a task: a name is text of 1 to 1,000 characters, not 5"),
        ({"name": "\ud800"}, SchemaError, "a task: text that is not valid Unicode"),
        ({"name": "n" * 1001}, SchemaError, "a task: a name is text of 1 to 1,000 characters"),
        ({"name": "work"}, ConfigError, "task 'work' is already declared as"),
        ({"needs": "x"}, SchemaError, r"needs is a list of names; 'x' is one text: write \['x'\]"),
        ({"gives": "xy"}, SchemaError, r"gives is a list of names; 'xy' is one text: write \['xy'\]"),
        ({"needs": "a, b"}, SchemaError, r"needs is a list of names; 'a, b' is one text: write \['a', 'b'\]"),
        ({"needs": None}, SchemaError, "needs is a list of names, not None"),
        ({"needs": [1]}, SchemaError, "needs: a column cannot be named 1: use 1 to 100 letters"),
        ({"gives": ["a/b"]}, SchemaError, "gives: a column cannot be named 'a/b'"),
        ({"gives": ["x"]}, ConfigError, "task 'new' needs column 'x' and gives it; leave it out"),
        ({"gives": ["y"]}, ConfigError, "task 'new' gives column 'y', and so does task 'work' for the same rows"),
        (
            {"needs": ["y"], "gives": ["x"]},
            ConfigError,
            "task 'new' needs 'y' of task 'work', task 'work' needs 'x' of task 'new'",
        ),
        ({"partitions": []}, ConfigError, "task 'new' takes the rows of no partition; name one"),
        ({"needs": [f"c{i}" for i in range(70)]}, SchemaError, "at most 64 columns"),
        ({"lease_s": 0.0}, ConfigError, "lease_s and max_attempts must be above 0"),
        ({"lease_s": -1}, ConfigError, "lease_s and max_attempts must be above 0"),
        ({"lease_s": float("nan")}, SchemaError, "lease_s is not a number"),
        ({"lease_s": "long"}, TypeError, "lease_s must be float or int, not str: 'long'"),
        ({"max_attempts": 0}, ConfigError, "lease_s and max_attempts must be above 0"),
        ({"batch_rows": 0}, ConfigError, "a step of 0 rows cannot fill"),
        ({"batch_rows": -4}, ConfigError, "a step of -4 rows cannot fill"),
        ({"admits": "yes"}, TypeError, "admits must be bool, not str: 'yes'"),
        ({"partitions": "eval"}, SchemaError, r"partitions is a list of names; 'eval' is one text"),
        ({"sampler": "no such"}, Exception, "no such"),
        ({"sampler": 5}, ConfigError, "a sampler is a name, or a pair of name and options, not 5"),
    ],
)
def test_a_task_that_makes_no_sense(queue: TransferQueue, arguments: Any, kind: type[Exception], error: str) -> None:
    with pytest.raises(kind, match=error):
        queue.declare(**{"name": "new", "needs": ["x"], **arguments})
    unharmed(queue)


# ---- what looks odd, and is right


@pytest.mark.parametrize("kind", ["ipc", "remote"])
def test_arrays_that_lie_anyhow_are_stored_as_what_they_say(kind: str) -> None:
    with running(kind) as run:
        _store_arrays_that_lie_anyhow(run.queue())


def _store_arrays_that_lie_anyhow(queue: TransferQueue) -> None:
    # given arrays behind strides, transposed, reversed, repeated, read-only and in a foreign byte order, small and large
    for rows in (4, 10_000):
        wanted = np.arange(rows * 6, dtype=np.float32).reshape(rows, 6)
        locked = wanted.copy()
        locked.flags.writeable = False
        odd: dict[str, Any] = {
            "steps": np.repeat(wanted, 2, axis=1)[:, ::2],
            "transposed": np.ascontiguousarray(wanted.T).T,
            "fortran": np.asfortranarray(wanted),
            "backwards": np.ascontiguousarray(wanted[::-1])[::-1],
            "locked": locked,
            "foreign": wanted.astype(">f4"),
            "tensor": torch.from_numpy(wanted.T.copy()).t(),
            "matrix": wanted.reshape(rows, 2, 3).transpose(0, 2, 1).transpose(0, 2, 1),
        }
        odd["repeated"] = np.broadcast_to(np.float32(7), (rows, 6))
        odd["ragged"] = Ragged(np.repeat(wanted[:, 0], 2)[::2], np.arange(rows + 1))
        # when
        queue.declare(f"read {rows}", needs=list(odd), partitions=(str(rows),))
        queue.put(odd, partition=str(rows))
        # then
        with queue.get(f"read {rows}", rows) as batch:
            for name in odd:
                if name == "ragged":
                    assert batch.ragged(name).values.tolist() == wanted[:, 0].tolist()
                elif name == "repeated":
                    assert (batch.array(name) == 7).all()
                    assert batch.array(name).shape == (rows, 6)
                else:
                    assert batch.array(name).tobytes() == wanted.tobytes(), name
                    assert batch.array(name).dtype == np.dtype("=f4")
            batch.ack()


def test_values_of_no_size_are_values() -> None:
    none = {"none": np.zeros((1, 0, 3), np.int16), "empty": [np.zeros((0, 2))], "text": [""]}
    with running() as run:
        queue = run.queue()
        queue.declare("read", needs=list(none))
        queue.put(none)
        batch = queue.get("read", 5)
        assert batch.array("none").shape == (1, 0, 3)
        assert batch.ragged("empty")[0].shape == (0, 2)
        assert batch.texts("text") == [""]
        assert batch.torch("none").shape == (1, 0, 3)


def test_a_batch_of_values_at_hand_takes_what_lies_anyhow() -> None:
    batch = Batch.of({"x": np.arange(12).reshape(3, 4).T, "r": [[1], [2, 3], [], [4]]})
    assert batch.torch("x").tolist() == np.arange(12).reshape(3, 4).T.tolist()
    assert batch.take([1, 3]).array("x").tolist() == [[1, 5, 9], [3, 7, 11]]


# ---- what is too large


def test_five_gigabytes_that_do_not_fit_are_refused_before_they_are_written() -> None:
    # given a queue of 100 MB, and columns of 5 GB that need no memory to be named
    with running(capacity_bytes=100_000_000) as run:
        queue = run.queue()
        queue.put({"x": np.array([1.0, 2.0, 3.0])})
        before = run.held_bytes()
        for column in (np.broadcast_to(np.uint8(1), (1, 5_000_000_000)), np.empty((5, 1_000_000_000), np.uint8)):
            # when
            with pytest.raises(SchemaError, match=r"5000000000 bytes exceeds capacity_bytes=100000000"):
                queue.put({"big": column})
            # then
            assert run.held_bytes() == before


def test_where_there_is_no_room_nothing_is_lost(queue: TransferQueue) -> None:
    # given a queue whose own limit is far away: what the file system cannot hold is refused by it
    queue.configure(capacity_bytes=1 << 60)
    batch = queue.get("work", 3)
    for write in (lambda big: queue.put({"big": big}), lambda big: batch.complete({"y": [1.0] * 3, "big": big})):
        # when
        with pytest.raises(MemoryFull, match="no room|No space|cannot"):
            write(np.broadcast_to(np.uint8(1), (3, 1 << 50)))
    # then
    batch.give_back()
    unharmed(queue)
