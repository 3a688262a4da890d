"""A key names one put: repeated it adds nothing, other rows under it are refused, and what was lost of it comes again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from queue_runs import Served, memory_of, running, runs_over

import asyncflow_sdk as af
from asyncflow_sdk.errors import SchemaError
from asyncflow_sdk.types import Ragged

pytestmark = pytest.mark.fast
run = runs_over("ipc")
ROWS: dict[str, Any] = {
    "x": np.arange(6.0).reshape(3, 2), "text": ["a", "", "b"], "ids": [[1], [2, 3], []], "half": np.float16([1, 2, 3]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"x": np.array([[0, 1], [2, 3], [4, 5 + 1e-9]])}, "other values in column 'x'"),
        ({"text": ["a", "b", ""]}, "other values in column 'text'"),  # the same letters, of other rows
        ({"text": [b"a", b"", b"b"]}, "other values in column 'text'"),
        ({"ids": [[1, 2], [3], []]}, "other values in column 'ids'"),
        ({"half": np.int16([15360, 16384, 16896])}, "other values in column 'half'"),  # the same bytes of another type
        ({"x": np.zeros((3, 2)), "text": ["", "", ""]}, "other values in column 'x'; other values in column 'text'"),
        ({"more": [1, 2, 3]}, "columns half, ids, more, text, x instead of half, ids, text, x"),
    ],
    ids=str,
)  # fmt: skip
def test_a_key_with_other_values_is_refused_and_says_of_which_column(
    run: Served, change: dict[str, Any], differs: str
) -> None:
    queue = run.queue()
    first = queue.put(ROWS, key="epoch-0")
    with pytest.raises(
        SchemaError, match=rf"key 'epoch-0' names another put, of rows 0 to 2: this one has {differs}\. N"
    ):
        queue.put(ROWS | change, key="epoch-0")
    assert queue.audit().put == 3
    again = queue.put(dict(reversed(ROWS.items())), key="epoch-0")
    assert (again.first, again.count, again.again) == (first.first, 3, True)


def test_a_key_with_another_number_of_rows_group_size_or_partition_is_refused(run: Served) -> None:
    queue = run.queue()
    queue.put({"x": [1, 2, 3, 4]}, key="epoch-0")
    for rows, options, differs in [
        ([1, 2, 3], {}, "3 entries instead of 4"),
        ([1, 2, 3, 4], {"group_size": 2}, "group_size=2 instead of 1"),
        ([1, 2], {"group_size": 2}, "group_size=2 instead of 1; 2 entries instead of 4"),
        ([1, 2, 3, 4], {"partition": "eval"}, "partition 'eval' instead of ''"),
    ]:
        with pytest.raises(SchemaError, match=f"key 'epoch-0' .*: this one has {differs}. Nothing was put"):
            queue.put({"x": rows}, key="epoch-0", **options)
    assert queue.audit().put == 4


@pytest.mark.parametrize("kind", ["ipc", "remote"])
def test_the_same_values_are_the_same_however_they_lie(kind: str) -> None:
    rows = np.arange(24.0).reshape(4, 6)
    with running(kind) as run:
        queue = run.queue()
        queue.put({"x": rows, "y": Ragged.of([[1], [2, 3], [4], []])}, key="k")
        for same in (np.asfortranarray(rows), np.repeat(rows, 2, axis=0)[::2], rows[::-1][::-1], rows.astype(">f8")):
            assert queue.put({"y": [np.array([1]), [2, 3], [4], np.empty(0, int)], "x": same}, key="k").again


@pytest.mark.parametrize("kind", ["ipc", "remote"])
def test_what_was_put_under_a_key_is_known_to_every_server_that_comes_back(tmp_path: Path, kind: str) -> None:
    for start in range(4):  # the first keeps it in its journal, the second in a snapshot
        with running(kind, tmp_path / "run", durability="process") as run:
            queue = run.queue()
            if not start:
                queue.put(ROWS, key="epoch-0")
            with pytest.raises(SchemaError, match="other values in column 'x'"):
                queue.put(ROWS | {"x": np.zeros((3, 2))}, key="epoch-0")
            assert queue.put(ROWS, key="epoch-0").again
            assert queue.audit().put == 3
            if start == 3:
                queue.end(cancel=True)


class Halves:
    """A durable run into which four prompts in groups of two were put. A worker, ``answerer``, has answered half of them."""

    def __init__(self, path: Path) -> None:
        self.path, self.prompts = path, {"x": np.arange(4.0) * np.pi}
        self.run = af.serve(path, durability="process")
        self.queue = self.run.queue
        self.queue.declare("answer", needs=["x"], gives=["y"])
        self.queue.declare("end", needs=["y"])
        self.put()
        with af.connect(self.run.address) as worker:
            batch = worker.queue.get("answer", 4)
            batch.complete({"y": batch.array("x") + 1})
            self.answerer = worker.session

    def put(self) -> tuple[int, int, bool]:
        rows = self.queue.put(self.prompts, group_size=2, key="epoch-0")
        return rows.first, rows.count, rows.again

    def come_back_without(self, session: int | str) -> None:
        """The run is closed, the shared memory of a session is lost, and the run is served again."""
        memory = memory_of(self.run.addresses)
        self.run.close()
        found = list(memory.glob(f"s{session}-*"))
        assert found
        for path in found:
            path.unlink()
        self.run = af.serve(self.path)
        self.queue = self.run.queue

    def close(self) -> None:
        self.queue.end(cancel=True)
        self.run.close()


def test_rows_that_were_lost_are_named_with_their_put_and_come_again_with_it(tmp_path: Path) -> None:
    run = Halves(tmp_path / "run")
    # when what the worker wrote is lost, in two of four groups of a put
    run.come_back_without(run.answerer)
    # then they are named
    (letter,) = run.queue.failed()
    assert (letter.key, letter.place, letter.first, letter.rows, letter.task) == ("epoch-0", 0, 0, 4, "")
    assert letter.reasons == ("payload lost",)
    # and the same put adds them, and only them, in whole groups
    assert run.put() == (8, 4, False)
    assert run.put() == (0, 8, True)
    batch = run.queue.get("answer", 100)
    wanted = np.repeat(run.prompts["x"], 2)[[4, 5, 6, 7, 0, 1, 2, 3]].tolist()
    found = dict(zip(batch.ids.tolist(), batch.array("x").tolist(), strict=True))
    assert found == dict(zip(range(4, 12), wanted, strict=True))
    assert batch.groups.tolist() == [4, 4, 6, 6, 8, 8, 10, 10]
    audit = run.queue.audit()
    assert (audit.put, audit.failed, audit.live) == (12, 4, 8)
    # and another put may not take the key meanwhile
    with pytest.raises(SchemaError, match="other values in column 'x'"):
        run.queue.put({"x": np.zeros(4)}, group_size=2, key="epoch-0")
    run.close()


def test_what_came_again_may_be_lost_again_with_all_the_rest(tmp_path: Path) -> None:
    run = Halves(tmp_path / "run")
    run.queue.put({"x": [1.0, 2.0]}, group_size=2, partition="eval")
    run.come_back_without(run.answerer)
    assert run.put() == (12, 4, False)
    # when everything is lost, rows that came again and rows without a key included
    run.come_back_without("*")
    # then the whole put is named, and comes again whole
    letters = run.queue.failed()
    assert [(each.key, each.place, each.first, each.rows, each.partition) for each in letters] == [
        ("epoch-0", 0, 0, 4, ""), ("epoch-0", 2, 4, 4, ""), ("", -1, 8, 4, "eval"), ("epoch-0", 0, 12, 4, ""),
    ]  # fmt: skip
    assert run.put() == (16, 8, False)
    assert run.queue.get("answer", 100).array("x").tolist() == np.repeat(run.prompts["x"], 2).tolist()
    assert run.queue.cancel(key="epoch-0") == 8
    audit = run.queue.audit()
    assert (audit.put, audit.failed, audit.cancelled, audit.live) == (24, 16, 8, 0)
    run.close()
