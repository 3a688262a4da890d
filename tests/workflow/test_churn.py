"""Replicas come and go and are killed, while versions come in flight: no row is lost, and every token says which version drew it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import functions
import numpy as np
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.testing import EchoRollout, EchoTrain
from asyncflow_sdk.types import VersionSpan
from asyncflow_sdk.types.events import WorkerState

REPLICA: dict[str, Any] = {
    "in_flight": True, "token_s": 0.005, "delay_s": 0.0, "max_rows": 8, "group_size": 4, "prompt": "prompt_ids", "swap": "in_flight",
}  # fmt: skip
STEPS = 12
requested, begun, ended = threading.Event(), threading.Event(), threading.Event()


class Pausing(EchoRollout):
    """Take the requested pause in one request: draw the first token of its responses, wait until a newer version was loaded, and draw
    the other tokens."""

    loaded = -1

    async def load_weights(self, update: af.WeightUpdate) -> Set[str]:
        taken = await super().load_weights(update)
        self.loaded = update.version
        return taken

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        if not requested.is_set():
            async for completion in super().generate(request):
                yield completion
            return
        requested.clear()
        one = replace(request, sampling=replace(request.sampling, max_tokens=1))
        first = {completion.index: completion async for completion in super().generate(one)}
        newest = max(span.version for completion in first.values() for span in completion.spans)
        begun.set()
        while self.loaded <= newest:
            await asyncio.sleep(0.01)
        rest = replace(  # an echo's responses to one prompt are equal
            request,
            prompt_ids=np.concatenate([request.prompt_ids, first[0].token_ids]),
            sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - 1),
            drawn=request.drawn + 1,
        )
        async for completion in super().generate(rest):
            yield joined(first[completion.index], completion)
        ended.set()


def joined(first: af.Completion, second: af.Completion) -> af.Completion:
    """Return the response whose two parts different versions drew."""
    at = len(first.token_ids)
    return replace(
        second,
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        spans=[*first.spans, *(VersionSpan(span.version, at + span.start, at + span.end) for span in second.spans)],
    )


def check_spans(batch: af.Batch) -> int:
    """Each response says which versions drew it, one after another; how many were drawn by several."""
    mixed = 0
    for spans, ids in zip(batch.ragged("version_spans"), batch.ragged("response_ids"), strict=True):
        assert (spans[0, 1], spans[-1, 2]) == (0, len(ids))
        assert (spans[1:, 1] == spans[:-1, 2]).all()
        assert (np.diff(spans[:, 0]) > 0).all()
        mixed += len(spans) > 1
    return mixed


def test_versions_come_in_flight_while_replicas_are_killed_join_and_leave(tmp_path: Path) -> None:
    pids: dict[str, int] = {}

    def told(event: object) -> None:
        if isinstance(event, WorkerState) and event.state == "ready" and event.pid != os.getpid():
            pids[event.worker] = event.pid

    engine, rows, mixed = EchoTrain(), list[int](), 0
    for event in (begun, ended):
        event.clear()
    requested.set()
    with af.serve(tmp_path / "run", max_staleness=2, steps=STEPS, on_event=told) as run:
        # given a replica that pauses in its first request; a step later another one joins, which is a process
        run.start(af.Rollout("test_churn:Pausing", launcher="thread", **REPLICA))
        run.start(af.Stage(functions.length, task="reward", launcher="thread"))
        run.queue.put({"prompt_ids": af.Ragged.of([[n, n + 1] for n in range(STEPS * 4)])}, group_size=4)
        weights = run.weight_publisher("shm")
        weights.publish(0, engine.named_weights())

        def replicas() -> int:
            return sum(each.replica for each in run.queue.status().sessions)

        for step in run.consumer("train", batch_size=16):
            if step.index in (2, 8):  # when one is killed
                until(lambda: "rollout-1" in pids, "the replica to be there")
                os.kill(pids.pop("rollout-1"), signal.SIGKILL)
            if step.index == 5:  # others join, by a client of their own
                have, guest = replicas(), af.connect(tmp_path / "run")
                guest.start(af.Rollout("echo", launcher="thread", replicas=2, **REPLICA))
                until(lambda have=have: replicas() > have, "those that join")
            if step.index == 7:  # and leave: told to, or with who started them
                guest.scale("rollout", 1)
            if step.index == 9:
                guest.close()
            if not step.index:  # the next version comes while a response is drawn
                assert begun.wait(100)
            engine.train_step(step)  # raises for tokens that other weights made than those they name
            weights.publish(step.version + 1, engine.named_weights())
            if not step.index:
                assert ended.wait(100)
                run.start(af.Rollout("echo", task="rollout", max_restarts=50, **REPLICA))
            mixed += check_spans(step)
            assert step.version - 2 <= step.ragged("version_spans").values[:, 0].min()
            rows += step.ids.tolist()
            step.ack()
        # then
        assert run.audit().balanced
        assert run.audit().consumed == len(rows) == len(set(rows)) == STEPS * 16
    assert mixed, "no response was drawn by two versions"
