"""A check of train engines with a checkpoint in bfloat16, the usual one."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ....errors import ConfigError
from ....types import Batch
from ..check import DoesNotApply, check, expect, needs
from .basic import names
from .full import exported
from .lab import Tensors, TrainLab

STEPS = 24
FAR = (2.0, 6.0)
"""The way of all steps in half roundings of bfloat16, at the median weight by contribution:
visible when rounded once, and too short to be visible in a single step."""
KEPT = 0.5
"""The part of the way needed. Steps rounded one by one keep about 0.1; rounded once, 0.9 and more."""
_BITS = 8


@check(
    "train", "full",
    impact="at the small learning rates of post-training only weights near 0 are learned although the run looks well; or replicas refuse the published dtype",
    hint="an optimizer with bfloat16 weights: keep master weights in float32, step on them, and round only for publishing",
    after=("step", "export"),
)  # fmt: skip
@needs(lambda lab: lab.policy.learns, "this policy does not learn")
def small_updates(lab: TrainLab) -> None:
    """From a checkpoint in bfloat16, small steps add up as in float32; published and exported
    weights are bfloat16."""
    rate = _given_rate(lab)
    half, whole = (lab.policy.rounded(dtype) for dtype in ("bfloat16", "float32"))
    with lab.of(whole):
        batch = lab.batch((4, 4), seed=66)
        rate, wanted = _slowly(lab, batch, rate)
    with lab.of(half):
        try:
            lab.start()
        except ConfigError as error:
            raise DoesNotApply(f"it takes no checkpoint in bfloat16: {error}") from error
        names(lab)
        have = lab.trained(*[batch] * STEPS, learning_rate=rate)
        with contextlib.suppress(DoesNotApply):
            exported(lab)
    first = whole.tensors(0)
    way = _moved(wanted, first)
    kept = float(_moved(have, first) @ way / (way @ way))
    expect(
        kept >= KEPT,
        f"of the way that {STEPS} steps at a learning rate of {rate:.2g} go in float32, {kept:.2g} is left when"
        " the checkpoint is bfloat16: steps smaller than its roundings are lost",
    )


def _given_rate(lab: TrainLab) -> float:
    """Return the learning rate in the options or the factory's default."""
    parameter = inspect.signature(lab.make).parameters.get("learning_rate")
    rate = lab.options.get("learning_rate", parameter.default if parameter is not None else None)
    if not isinstance(rate, (int, float)) or not rate > 0:
        raise DoesNotApply(
            "its factory has no option learning_rate, a number, by which it could be asked for small steps"
        )
    return float(rate)


def _slowly(lab: TrainLab, batch: Batch, rate: float) -> tuple[float, Tensors]:
    """Return a learning rate with a total way of FAR, and the weights at its end."""
    for _ in range(6):
        found = lab.trained(*[batch] * STEPS, learning_rate=rate)
        went = _roundings(found, lab.policy.tensors(0))
        expect(went, "steps on rows with advantages changed no weight, so nothing can be said; see check 'step'")
        if FAR[0] <= went <= FAR[1]:
            return rate, found
        rate *= float(np.clip(sum(FAR) / 2 / went, 1e-3, 1e3))
    raise DoesNotApply("its steps are not smaller at a smaller learning rate")


def _roundings(tensors: Mapping[str, npt.NDArray[Any]], first: Mapping[str, npt.NDArray[Any]]) -> float:
    """Return the distance from ``first`` in half roundings, of the weight at half of the squared
    way."""
    begin, way = _flat(first, first), _moved(tensors, first)
    begin, way = begin[begin != 0], way[begin != 0]  # near 0 nothing is rounded away
    far = np.abs(way) / np.exp2(np.floor(np.log2(np.abs(begin))) - _BITS)
    order = np.argsort(far)
    done = np.cumsum(way[order] ** 2)
    return float(far[order][np.searchsorted(done, done[-1] / 2)])


def _moved(tensors: Mapping[str, npt.NDArray[Any]], first: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
    return _flat(tensors, first) - _flat(first, first)


def _flat(tensors: Mapping[str, npt.NDArray[Any]], order: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    return np.concatenate([tensors[name].astype(np.float64).ravel() for name in order])
