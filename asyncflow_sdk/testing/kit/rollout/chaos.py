"""A check of rollout engines in a real run, with killed workers."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from ....plugins import import_path
from ....types import Batch, Ragged, Sampling, token_versions
from ....workflow import Rollout, Run, Stage, serve
from ....workflow.processes.worker_pool import Worker
from .. import functions
from ..check import NotAsked, checks, expect
from .lab import RolloutLab

STEPS, GROUPS, SIZE, STALENESS = 10, 4, 4, 1
NEEDS = ("prompt_ids", "response_ids", "logprobs", "version_spans", "reward")
KILLED_AT = {2: 0, 4: 1, 6: 0}
"""The replica killed after each step."""


def killed(lab: RolloutLab) -> None:
    """A run with killed replicas gets every response once, each token of its named version."""
    path = import_path(lab.make)
    if path is None:
        raise NotAsked("its factory is not in a module that a worker could import")
    size = min(SIZE, lab.had().rows)
    lab.renew()  # an engine may not like a second one beside it
    prompts = lab.policy.prompts(STEPS * GROUPS, seed=80)
    engine = Rollout(
        path,
        model=lab.policy.folder,
        replicas=2,
        group_size=size,
        prompt="prompt_ids",
        sampling=Sampling(max_tokens=24),
        max_restarts=len(KILLED_AT),
        **lab.options,
    )
    with (
        tempfile.TemporaryDirectory(prefix="asyncflow-check-") as folder,
        serve(Path(folder) / "run", max_staleness=STALENESS) as run,
    ):
        run.queue.put({"prompt_ids": Ragged.of(prompts)}, group_size=size)
        run.queue.end()
        replicas = run.start(engine)
        run.start(Stage(functions.odd, task="reward", gives=["reward"]))
        rows = _train(lab, run, replicas, GROUPS * size)
        audit = run.audit()
    whole = len(rows) == len(set(rows)) == STEPS * GROUPS * size
    expect(whole, f"{len(rows)} rows came, {len(set(rows))} different ones")
    expect(audit.balanced and not audit.live, f"the books do not balance: {audit}")


def _train(lab: RolloutLab, run: Run, replicas: list[Worker], batch_size: int) -> list[int]:
    rows: list[int] = []
    publisher = run.weight_publisher("shm")
    for number, step in enumerate(run.consumer("train", batch_size=batch_size, needs=NEEDS, timeout_s=lab.limit_s)):
        _look_at(lab, step, step.version)
        rows += step.ids.tolist()
        version = step.version + 1
        publisher.publish(version, dict(lab.policy.tensors(version)).items())
        step.ack()
        if number in KILLED_AT:
            expect(_kill(replicas[KILLED_AT[number]]), f"a replica was not there to be killed after step {number}")
    return rows


def _kill(worker: Worker) -> bool:
    """Kill a worker, once it has started, or again after its last end. True if it existed."""
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        with contextlib.suppress(ProcessLookupError):
            if worker.pid:
                os.kill(worker.pid, signal.SIGKILL)
                return True
        time.sleep(0.02)
    return False


def _look_at(lab: RolloutLab, batch: Batch, trained: int) -> None:
    """Compare each token's log-prob with its named version, and that version with the staleness bound."""
    columns: tuple[Any, ...] = tuple(batch.ragged(name) for name in ("prompt_ids", "response_ids", "logprobs"))
    for prompt, ids, have, named in zip(*columns, token_versions(batch.ragged("version_spans")), strict=True):
        older = f"step {trained} was given tokens of version {named.min()}: older than {STALENESS} versions"
        expect(trained - int(named.min()) <= STALENESS, older)
        for version in np.unique(named):
            of = np.flatnonzero(named == version)
            wanted = lab.policy.logprobs(int(version), np.asarray(prompt), np.asarray(ids))[of]
            apart = float(np.abs(np.asarray(have)[of] - wanted).max())
            said = f"tokens {of[0]} to {of[-1] + 1} are said to be of version {version}"
            expect(apart <= lab.tolerance, f"{said}, and their log-probs are up to {apart:.3g} from its")


CHECKS = checks("rollout", {
    killed: ("chaos", ("versions", "update"),
        "a crash of one replica loses rows, or its successor answers by outdated weights",
        "state of the dead process needed by the factory; weights must be loaded before the first answer"),
})  # fmt: skip
