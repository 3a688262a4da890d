"""Learning rates of each step, by torch's own schedulers.

schedule = make_schedule(optimizer, "cosine", warmup_steps=10, max_steps=1000)
optimizer.step(); schedule.step()
go_to(schedule, 250)                                    # after a load: the rate of the 251st step
"""

from __future__ import annotations

import math
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.types import check_least

SCHEDULES = ("constant", "linear", "cosine")


def warmup_of(name: str, *, warmup_steps: int = 0, warmup_ratio: float = 0.0, max_steps: int | None = None) -> int:
    """Return the number of steps of the warm-up. Raises ConfigError for an impossible schedule."""
    if name not in SCHEDULES:
        raise ConfigError(f"lr_scheduler_type {name!r} is none of {', '.join(SCHEDULES)}")
    check_least(0, warmup_steps=warmup_steps)
    if not 0 <= warmup_ratio < 1:
        raise ConfigError(f"warmup_ratio is a share of max_steps, from 0 to below 1, not {warmup_ratio}")
    if max_steps is None and (warmup_ratio or name != "constant"):
        raise ConfigError(
            f"lr_scheduler_type={name!r} with warmup_ratio={warmup_ratio} needs max_steps, the optimizer steps of the"
            " run; a Workflow gives its own"
        )
    warmup = warmup_steps or math.ceil(warmup_ratio * (max_steps or 0))
    if name != "constant" and max_steps is not None and max_steps <= warmup:
        raise ConfigError(f"max_steps={max_steps} end before the {warmup} steps of the warm-up")
    return warmup


def make_schedule(optimizer: Any, name: str, *, max_steps: int | None = None, **warmup_options: Any) -> LambdaLR:
    """Return a schedule: the rate rises over ``warmup_steps`` steps, or over the share
    ``warmup_ratio`` of ``max_steps``, the first of them with a part of it; then it stays, or falls to
    0 until step ``max_steps``. Raises ConfigError."""
    warmup = warmup_of(name, max_steps=max_steps, **warmup_options)

    def factor(step: int) -> float:
        """Return the fraction of the full rate."""
        if step < warmup:
            return (step + 1) / warmup
        if name == "constant" or max_steps is None:
            return 1.0
        done = min(1.0, (step - warmup) / (max_steps - warmup))
        return 1.0 - done if name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)


def go_to(schedule: LambdaLR, steps: int) -> None:
    """Set the rate to that after ``steps`` steps."""
    schedule.last_epoch = steps
    of_each = zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True)
    for group, rate, factor in of_each:
        group["lr"] = rate * factor(steps)


def steps_made(optimizer: Any) -> int:
    """Return the number of steps of an Adam, by its state."""
    return max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)
