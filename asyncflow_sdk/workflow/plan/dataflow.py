"""Dataflow: the tasks of a workflow, and the columns between them.

flow = Dataflow({"prompt": "prompts"}, [Node("rollout", ("prompt",), ("response",)), Node("train", ("response",), ())])
flow.problems()     # [Problem(task, text)]
flow.edges          # [("prompts", "rollout", ("prompt",)), ("rollout", "train", ("response",))]
"""

from __future__ import annotations

import difflib
import itertools
import keyword
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from ...errors import SchemaError
from ...types import check_column_name
from ..data import DATA

PROMPTS = "prompts"


class Node(NamedTuple):
    """A task: the columns it needs and gives, and the partitions of its rows."""

    task: str
    needs: tuple[str, ...]
    gives: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ("",)

    def takes(self, partition: str) -> bool:
        """True if it takes rows of a partition."""
        return partition in self.partitions or "*" in self.partitions


class Edge(NamedTuple):
    """Columns from the task ``giver`` to the task ``taker``."""

    giver: str
    taker: str
    columns: tuple[str, ...]


class Problem(NamedTuple):
    """An error in a dataflow, and its task."""

    task: str
    text: str


def same_name(task: str) -> Problem:
    """Return the problem of two tasks with one name."""
    return Problem(task, f"two tasks have the same name {task!r}: give one another task=")


class Dataflow:
    """Tasks and the columns between them. ``data``: columns of the prompts."""

    def __init__(self, data: Sequence[str], nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)
        self.givers: dict[str, str] = dict.fromkeys(data, PROMPTS)
        self._twice: list[tuple[str, str, str]] = []
        for node in nodes:
            for column in node.gives:
                if column in self.givers:
                    self._twice.append((column, self.givers[column], node.task))
                else:
                    self.givers[column] = node.task

    @property
    def edges(self) -> list[Edge]:
        """All edges, in the order of the tasks."""
        found: dict[tuple[str, str], list[str]] = {}
        for node in self.nodes:
            for column in node.needs:
                if column in self.givers:
                    found.setdefault((self.givers[column], node.task), []).append(column)
        order = [PROMPTS, *TopologicalSorter(self._waits()).static_order()]
        edges = [Edge(giver, taker, tuple(columns)) for (giver, taker), columns in found.items()]
        return sorted(edges, key=lambda edge: (order.index(edge.giver), order.index(edge.taker)))

    @property
    def unused(self) -> dict[str, str]:
        """Columns needed by no task, each with its giver."""
        needed = {column for node in self.nodes for column in node.needs}
        return {column: giver for column, giver in self.givers.items() if giver != PROMPTS and column not in needed}

    def problems(self) -> list[Problem]:
        """Return all problems."""
        names = [node.task for node in self.nodes]
        same = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        twice = [
            Problem(
                second,
                f"column {column!r} is given by {_task(first)} and by {_task(second)}, and can be written once: say other"
                " names in gives= of one",
            )
            for column, first, second in self._twice
        ]
        cycles = [] if same else self._cycles()
        return [*map(same_name, same), *twice, *self._misnamed(), *self._missing(), *cycles]

    def _waits(self) -> dict[str, dict[str, str]]:
        """The tasks that each task waits for, with a column given by each of them."""
        return {
            node.task: {self.givers[c]: c for c in node.needs if self.givers.get(c, PROMPTS) != PROMPTS}
            for node in self.nodes
        }

    def _misnamed(self) -> list[Problem]:
        """Find invalid column names, each once, with its first task."""
        first: dict[str, str] = {}
        for node in self.nodes:
            for column in (*node.gives, *node.needs):
                first.setdefault(column, node.task)
        found = []
        for column, task in first.items():
            try:
                check_column_name(column)
            except SchemaError as error:
                cure = f". {_rename(column)}" if self.givers.get(column) == PROMPTS else ""
                found.append(Problem(task, f"{_task(task)}: {error}{cure}"))
        return found

    def _missing(self) -> list[Problem]:
        found = []
        for node in self.nodes:
            lacks = [column for column in node.needs if column not in self.givers]
            if lacks:
                names = ", ".join(repr(column) + self._near(column) for column in lacks)
                hints = "".join(f"; {_giver(column)}" for column in lacks if _giver(column))
                there = ", ".join(sorted(self.givers))
                text = f"{_task(node.task)} needs {names}, which nobody gives{hints}. There are: {there}"
                found.append(Problem(node.task, text))
        return found

    def _near(self, column: str) -> str:
        near = [] if _giver(column) else difflib.get_close_matches(column, self.givers, 1, 0.6)
        if not near:
            return ""
        cure = "" if near[0].isidentifier() and not keyword.iskeyword(near[0]) else f" {_rename(near[0], column)}"
        return f" (did you mean {near[0]!r}, of {_task(self.givers[near[0]])}?{cure})"

    def _cycles(self) -> list[Problem]:
        """Find cycles, with their edges, until the tasks of no cycle are left."""
        waits, found = self._waits(), list[Problem]()
        while waits:
            try:
                TopologicalSorter(waits).prepare()
                break
            except CycleError as error:
                ring: list[str] = error.args[1][::-1]  # each task waits for the next
            steps = [f"{_task(a)} needs {waits[a][b]!r} of {_task(b)}" for a, b in itertools.pairwise(ring)]
            text = f"columns wait for each other: {', '.join(steps)}. Leave one of these needs out"
            own = [name for a in ring[1:] for name in waits[a].values() if self.givers.get(DATA + name) == PROMPTS]
            text += "".join(f", or name it {DATA + name!r}, as the column of the data is named here" for name in own)
            found.append(Problem(ring[0], text))
            waits = {task: needs for task, needs in waits.items() if task not in ring}
        return found


def _giver(column: str) -> str:
    """Return a hint for the task that gives a column, or "". Log-probs of a reference are never the rollout's: with
    these a KL penalty would compare the policy with itself."""
    if column == "reward":
        return "reward=FUNCTION gives it"
    if column.endswith("_logprobs"):
        stage = f"af.Stage(af.Logprobs('torch', model=REFERENCE), gives=[{column!r}])"
        return f"a stage gives log-probs of a reference model: stages=[{stage}]"
    return ""


def _rename(column: str, new: str = "NAME") -> str:
    """Return the cure for a column of the data with an unusable name."""
    return f"rename={{{column!r}: {new!r}}} of the workflow gives the data's column another name"


def _task(name: str) -> str:
    return "the prompts" if name == PROMPTS else f"task {name!r}"
