"""Verbs with whatever a caller may hand in: errors that can be caught come back, and nobody else notices.

``HYPOTHESIS_PROFILE=long pytest tests/queue/test_queue_fuzz.py`` looks longer.
"""

import asyncio
import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from queue_runs import running

from asyncflow_sdk.errors import AsyncFlowError
from asyncflow_sdk.interfaces import TransferQueue
from asyncflow_sdk.queue import AsyncTransferQueue
from asyncflow_sdk.types import Ragged

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"

TASKS = ("work", "train", "rollout", "end")
COLUMNS = ("x", "y", "z", "ids", "text")
ODD_NAMES: tuple[Any, ...] = (
    "",
    "no such",
    "*",
    "\0",
    "\ud800",
    "\u00e4" * 300,
    "a/../b",
    b"work",
    5,
    None,
    ("work",),
    1.5,
    True,
)
ODD_NUMBERS: tuple[Any, ...] = (
    0, -1, 2**31, 2**62, 2**63, 2**64, 10**30, -(2**63), 1.5, float("nan"), float("inf"), True, None, "3", b"3",
    np.int64(3), np.uint8(200), np.float32(2.0), [1], 3j,
)  # fmt: skip


class Hostile:
    """Something that fails when it is looked at."""

    def __len__(self) -> int:
        raise ValueError("no length")

    def __getitem__(self, at: Any) -> Any:
        raise ValueError("no items")

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise ValueError("no array")


def values_of(rows: int) -> st.SearchStrategy[Any]:
    """A column of ``rows`` rows, or something that is none."""
    plain: tuple[Any, ...] = (
        np.arange(rows, dtype=np.float64), np.arange(rows), np.zeros((rows, 2), np.float32),
        np.arange(rows).astype(ml_dtypes.bfloat16), np.full(rows, np.nan), np.arange(2 * rows)[::2],
        np.arange(rows, dtype=">f8"), np.zeros((rows, 0)), np.zeros((rows, 3)).T[:, :rows].T, np.arange(rows) > 0,
        [1.0] * rows, [[1, 2]] * rows, [[]] * rows, ["text"] * rows, [b"bytes"] * rows, [""] * rows,
        Ragged.from_lengths(np.arange(rows), np.ones(rows, np.int64)), np.zeros((rows, 0, 5)),
        np.broadcast_to(np.float32(1), (rows, 7)), tuple(range(rows)), np.float16([0.5] * rows),
    )  # fmt: skip
    odd: tuple[Any, ...] = (
        np.arange(rows).astype(object), np.array(["a"] * rows), np.array(5), np.zeros(rows, "M8[s]"),
        np.zeros(rows, [("a", "i4"), ("b", "f8")]), np.zeros(rows + 1), [None] * rows, [{}] * rows, "text", b"bytes", 5, None,
        {"a": 1}, set(range(rows)), ["\ud800"] * rows, ["a", 1] * rows, [1, [2]] * rows, [[1], [1.5]] * rows,
        [[1, 2], [[3]]] * rows, [2**70] * rows, [2**63, -1] * rows, range(rows), iter([1]), Hostile(), object, lambda: 1,
        [np.arange(3), np.zeros((2, 2))] * rows, [1.5, 2**60 + 1] * rows, np.ma.masked_array(np.arange(rows), True),
        np.zeros((rows, 10, 0)), [np.datetime64("now")] * rows, np.full(rows, "a", "S3"), [[["a"]]] * rows, [Hostile()] * rows,
    )  # fmt: skip
    return st.sampled_from(range(len(plain) + len(odd))).map(lambda i: (plain + odd)[i])


def mostly(plausible: st.SearchStrategy[Any], odd: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    return st.integers(0, 5).flatmap(lambda n: st.sampled_from(odd) if n == 0 else plausible)


names = mostly(st.sampled_from((*TASKS, "work", "work", "end")), ODD_NAMES)
partitions = mostly(st.sampled_from(("", "", "eval")), ODD_NAMES)
numbers = mostly(st.integers(1, 6), ODD_NUMBERS)
times = mostly(st.sampled_from((0.0, 0.001)), (-1, "soon", None, float("nan"), np.float64(0), 0j, b"", -(10**400)))
column_sets = mostly(
    st.lists(st.sampled_from(COLUMNS), max_size=3).map(tuple),
    ("x", None, ("x", "x"), ("",), (5,), [None], tuple(f"c{i}" for i in range(70)), {"x": 1}, ("\ud800",), 7),
)
positions = mostly(
    st.lists(st.integers(0, 3), max_size=3),
    (
        [-1],
        [2**40],
        [0.5],
        "0",
        [[0]],
        [True, False],
        None,
        np.array([0], object),
        {0},
        [None],
        [2**70],
        Hostile(),
        0,
    ),
)
payload = st.integers(1, 4).flatmap(
    lambda rows: mostly(
        st.dictionaries(st.sampled_from(COLUMNS), values_of(rows), min_size=1, max_size=3),
        ({}, None, 5, "x", {"": [1]}, {5: [1]}, {None: [1]}, {"\ud800": [1]}, {"x" * 70_000: [1]}, [("x", [1])], {"x": []},
         {f"c{i}": [1] for i in range(70)}),
    )
)  # fmt: skip

CALLS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "declare": {
        "name": names, "needs": column_sets, "gives": column_sets, "lease_s": mostly(st.just(60.0), ODD_NUMBERS),
        "max_attempts": numbers, "admits": mostly(st.booleans(), (None, 5, "yes")),
        "batch_rows": mostly(st.none() | st.integers(1, 8), ODD_NUMBERS), "partitions": mostly(st.just(("",)), ("", ("*",), 5, None, ("eval", 5), ("\ud800",))),
        "sampler": mostly(st.sampled_from((None, "fifo", "shuffled", ("shuffled", {"seed": 1}))), ("no such", 5, (), ("a",), ("shuffled", 5), ("shuffled", {"seed": Hostile()}), ("shuffled", {5: 1}), ("length_bucketed", {}))),
    },
    "configure": {"capacity_rows": mostly(st.just(50), ODD_NUMBERS), "max_staleness": numbers, "steps": numbers, "capacity_bytes": mostly(st.just(10**6), ODD_NUMBERS)},
    "put": {"columns": payload, "group_size": numbers, "key": mostly(st.sampled_from(("", "a", "b")), ODD_NAMES), "partition": partitions, "priority": numbers, "timeout_s": times},
    "get": {"task": names, "count": numbers, "columns": column_sets, "at_least": numbers, "partition": partitions, "timeout_s": times, "group": st.sampled_from(("", "", "", "ranks", 5)), "rank": mostly(st.integers(0, 1), ODD_NUMBERS), "world_size": mostly(st.integers(1, 2), ODD_NUMBERS), "shards": mostly(st.integers(0, 2), ODD_NUMBERS)},
    "steps": {"task": names, "part_rows": numbers, "columns": column_sets, "timeout_s": times, "group": st.sampled_from(("", "", "ranks", 5)), "rank": mostly(st.just(0), ODD_NUMBERS), "world_size": mostly(st.just(1), ODD_NUMBERS), "filtered": positions},
    "complete": {"columns": payload, "index": positions, "filtered": positions},
    "finish": {"columns": payload, "index": positions, "filtered": positions},
    "give_back": {"index": positions, "reason": mostly(st.just("why"), ODD_NAMES), "blame": mostly(st.booleans(), (None, "x", 5))},
    "renew": {},
    "ack": {"filtered": positions},
    "loaded": {"version": numbers},
    "wanted": {"timeout_s": times},
    "end": {"cancel": mostly(st.booleans(), (None, 5)), "partition": mostly(st.just("eval"), ODD_NAMES)},
    "cancel": {"rows": positions, "key": mostly(st.just(""), ODD_NAMES), "partition": partitions, "reason": mostly(st.just("why"), ODD_NAMES)},
    "failed": {"count": numbers},
    "audit": {},
    "status": {},
}  # fmt: skip
OF_A_BATCH = ("complete", "finish", "give_back", "renew", "ack")
OFTEN = ("put", "put", "get", "get", "complete", "complete", "steps")


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A verb and some of its arguments."""
    verb = draw(st.sampled_from((*CALLS, *OFTEN)))
    arguments = {name: draw(made) for name, made in CALLS[verb].items() if name in REQUIRED or draw(st.booleans())}
    return verb, arguments


REQUIRED = ("name", "needs", "columns", "task", "version", "timeout_s")


async def verb_of(queue: Any, batches: list[Any], verb: str, arguments: dict[str, Any]) -> None:
    """One call, whichever face it is made on."""
    if verb in OF_A_BATCH:
        if not batches:
            return
        target = batches[-1]
        if verb in ("renew", "ack", "give_back"):
            batches.pop()
    else:
        target = queue
    if verb == "steps":
        await take_a_part(queue, **arguments)
        return
    made = getattr(target, verb)(**arguments)
    made = await made if asyncio.iscoroutine(made) else made
    if verb == "get":
        batches.append(made)
        for name in made:
            made[name]


async def take_a_part(queue: Any, filtered: Any = None, **arguments: Any) -> None:
    """The first parts of a step, which is perhaps acknowledged."""
    if isinstance(queue, TransferQueue):
        with queue.steps(**arguments) as steps:
            for step in steps:
                for part in step.parts():
                    dict(part)
                step.ack(filtered=filtered)
        return
    async with queue.steps(**arguments) as steps:
        async for step in steps:
            async for part in step.parts():
                dict(part)
            await step.ack(filtered=filtered)


def bystander_is_served(queue: TransferQueue, number: int) -> None:
    """Another client's rows come, whole and bit for bit, in a partition of its own."""
    value = np.array([number, np.nan])
    queue.put({"mine": value}, partition="bystander")
    with queue.get("bystander", 2, timeout_s=100) as batch:
        assert batch.array("mine").tobytes() == value.tobytes()
        batch.ack()


@pytest.mark.parametrize("face", ["threads", "event loop"])
def test_whatever_is_said_only_errors_that_can_be_caught_come_back(
    face: str, caplog: pytest.LogCaptureFixture
) -> None:
    @settings(max_examples=2000 if LONG else 15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(said=st.lists(calls(), min_size=15, max_size=50))
    def check(said: list[tuple[str, dict[str, Any]]]) -> None:
        with running() as run:
            # given
            good = run.queue("bystander")
            good.declare("bystander", needs=["mine"], partitions=("bystander",))
            bystander_is_served(good, 0)
            queue: TransferQueue | AsyncTransferQueue = run.queue("fuzzer")
            batches: list[Any] = []
            queue.declare("work", needs=["x"], gives=["y"])
            queue.declare("end", needs=["y"])
            # when
            ended = asyncio.run(say_all(queue if face == "threads" else queue.aio, batches, said))
            # then
            assert not [record for record in caplog.records if record.exc_info], caplog.text
            if not ended:
                good.configure(capacity_rows=10**6, capacity_bytes=10**9)  # whatever the other set
                bystander_is_served(good, 1)
            audit = good.audit()
            assert audit.balanced
            assert audit.put == audit.live + sum(audit.terminal.values())
            good.status()

    check()


async def say_all(queue: Any, batches: list[Any], said: list[tuple[str, dict[str, Any]]]) -> bool:
    """Say it all. Returns whether the stream ended."""
    ended = False
    for verb, arguments in said:
        try:
            await verb_of(queue, batches, verb, arguments)
            ended |= verb == "end" and arguments.get("partition") in (None, "bystander")
        except Exception as error:
            told = isinstance(error, (AsyncFlowError, TypeError, ValueError)) and str(error)
            if not told or "the call failed in the server" in str(error):
                raise AssertionError(f"{verb}({arguments}) raised {error!r}") from error
    return ended


def test_the_faces_have_the_same_verbs() -> None:
    assert public(TransferQueue) - {"aio"} == public(AsyncTransferQueue) - {"connection"}


def public(face: type) -> set[str]:
    return {name for name in dir(face) if not name.startswith("_")}
