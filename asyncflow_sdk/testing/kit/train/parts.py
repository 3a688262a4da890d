"""Checks of steps trained in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ....errors import EngineError, SchemaError
from ....interfaces import StepResult
from ....types import Batch
from ..check import CheckFailed, DoesNotApply, checks, expect
from .lab import TrainLab, changed

SIZES = (4, 3, 5, 2, 3)
PARTS = ((1,), (4, 2), (0, 3))
"""Groups of each part, of unequal numbers of tokens. The group of the first part has equal rewards."""


def step_in_parts(lab: TrainLab) -> None:
    """A step trained in parts is the whole step: weights, metrics and filtered rows."""
    batch, rows = _step(lab)
    lab.fresh()
    whole = [lab.step(batch), lab.step(batch)]
    wanted = lab.tensors()
    lab.fresh()
    have = [_in_parts(lab, batch, rows, number) for number in range(2)]
    lab.expect_same(wanted, lab.tensors(), "the same rows in parts", "end_step: the step is not the whole step's")
    order, none = np.concatenate(rows), np.zeros(batch.rows, np.bool_)
    for one, other in zip(whole, have, strict=True):
        expect(isinstance(other, StepResult), f"end_step() returned {other!r:.80}, no asyncflow_sdk.StepResult")
        _check_metrics(lab, one, other)
        want, got = (none if result.filtered is None else np.asarray(result.filtered) for result in (one, other))
        right = got.shape == want.shape and np.array_equal(got, want[order])
        wrong = (
            "filtered is not that of the whole step: it is over the rows of all parts, in the order of accumulate()"
        )
        expect(right, wrong)


def aborted_step(lab: TrainLab) -> None:
    """A step that is aborted, or refused for invalid rows, leaves no trace. Calls out of order raise EngineError."""
    batch, rows = _step(lab)
    part = batch.take(rows[-1])
    bad = changed(part, reward=np.full(part.rows, np.nan))
    lab.fresh()
    before, engine = lab.tensors(), lab.used
    engine.abort_step()  # no step is open: no effect
    _check_refused("accumulate() without begin_step()", lambda: engine.accumulate(part), EngineError)
    engine.begin_step(3)
    _check_refused("begin_step() while a step is open", lambda: engine.begin_step(4), EngineError)
    _check_refused("end_step() without rows", engine.end_step, EngineError)
    engine.begin_step(3)
    engine.accumulate(part)
    engine.abort_step()
    lab.expect_bits(lab.tensors(), before, "the step was aborted, and {count} weights are not what they were")
    engine.begin_step(3)
    engine.accumulate(part)
    _check_refused("a part with rewards that are NaN", lambda: engine.accumulate(bad), SchemaError)
    _check_refused("end_step() after an error", engine.end_step, EngineError)
    lab.expect_bits(lab.tensors(), before, "the step was refused, and {count} weights are not what they were")
    _in_parts(lab, batch, rows, 3)
    after = lab.tensors()
    lab.fresh()
    _in_parts(lab, batch, rows, 3)
    lab.expect_same(after, lab.tensors(), "a step after aborted ones", "abort_step: gradients are left")


def _step(lab: TrainLab) -> tuple[Batch, list[npt.NDArray[np.int64]]]:
    """Return a batch, and the rows of each part. Raises DoesNotApply for an engine of whole steps."""
    engine = lab.engine
    if engine.whole_step or not engine.streams:
        raise DoesNotApply(engine.whole_step or "it trains whole steps only (streams)")
    rewards = np.concatenate([np.arange(size) % 2 for size in SIZES]).astype(float)
    group = np.repeat(np.arange(len(SIZES)), SIZES)
    rewards[np.isin(group, PARTS[0])] = 1.0
    batch = lab.batch(SIZES, seed=9, longest=48, rewards=rewards.tolist())
    return batch, [np.flatnonzero(np.isin(group, part)) for part in PARTS]


def _in_parts(lab: TrainLab, batch: Batch, rows: Sequence[npt.NDArray[np.int64]], number: int) -> StepResult:
    before = lab.tensors()
    lab.used.begin_step(number)
    for part in rows:
        lab.engine.accumulate(batch.take(part))
    lab.expect_bits(lab.tensors(), before, "only end_step() may change weights, and accumulate() changed {count}")
    return lab.engine.end_step()


def _check_metrics(lab: TrainLab, one: StepResult, other: StepResult) -> None:
    names = one.metrics.keys() ^ other.metrics.keys()
    expect(not names, f"metrics {sorted(names)} are in one of whole and streamed step only")
    for name, value in one.metrics.items():
        have = other.metrics[name]
        expect(
            abs(have - value) <= lab.same * abs(value) + lab.tolerance,
            f"metric {name!r} is {have:.6g} in parts, and {value:.6g} of the whole step",
            f"end_step: metric {name!r} is divided by something else",
        )


def _check_refused(what: str, call: Callable[[], Any], error: type[Exception]) -> None:
    try:
        call()
    except error:
        return
    except Exception as other:
        raise CheckFailed(f"{what} raised {type(other).__name__} ({other}), not {error.__name__}") from other
    raise CheckFailed(f"{what} was accepted, and raised no {error.__name__}")


CHECKS = checks("train", {
    step_in_parts: ("full", ("step", "no_gradient"),
        "streamed runs learn something else than the algorithm says: long and short parts weigh unequally",
        "accumulate() adds sums of losses that are divided by nothing of the part; end_step() divides once, by the "
        "tokens or rows of all parts, before it clips"),
    aborted_step: ("full", ("step_in_parts", "bad_batches"),
        "gradients of a step that was given up, after a rollback or a lost row, are in the next one",
        "abort_step() clears gradients and counts; accumulate() looks at all rows before it computes, and clears "
        "the step if it raises"),
})  # fmt: skip
