"""Samplers: what each chooses, what a user's own may do, and what becomes of one that misbehaves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from ledger_queue import LAST, PLAIN, TOKENS, Queue, ids, packed, running

from asyncflow_sdk.errors import ConfigError, DeadlineExceeded, PluginError, SchemaError
from asyncflow_sdk.interfaces import Candidates, Sampler
from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.testing import check_sampler
from asyncflow_sdk.types.tasks import SamplerSpec

pytestmark = pytest.mark.fast


def task(sampler: str, *, name: str = "plain", gives: str = "answer", **options: Any) -> TaskSpec:
    return TaskSpec(name=name, needs=("prompt",), gives=(gives,), sampler=SamplerSpec(sampler, options))


def put(queue: Queue, *measures: float, size: int = 1, priority: int = 0) -> None:
    """A group for each measure of column "prompt"."""
    command = cmd.AddRows(
        groups=len(measures), group_size=size, columns={"prompt": TOKENS}, priority=priority,
        measures={"prompt": np.array(measures, "<f8").tobytes()},
    )  # fmt: skip
    queue.do(queue.admin, command)


def with_own(sampler: Callable[..., Sampler], spec: TaskSpec) -> Queue:
    """A queue where a user's own sampler is installed."""
    return Queue(spec, sampler=sampler)


# ---- those that come with the SDK

BUILT_IN = {
    "fifo": {},
    "whole_groups": {},
    "shuffled": {"seed": 3, "window": 64},
    "by_column": {"column": "x", "window": 64},
    "length_bucketed": {"column": "x", "window": 64},
    "token_balanced": {"column": "x"},
}


def test_every_built_in_sampler_is_found_and_keeps_to_the_rules() -> None:
    assert {a.spec.name for a in registry().adapters if a.spec.kind == "sampler"} >= set(BUILT_IN)
    for name, options in BUILT_IN.items():
        check_sampler(functools.partial(registry().get("sampler", name).load(), **options), tries=10)


def test_shuffled_gives_every_row_once_in_an_order_of_the_seed_alone() -> None:
    def order(seed: int, *counts: int) -> list[int]:
        queue = Queue(task("shuffled", seed=seed, window=50))
        worker = queue.join("w")
        put(queue, *[1.0] * 100)
        return [i for count in counts for i in ids(queue.lease(worker, "plain", count))]

    first = order(1, *[10] * 10)
    # then another seed gives another order, and another way of asking the same
    assert sorted(first) == list(range(100))
    assert first != sorted(first)
    assert order(2, *[10] * 10) != first
    assert order(1, 1, 19, 30, 50) == first
    assert set(first[:50]) == set(range(50)), "no row waits longer than a window"


def test_shuffled_starts_prompts_in_a_random_order_by_whole_groups() -> None:
    rollout = TaskSpec(
        name="rollout",
        needs=("prompt",),
        gives=("response",),
        admits=True,
        sampler=SamplerSpec("shuffled", {"seed": 1}),
    )
    queue = Queue(rollout, TaskSpec(name="train", needs=("response",), batch_rows=8), max_staleness=9)
    replica = queue.join("gen")
    queue.publish(0)
    queue.load(replica, 0)
    queue.put(8, 4)
    groups = [ids(queue.lease(replica, "rollout", 4)) for _ in range(8)]
    assert [g[0] for g in groups] != [0, 4, 8, 12, 16, 20, 24, 28]
    assert sorted(groups) == [list(range(i, i + 4)) for i in range(0, 32, 4)]


def test_length_bucketed_gives_rows_of_about_one_length() -> None:
    queue = Queue(task("length_bucketed", column="prompt"))
    worker = queue.join("w")
    put(queue, 10, 500, 11, 900, 9, 480, 12, 490)
    assert ids(queue.lease(worker, "plain", 3)) == [4, 0, 2]  # the oldest row, and the nearest to it
    assert ids(queue.lease(worker, "plain", 3)) == [5, 7, 1]
    assert ids(queue.lease(worker, "plain", 3)) == [6, 3]


def test_by_column_gives_the_largest_first() -> None:
    queue = Queue(task("by_column", column="prompt"))
    worker = queue.join("w")
    put(queue, 1, 5, 3)
    put(queue, 2, priority=1)
    assert ids(queue.lease(worker, "plain", 3)) == [3, 1, 2]


def test_whole_groups_gives_the_groups_that_are_complete_so_far() -> None:
    spec = TaskSpec(name="score", needs=("answer",), gives=("score",), sampler=SamplerSpec("whole_groups"))
    queue = Queue(PLAIN, spec)
    maker, judge = queue.join("maker"), queue.join("judge")
    queue.put(3, 2)
    made = queue.lease(maker, "plain")
    queue.complete(maker, made, 0, 2, 3)
    assert ids(queue.lease(judge, "score", 4)) == [2, 3]
    with pytest.raises(DeadlineExceeded):
        queue.lease(judge, "score", 4)
    queue.complete(maker, made, 1, 4, 5)
    assert ids(queue.lease(judge, "score", 2)) == [0, 1]
    # what is left of a group whose lease was given back in part is given again
    last = queue.lease(judge, "score", 2)
    queue.complete(judge, last, 0)
    queue.do(judge, cmd.GiveBack(token=last.token))
    assert ids(queue.lease(judge, "score", 2)) == [5]


def test_whole_groups_are_taken_until_there_are_enough() -> None:
    queue = Queue(task("whole_groups"), LAST)
    worker = queue.join("w")
    waiting = queue.ask(worker, cmd.LeaseRows(task="plain", count=8, at_least=8, timeout_s=60))
    queue.put(1, 4)
    assert waiting not in queue.answers
    queue.put(2, 4)
    assert len(ids(queue.answers[waiting])) == 8
    # a number that no whole groups make up is an error and no wait without end
    queue.put(2, 4)
    with pytest.raises(SchemaError, match="no whole groups make up 6 to 7 rows: 4 would be too few"):
        queue.do(worker, cmd.LeaseRows(task="plain", count=7, at_least=6))
    assert len(ids(queue.lease(worker, "plain", 100))) == 12


def test_rows_that_ended_do_not_keep_the_rest_of_their_group_waiting() -> None:
    # given a trained group, of which one row had no gradient, before a side task got what it needs
    judge_by_group = TaskSpec(name="judge", needs=("verdict",), gives=("note",), sampler=SamplerSpec("whole_groups"))
    side = TaskSpec(name="side", needs=("prompt",), gives=("verdict",))
    queue = Queue(side, judge_by_group, TaskSpec(name="train", needs=("prompt",), batch_rows=2))
    worker, trainer = queue.join("w"), queue.join("t")
    queue.put(1, 2)
    held = queue.lease(worker, "side")
    queue.complete(trainer, queue.lease(trainer, "train"), drop=(0,))
    queue.complete(worker, held, 1)
    assert ids(queue.lease(worker, "judge")) == [1]
    # and the same when the task comes after that
    queue.do(queue.admin, cmd.Declare(task=TaskSpec(name="late", needs=("verdict",), sampler=judge_by_group.sampler)))
    assert ids(queue.lease(worker, "late")) == [1]


# ---- what they may see


class Seen(Sampler):
    """Keeps what it was shown (a test may)."""

    window = 4
    measure = "prompt"
    shown: ClassVar[list[Candidates]] = []

    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        self.shown.append(rows)
        return np.arange(min(count, len(rows)))[::-1]


def test_a_sampler_sees_the_first_rows_of_its_window_the_highest_priority_first() -> None:
    queue = with_own(Seen, task("seen"))
    worker = queue.join("w")
    put(queue, *range(100, 103), size=2)
    put(queue, 7.0, priority=2)
    Seen.shown.clear()
    assert ids(queue.lease(worker, "plain", 2)) == [0, 6]
    (rows,) = Seen.shown
    assert rows.ids.tolist() == [6, 0, 1, 2]
    assert rows.groups.tolist() == [6, 0, 0, 2]
    assert rows.measures.tolist() == [7, 100, 100, 101]
    assert rows.priorities.tolist() == [2, 0, 0, 0]
    with pytest.raises(ValueError, match="read-only"):
        rows.ids[0] = 5
    # as many as are asked for, if that is more; and how many leases there were
    assert ids(queue.lease(worker, "plain", 9)) == [5, 4, 3, 2, 1]
    assert Seen.shown[1].turn == 1


def test_rows_not_chosen_keep_their_turn() -> None:
    queue = with_own(Seen, task("seen"))
    worker = queue.join("w")
    put(queue, *range(6))
    first = queue.lease(worker, "plain", 2)
    assert ids(first) == [1, 0]
    queue.do(worker, cmd.GiveBack(token=first.token))
    assert [ids(queue.lease(worker, "plain", 1)) for _ in range(6)] == [[1], [0], [2], [3], [4], [5]]


class Waits(Sampler):
    """Gives pairs only."""

    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        return [0, 1] if len(rows) > 1 else []


def test_a_sampler_that_chooses_nothing_is_asked_again_when_more_is_there() -> None:
    queue = with_own(Waits, task("waits"))
    worker = queue.join("w")
    queue.put(1)
    waiting = queue.ask(worker, cmd.LeaseRows(task="plain", count=4, timeout_s=60))
    with pytest.raises(DeadlineExceeded, match="1 rows are ready, and sampler 'waits' chooses none of them"):
        queue.lease(worker, "plain")
    queue.put(1)
    assert ids(queue.answers[waiting]) == [0, 1]


# ---- what is wrong


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ([0, 0], "an entry twice"),
        ([5], "positions 5 to 5 of 3 entries"),
        ([-1], "positions -1 to -1 of 3 entries"),
        ([0, 1, 2], "3 entries where 2 were asked for"),
        ([0.5], "float64 of shape"),
        ([[0]], "of shape"),
        ("abc", "of shape"),
        ([True], "bool of shape"),
        (None, "of shape"),
        (ZeroDivisionError("oh"), "failed: ZeroDivisionError: oh"),
    ],
)
def test_a_sampler_that_misbehaves_fails_the_request_and_loses_nothing(answer: Any, why: str) -> None:
    answers = [answer, answer, [0, 1]]

    class Bad(Sampler):
        def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer  # type: ignore[no-any-return]

    queue = with_own(Bad, task("bad"))
    worker = queue.join("w")
    waiting = queue.ask(worker, cmd.LeaseRows(task="plain", count=2, timeout_s=60))
    put(queue, 1, 2, 3)
    assert isinstance(queue.answers[waiting], PluginError)
    with pytest.raises(PluginError, match=rf"sampler 'bad' of task 'plain' .*{why}"):
        queue.lease(worker, "plain", 2)
    assert ids(queue.lease(worker, "plain", 2)) == [0, 1]


def test_a_sampler_that_cannot_be_is_refused_when_its_task_is_declared() -> None:
    queue = Queue()
    train = {"needs": ("prompt",), "batch_rows": 4}
    wrong = [
        (task("nobody"), PluginError, "no sampler adapter is named 'nobody'"),
        (task("shuffled", sead=1), ConfigError, "sampler 'shuffled' cannot be created with .*sead"),
        (task("shuffled", window=0), ConfigError, "at least 1 row"),
        (task("by_column", column="other"), ConfigError, "measures column 'other', not among the needs of the task"),
        (
            TaskSpec(name="t", sampler=SamplerSpec("shuffled"), **train),
            ConfigError,
            "staleness rule selects the rows",
        ),
    ]
    for spec, error, why in wrong:
        with pytest.raises(error, match=why):
            queue.do(queue.admin, cmd.Declare(task=spec))
    queue.do(
        queue.admin,
        cmd.Declare(task=TaskSpec(name="t", sampler=SamplerSpec("token_balanced", {"column": "prompt"}), **train)),
    )


def test_a_column_without_one_number_a_row_cannot_be_measured() -> None:
    from asyncflow_sdk.types import ColumnSpec

    image = ColumnSpec("fixed", "float32", (3, 3))
    queue = Queue(task("by_column", column="prompt"))
    with pytest.raises(SchemaError, match="column 'prompt' is measured by a sampler"):
        queue.put(1, prompt=image)
    queue = Queue(PLAIN)
    queue.put(1, prompt=image)
    with pytest.raises(ConfigError, match="no number for each row"):
        queue.do(queue.admin, cmd.Declare(task=task("by_column", name="late", gives="rank", column="prompt")))


def test_a_measure_moves_with_its_row() -> None:
    queue = Queue(task("by_column", column="prompt", window=4), LAST, options={"initial_rows": 8})
    worker = queue.join("w")
    kept = 1000.0
    put(queue, kept)
    for n in range(40):
        put(queue, n, n + 0.5, priority=1)
        lease = queue.lease(worker, "plain", 2)
        queue.complete(worker, lease, drop=(0, 1))
    put(queue, kept - 1)
    assert ids(queue.lease(worker, "plain", 1)) == [0]


def test_a_running_pipeline_measures_what_a_task_writes() -> None:
    queue, replica, judge, _ = running()
    reward = TaskSpec(
        name="longest", needs=("response",), gives=("n",), sampler=SamplerSpec("by_column", {"column": "response"})
    )
    queue.do(queue.admin, cmd.Declare(task=reward))
    queue.put(4)
    lease = queue.lease(replica, "rollout", 4)
    for at, length in ((0, 5.0), (2, 9.0), (1, 7.0)):
        done = cmd.Complete(
            token=lease.token, columns={"response": TOKENS}, index=np.array([at], "<i4").tobytes(),
            measures={"response": np.array([length]).tobytes()},
        )  # fmt: skip
        queue.do(replica, done)
    assert ids(queue.lease(judge, "longest", 3)) == [2, 1, 0]


# ---- the check that authors of samplers use


class Greedy(Sampler):
    """Of its window the newest rows: the oldest never."""

    window = 64

    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        return np.argsort(-rows.ids)[:count]


class Shortest(Sampler):
    window, measure = 64, "x"

    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        return np.argsort(rows.measures, kind="stable")[:count]


class Counts(Sampler):
    """Keeps something from call to call."""

    def __init__(self) -> None:
        self.calls = 0

    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        self.calls += 1
        return [self.calls % len(rows)]


class Global(Sampler):
    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        return np.random.permutation(len(rows))[:count]


class TooMany(Sampler):
    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        return np.arange(len(rows))


class Quadratic(Sampler):
    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        for _ in range(len(rows)):
            for _ in range(len(rows)):
                pass
        return np.arange(min(count, len(rows)))


class Writes(Sampler):
    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        rows.ids.sort()
        return np.arange(min(count, len(rows)))


class Empty(Sampler):
    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        return []


@pytest.mark.parametrize(
    ("sampler", "why"),
    [
        (Greedy, "rows were not chosen in .* while others came"),
        (Shortest, "rows were not chosen in .* while others came"),
        (Counts, "the same object, asked again, chose"),
        (Global, "the same object, asked again, chose"),
        (TooMany, "more than"),
        (Quadratic, "it does not scale"),
        (Empty, "rows were not chosen"),
        (dict, "is no asyncflow_sdk.interfaces.Sampler"),
    ],
)
def test_what_a_sampler_must_not_do_is_found(sampler: Any, why: str) -> None:
    if sampler is Quadratic:
        Quadratic.window = 256
    with pytest.raises(AssertionError, match=why):
        check_sampler(sampler, tries=10)


def test_a_sampler_cannot_write_into_what_it_is_shown() -> None:
    with pytest.raises(ValueError, match="read-only"):
        check_sampler(Writes)


def test_a_sampler_that_says_that_rows_may_starve_may_starve_them() -> None:
    class Honest(Shortest):
        may_starve = True

    check_sampler(Honest)


def test_a_group_that_comes_back_in_pieces_is_whole_again() -> None:
    # given two groups leased together, of which one row comes back first
    queue = Queue(TaskSpec(name="judge", needs=("prompt",), sampler=SamplerSpec("whole_groups"), lease_s=50))
    queue.put(2, 3)
    first = queue.join("first")
    lease = queue.do(first, cmd.LeaseRows(task="judge", count=6))
    for at in ((1,), (0, 2, 3, 4, 5)):
        queue.do(first, cmd.GiveBack(token=lease.token, index=packed(*at)))
    # when
    again = [queue.do(first, cmd.LeaseRows(task="judge", count=4)) for _ in range(2)]
    # then each lease is a whole group, and no row is in two
    assert [ids(each) for each in again] == [[0, 1, 2], [3, 4, 5]]
