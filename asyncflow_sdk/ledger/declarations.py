"""Declarations that can never complete: refused before any row meets them.

A row passes every task of its partition, and a column is written once. So no row gets through a task that gives what it needs,
through tasks that wait for each other's columns, or through two tasks that give the same column. A column that no task gives
may still come with a put: that is not known when a task is declared.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import ConfigError
from .commands import TaskSpec

OTHERS = "*"
"""Stands for the partitions that no task names."""


def check_declaration(spec: TaskSpec, declared: Iterable[TaskSpec]) -> None:
    """Raise ConfigError if no row can ever get through ``spec`` and the tasks ``declared`` before it."""
    if not spec.partitions:
        raise ConfigError(
            f"task {spec.name!r} takes the rows of no partition, so it never gets any; name one in partitions=, or leave it out"
        )
    both = [column for column in spec.needs if column in spec.gives]
    if both:
        raise ConfigError(
            f"task {spec.name!r} needs column {both[0]!r} and gives it, so it waits for itself; give another column, or leave it"
            " out of one of the two"
        )
    others = list(declared)
    named = {partition for task in (spec, *others) for partition in task.partitions} | {OTHERS}
    for partition in sorted(partition for partition in named if spec.takes(partition)):
        beside = [task for task in others if task.takes(partition)]
        _check_givers(spec, beside)
        if ring := _ring(spec, beside):
            raise ConfigError(f"tasks wait for each other's columns: {ring}. Leave one of these needs out")


def _check_givers(spec: TaskSpec, beside: list[TaskSpec]) -> None:
    for task in beside:
        twice = [column for column in spec.gives if column in task.gives]
        if twice:
            raise ConfigError(
                f"task {spec.name!r} gives column {twice[0]!r}, and so does task {task.name!r} for the same rows; a column is"
                " written once: give another, or take other partitions"
            )


def _ring(spec: TaskSpec, beside: list[TaskSpec]) -> str:
    """The way from a task over the givers of what it needs back to itself, in words; "" where there is none."""
    ways: dict[str, str] = {}  # task → how spec comes to wait for it
    left = [spec]
    while left:
        at = left.pop()
        for giver in (spec, *beside):
            column = next((column for column in at.needs if column in giver.gives), None)
            if column is None or giver.name in ways:
                continue
            before = f"{ways[at.name]}, " if at is not spec else ""
            ways[giver.name] = f"{before}task {at.name!r} needs {column!r} of task {giver.name!r}"
            left.append(giver)
    return ways.get(spec.name, "")
