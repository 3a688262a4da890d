"""Learning rates of each step, by torch's own schedulers.

schedule = make_schedule(optimizer, "cosine", warmup_steps=10, decay_steps=1000)
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


def make_schedule(optimizer: Any, name: str, *, warmup_steps: int = 0, decay_steps: int | None = None) -> LambdaLR:
    """Return a schedule: the rate rises over ``warmup_steps`` steps, the first of them with a part
    of it; then it stays, or falls to 0 over ``decay_steps`` more. Raises ConfigError."""
    if name not in SCHEDULES:
        raise ConfigError(f"schedule {name!r} is none of {', '.join(SCHEDULES)}")
    check_least(0, warmup_steps=warmup_steps)
    if (name == "constant") != (decay_steps is None) or (decay_steps is not None and decay_steps < 1):
        raise ConfigError(
            f"schedule {name!r} with decay_steps={decay_steps}: linear and cosine need them, from 1; constant has"
            " none"
        )

    def factor(step: int) -> float:
        """Return the fraction of the full rate."""
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if decay_steps is None:
            return 1.0
        done = min(1.0, (step - warmup_steps) / decay_steps)
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
