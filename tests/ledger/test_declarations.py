"""What is declared can complete: what never could is refused before a row meets it, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_queue import TEXT, Queue

from asyncflow_sdk.errors import ConfigError, SchemaError
from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd

pytestmark = pytest.mark.fast

columns = st.sets(st.sampled_from("abcde"), max_size=3).map(sorted).map(tuple)
wheres = st.sampled_from([("",), ("",), ("eval",), ("", "eval"), ("*",), ()])


def task(name: str, needs: str, gives: str = "", *, where: tuple[str, ...] = ("",)) -> TaskSpec:
    return TaskSpec(name=name, needs=tuple(needs), gives=tuple(gives), partitions=where)


@pytest.mark.parametrize(
    ("tasks", "refused"),
    [
        ([task("one", "a", "a")], "task 'one' needs column 'a' and gives it; leave it out"),
        ([task("one", "a", "b"), task("two", "b", "a")], "task 'two' needs 'b' of task 'one', task 'one' needs 'a' of task 'two'"),
        (
            [task("one", "a", "b"), task("two", "b", "c"), task("side", "b", "x"), task("three", "c", "a")],
            "task 'three' needs 'c' of task 'two', task 'two' needs 'b' of task 'one', task 'one' needs 'a' of task 'three'. Leave",
        ),
        ([task("one", "a", "b", where=("*",)), task("two", "b", "a", where=("eval",))], "wait for each other"),
        ([task("one", "a", "b"), task("two", "c", "b")], "task 'two' gives column 'b', and so does task 'one' for the same rows"),
        ([task("one", "a", "b", where=())], "task 'one' takes the rows of no partition"),
    ],
)  # fmt: skip
def test_tasks_that_no_row_gets_through_are_refused(tasks: list[TaskSpec], refused: str) -> None:
    queue = Queue(*tasks[:-1])

    with pytest.raises(ConfigError, match=refused):
        queue.do(queue.admin, cmd.Declare(task=tasks[-1]))

    assert tasks[-1].name not in queue.status().rows


def test_tasks_whose_rows_never_meet_may_give_what_the_other_needs() -> None:
    queue = Queue(
        task("one", "a", "b"), task("two", "b", "a", where=("eval",)), task("three", "c", "b", where=("late",))
    )
    assert list(queue.status().rows) == ["one", "two", "three"]


def gets_through(partition: str, tasks: list[TaskSpec]) -> bool:
    """True if a row gets through every task of a partition that is put with all that none of them gives."""
    left = [each for each in tasks if each.takes(partition)]
    has = {column for each in left for column in each.needs} - {column for each in left for column in each.gives}
    while able := [each for each in left if set(each.needs) <= has and not set(each.gives) & has]:
        left.remove(able[0])
        has |= set(able[0].gives)
    return not left


@settings(max_examples=40)
@given(st.lists(st.tuples(columns, columns, wheres), min_size=1, max_size=5))
def test_a_task_is_refused_if_and_only_if_no_row_could_get_through(specs: list[tuple[tuple[str, ...], ...]]) -> None:
    queue, declared = Queue(), list[TaskSpec]()
    for number, (needs, gives, where) in enumerate(specs):
        spec = TaskSpec(name=f"task {number}", needs=needs, gives=gives, partitions=where)
        partitions = {"*", *where, *(each for other in declared for each in other.partitions)}
        mine = [partition for partition in partitions if spec.takes(partition)]
        possible = bool(where) and all(gets_through(partition, [*declared, spec]) for partition in mine)
        try:
            queue.do(queue.admin, cmd.Declare(task=spec))
        except ConfigError:
            assert not possible
        else:
            assert possible
            declared.append(spec)


@pytest.mark.parametrize("name", ["", "a b", "0a", "-a", "a/b", "\u00e4", "a\n", "n" * 101])
def test_the_ledger_takes_no_column_whose_name_is_none(name: str) -> None:
    # given a client that checks nothing itself
    queue = Queue(task("one", "a", "b"))
    with pytest.raises(SchemaError, match="a column cannot be named"):
        queue.do(queue.admin, cmd.AddRows(groups=1, group_size=1, columns={name: TEXT}))
    with pytest.raises(SchemaError, match="a column cannot be named"):
        queue.do(queue.admin, cmd.Declare(task=TaskSpec(name="two", needs=(name,))))

    assert queue.audit().put == 0
