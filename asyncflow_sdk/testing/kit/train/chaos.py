"""A check of train engines in a real run, with a killed worker."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from typing import Any

import numpy as np

from ....plugins import import_path
from ....types import Checkpoint, Ragged, Sampling
from ....types import events as ev
from ....workflow import Rollout, Train, Workflow, read_steps
from .. import functions
from ..check import NotAsked, checks, expect
from .lab import TrainLab

STEPS, GROUPS, SIZE = 12, 4, 4
KILLED_AT = (1, 7)


class _Killer:
    """Kills the ready trainer after each of the given steps."""

    def __init__(self, at: tuple[int, ...]) -> None:
        self.at, self.pid, self.killed = list(at), 0, 0

    def __call__(self, event: Any) -> None:
        if isinstance(event, ev.WorkerState) and event.worker == "train-0" and event.state == "ready":
            self.pid = event.pid
        if isinstance(event, ev.StepTrained) and self.at and event.step >= self.at[0] and self.pid:
            self.at.pop(0)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
                self.killed += 1
            self.pid = 0


def killed(lab: TrainLab) -> None:
    """A run with a trainer killed twice, before its first checkpoint and after, trains every prompt once."""
    path = import_path(lab.make)
    if path is None:
        raise NotAsked("its factory is not in a module that a worker could import")
    lab.end()
    prompts = {tuple(prompt.tolist()): prompt for prompt in lab.policy.prompts(8 * STEPS * GROUPS, seed=70)}
    chosen = list(prompts.values())[: STEPS * GROUPS]
    engine, options = lab.policy.rollout
    flow = Workflow(
        prompts={"prompt_ids": Ragged.of(chosen)},
        rollout=Rollout(engine, group_size=SIZE, prompt="prompt_ids", sampling=Sampling(max_tokens=24), **options),
        reward=functions.odd,
        train=Train(path, model=lab.policy.folder, max_restarts=len(KILLED_AT) + 1, **lab.options),
        batch_size=GROUPS * SIZE,
        steps=STEPS,
        checkpoint=Checkpoint(every=4),
        seed=0,
    )
    killer = _Killer(KILLED_AT)
    with lab.folder() as folder:
        summary = flow.run(folder / "run", on_event=killer).summary
        trained = [(number, batch.ids, batch.ragged("prompt_ids")) for number, batch in read_steps(folder / "run")]
    all_killed = killer.killed == len(KILLED_AT)
    expect(all_killed, f"the run was through before its trainer was killed {len(KILLED_AT)} times")
    numbers = [number for number, _, _ in trained]
    expect(numbers == list(range(STEPS)), f"of {STEPS} steps these were trained: {numbers}")
    rows = np.concatenate([ids for _, ids, _ in trained])
    once = len(set(rows.tolist())) == len(rows) == STEPS * GROUPS * SIZE
    expect(once, "a row was trained in two steps, or in none")
    times = Counter(tuple(prompt.tolist()) for _, _, each in trained for prompt in each)
    odd = {prompt: count for prompt, count in times.items() if count != SIZE}
    expect(not odd and len(times) == len(chosen), f"prompts were trained another number of times than {SIZE}: {odd}")
    expect(summary["balanced"] and not summary["rows_live"], f"the books do not balance: {summary['rows']}")


CHECKS = checks("train", {
    killed: ("chaos", ("resume", "save_is_whole"),
        "after a crash the run trains rows twice or never, or does not go on at all",
        "save() and load() across processes: synced files, and no state of the dead process in load()"),
})  # fmt: skip
