"""Queue configuration: the limits of a run and its declared tasks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..errors import ConfigError
from ..types.tasks import TaskSpec
from . import commands as cmd
from .assembly import StepAssembly
from .samplers import TaskSamplers
from .staleness import StalenessRule
from .state import LedgerState
from .state.rows import LEAST, MAX_NUMBER
from .state.steps import Window
from .state.tasks import APART, WAITING


class QueueConfiguration:
    """Sets limits and declares tasks."""

    def __init__(self, state: LedgerState, samplers: TaskSamplers, assembly: StepAssembly) -> None:
        self._state, self._samplers, self._assembly, self._staleness = state, samplers, assembly, assembly.staleness

    def configure(self, command: cmd.Configure) -> cmd.Reply:
        """Set limits other than None."""
        for name, least in LEAST.items():
            value = getattr(command, name)
            if value is not None and not least <= value <= MAX_NUMBER:
                raise ConfigError(f"{name} cannot be {value}; it is {least} or more")
        rule = (command.max_staleness, command.staleness, command.steps, command.checkpoints)
        if self._state.steps.declared:
            if any(value is not None for value in rule):
                names = "max_staleness, its policy, steps and checkpoints"
                raise ConfigError(f"{names} are set before the task with batch_rows is declared")
            if command.capacity_rows is not None:
                _check_capacity(self._state.steps.window.batch_rows, self._staleness.rule, command.capacity_rows)
        if command.staleness is not None:
            self._staleness.set_policy(command.staleness)
        for name in (*LEAST, "checkpoints"):
            if (value := getattr(command, name)) is not None:
                setattr(self._state.limits, name, value)
        self._state.parked.wake_all()
        return cmd.Done()

    def declare(self, command: cmd.Declare) -> cmd.Reply:
        """Declare a task. Idempotent."""
        spec, tasks = command.task, self._state.tasks.by_name
        if spec.name in tasks:
            if tasks[spec.name].spec != spec:
                raise ConfigError(f"task {spec.name!r} is already declared as {tasks[spec.name].spec}, not {spec}")
            return cmd.Done()
        sampling, rule = self._samplers.describe(spec), self._staleness.rule
        if spec.batch_rows is not None:
            rule = self._staleness.describe(rule.spec, spec.batch_rows)
        self._check(spec, rule)
        self._samplers.check(spec, sampling)
        if spec.grouped:
            self._assembly.cancel_broken_groups(spec)
        columns, need = self._state.columns, np.uint64(0)
        for column in spec.needs:
            need |= columns.bit(column)
        for column in spec.gives:
            columns.bit(column)
        for name in spec.partitions:
            if name != "*":
                self._state.partitions.add(name)
        task = self._state.tasks.add(spec, need, sampling)  # live rows that it does not take become APART in it
        if sampling.measure and columns.declare_measure(sampling.measure) and command.measures:
            columns.measure(columns.having(sampling.measure), {sampling.measure: command.measures}, slice(None))
        rows, steps, limits = self._state.rows, self._state.steps, self._state.limits
        live = rows.live_ids()
        live = live[task.state[rows.at(live)] != APART]
        at = rows.at(live)
        if spec.batch_rows is not None:
            self._staleness.use(rule)
            window = Window(spec.batch_rows, limits.max_staleness, limits.steps, limits.first_step)
            steps.declare(task, window, len(live))
            self._state.context.wake("wanted", *(each.place for each in self._state.tasks))
        self._state.context.wake_puts()  # a parked put may have become impossible
        if limits.checkpoints:
            held = (rows.todo[at] == 0) & (rows.step[at] >= steps.covered)  # complete, but not covered
            self._state.budget.hold(-int(np.count_nonzero(held)))
        task.take(live)
        self._assembly.make_ready_in(task, live)
        if spec.admits and steps.declared:
            state = steps.task.state[rows.at(live)]
            task.skip(live[(state != WAITING) & (state != APART)])
        return cmd.Done()

    def _check(self, spec: TaskSpec, rule: StalenessRule) -> None:
        state = self._state
        if not (spec.lease_s > 0 and spec.max_attempts > 0):
            raise ConfigError(f"task {spec.name!r}: lease_s and max_attempts must be above 0")
        check_declaration(spec, (task.spec for task in state.tasks))
        if spec.admits and ((other := state.tasks.admitting) is not None or spec.batch_rows is not None):
            which = f", and {other.spec.name!r} is it" if other else " besides the one that makes the steps"
            raise ConfigError(f"task {spec.name!r} cannot admit: a queue has one such task{which}")
        if spec.batch_rows is not None:
            rows, steps, partitions, limits = state.rows, state.steps, state.partitions, state.limits
            if steps.declared:
                raise ConfigError(f"task {steps.name!r} already makes the steps; a queue has one such task")
            _check_capacity(spec.batch_rows, rule, limits.capacity_rows)
            taken = [number for name, number in partitions.numbers.items() if spec.takes(name)]
            at = rows.at(rows.live_ids())
            sizes = set(rows.size[at][np.isin(rows.partition[at], taken)].tolist())
            sizes |= {size for name, size in partitions.group_sizes.items() if spec.takes(name)}
            if len(sizes) > 1:
                text = " and ".join(map(str, sorted(sizes)))
                raise ConfigError(f"rows are in groups of {text}; steps need groups of one size")
            for size in sizes:
                check_groups_fill(spec.batch_rows, size)
            if limits.checkpoints and spec.gives:
                text = "gives columns, and with checkpoints it may train again: let another give them"
                raise ConfigError(f"task {spec.name!r} {text}")
        state.columns.check_names((*spec.needs, *spec.gives))


def check_groups_fill(batch_rows: int, group_size: int) -> None:
    """Raise ConfigError unless whole groups fill a step."""
    if batch_rows % group_size:
        below, above = batch_rows // group_size * group_size, -(-batch_rows // group_size) * group_size
        use = f"{below} or {above}" if below else str(above)
        text = f"batch_rows={batch_rows} is not a multiple of group_size={group_size}"
        raise ConfigError(f"{text}; use {use}, or another group size")


def _check_capacity(batch_rows: int, rule: StalenessRule, capacity_rows: int) -> None:
    if not 1 <= batch_rows <= capacity_rows:
        raise ConfigError(f"a step of {batch_rows} rows cannot fill in a queue of capacity_rows={capacity_rows}")
    if rule.least_rows > capacity_rows:
        steps = f"steps of {batch_rows} rows under staleness policy {rule.spec.name!r}"
        queue = f"a queue of capacity_rows={capacity_rows}: it needs {rule.least_rows}"
        raise ConfigError(f"{steps} may never fill in {queue}")


def check_declaration(spec: TaskSpec, declared: Iterable[TaskSpec]) -> None:
    """Raise ConfigError if no row can ever complete ``spec`` and the tasks ``declared`` before it. A row passes all
    tasks of its partition, a column is written once, and one given by no task may come with a put."""
    if not spec.partitions:
        raise ConfigError(f"task {spec.name!r} takes the rows of no partition; name one in partitions=")
    if both := [column for column in spec.needs if column in spec.gives]:
        raise ConfigError(f"task {spec.name!r} needs column {both[0]!r} and gives it; leave it out of one of the two")
    others = list(declared)
    named = {partition for task in (spec, *others) for partition in task.partitions} | {"*"}
    for partition in sorted(partition for partition in named if spec.takes(partition)):
        beside = [task for task in others if task.takes(partition)]
        for task in beside:
            if twice := [column for column in spec.gives if column in task.gives]:
                other = f"task {task.name!r} for the same rows; give another one, or take other partitions"
                raise ConfigError(f"task {spec.name!r} gives column {twice[0]!r}, and so does {other}")
        if ring := _ring(spec, beside):
            raise ConfigError(f"tasks wait for each other's columns: {ring}. Leave one of these needs out")


def _ring(spec: TaskSpec, beside: list[TaskSpec]) -> str:
    """Describe a cycle of needs from a task back to itself; "" if there is none."""
    ways: dict[str, str] = {}  # task → how spec comes to wait for it
    left = [spec]
    while left:
        at = left.pop()
        for giver in (spec, *beside):
            column = next((column for column in at.needs if column in giver.gives), None)
            if column is not None and giver.name not in ways:
                before = f"{ways[at.name]}, " if at is not spec else ""
                ways[giver.name] = f"{before}task {at.name!r} needs {column!r} of task {giver.name!r}"
                left.append(giver)
    return ways.get(spec.name, "")
