"""FirstSteps: a warning if the first steps of a run give nothing to learn from.

first = FirstSteps()
first.trained(step, metrics)         # each trained step, before its rows
first.add(step, batch)               # a warning, once, else ""
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ...queue.protocol import plain_text
from ...types import Batch
from ...types.spans import FINISH_REASON

STEPS = 3
NOTHING = "nothing can be learned so far"


class _Found(NamedTuple):
    reward: float  # of all rows; NaN if rewards differ
    idle: bool  # no row has a gradient
    cut: bool  # every response


class FirstSteps:
    """The first ``STEPS`` steps of a run."""

    def __init__(self) -> None:
        self._metrics: dict[int, Mapping[str, float]] = {}
        self._found: dict[int, _Found] = {}

    def trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step."""
        if step < STEPS:
            self._metrics[step] = metrics

    def add(self, step: int, batch: Batch) -> str:
        """Return a warning with an example after the last of these steps if all gave nothing to learn from, else "".
        ``batch``: the rows of the step, or a sample of them."""
        if not 0 <= step < STEPS or "reward" not in batch or not batch.rows:
            return ""
        rewards, metrics = np.asarray(batch.array("reward"), np.float64), self._metrics.get(step, {})
        first = float(rewards[0])
        same = (rewards == first).all() and math.isclose(metrics.get("reward", first), first, abs_tol=1e-9)
        idle = 0 in (metrics.get("rows_used"), metrics.get("grad_norm"))
        long = "response_ids" in batch and batch.ragged("response_ids").lengths.max() > 1  # else one token is meant
        self._found[step] = _Found(
            first if same else math.nan, idle, bool(long and metrics.get("truncated_fraction") == 1)
        )
        if len(self._found) < STEPS:
            return ""
        found, self._found = list(self._found.values()), {}
        if all(each.reward == found[0].reward for each in found):  # NaN equals nothing
            text = (
                f"all rewards of the first {STEPS} steps are {first:g}. Likely causes: a reward function blind to the"
            )
            text += " answer in the response, a task too hard or too easy for this model"
        elif all(each.idle for each in found):
            text = f"in no group of the first {STEPS} steps do rewards differ, so no row had a gradient. Likely causes: a"
            text += " task too hard or too easy for this model, a temperature too low"
        elif all(each.cut for each in found):
            text = f"the token limit cut every response of the first {STEPS} steps"
        else:
            return ""
        if all(each.cut for each in found):
            text += "; no response ended by itself: max_tokens too small, a wrong chat template or end token"
        return f"{NOTHING}: {text}. An example: {_example(batch)}"


def _example(batch: Batch) -> str:
    """Return the first row of a batch as text."""
    prompts = ("prompt", *(name for name in batch if batch.spec(name).kind in ("text", "json")), "prompt_ids")
    prompt = next((name for name in prompts if name in batch and name not in ("response", FINISH_REASON)), "")
    names = [prompt, "response" if "response" in batch else "response_ids", FINISH_REASON, "reward"]
    shown = [f"{name} {plain_text(_text(batch[name][0]), 300)}" for name in names if name in batch]
    return ", ".join(shown)


def _text(value: object) -> str:
    return repr(value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value)
