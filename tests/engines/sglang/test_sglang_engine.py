"""SGLang in the process that uses it: the contract of rollout engines, and what it does to its process and its process to it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from typing import Any

import numpy as np
import one_server
import pytest
from processes import below, title

import asyncflow_sdk as af
from asyncflow_sdk.errors import EngineGone
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.testing.kit.conformance import BoundCheck, checks_of
from asyncflow_sdk.testing.kit.updates import HeldUpdate

CHECKS = [each.name for each in checks_of("rollout") if each.tier in ("basic", "full")]
kit = Conformance("rollout", "sglang-engine", options=one_server.INSIDE, only=CHECKS, limit_s=300.0)


@kit.parametrize
def test_an_engine_in_this_process_conforms(check: BoundCheck) -> None:
    check()


def version(number: int) -> HeldUpdate:
    from asyncflow_torch.reference import HuggingFacePolicy

    return HeldUpdate(number, HuggingFacePolicy(one_server.model()).tensors(number))


def request(max_tokens: int) -> af.Request:
    return af.Request(np.array([5, 6, 7], np.int32), af.Sampling(temperature=0.0, max_tokens=max_tokens))


async def scores(engine: Any) -> list[float]:
    """Of given tokens, by the weights that it holds."""
    return [float(each) for row in await engine.logprobs([[5, 6, 7]], [[8, 9, 10]]) for each in row]


def test_it_holds_what_came_names_what_it_lost_and_ends_nothing_that_is_not_its_own() -> None:
    from asyncflow_sglang.engine import SGLangEngine

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)}
    before = below(os.getpid())

    async def holds(engine: Any) -> list[list[float]]:
        found = [await scores(engine)]
        for number in (1, 2, 1):
            await engine.load_weights(version(number))
            found.append(await scores(engine))
        return found

    async def asks(engine: Any) -> None:
        while True:  # a request is under way at any moment, however fast the engine answers
            async for _ in engine.generate(request(240)):
                pass

    async def loses(engine: Any, pids: list[int]) -> None:
        running = asyncio.create_task(asks(engine))
        async for _ in engine.generate(request(1)):
            pass  # what was asked for before runs, too
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for what in (running, engine.load_weights(version(2)), asks(engine)):
            with pytest.raises(EngineGone, match=r"has lost process \d+, which ended with signal SIGKILL"):
                await what

    with asyncio.Runner() as runner, subprocess.Popen(["sleep", "600"]) as stranger:
        try:
            engine = SGLangEngine(one_server.model(), **one_server.INSIDE)
            declared = registry().get("rollout", "sglang-engine").spec
            flags = ("token_versions", "logprobs", "held_weights", "stop_texts")
            has = {flag for flag in flags if getattr(engine.capabilities, flag)}
            assert (set(declared.declared("swap") or ()), set(declared.declared("has") or ())) == (
                engine.capabilities.swap,
                has,
            )
            mine = below(os.getpid()) - before - {stranger.pid}
            try:
                zero, one, two, again = runner.run(asyncio.wait_for(holds(engine), 120))
                assert one == again
                assert len({tuple(each) for each in (zero, one, two)}) == 3
                assert {each: signal.getsignal(each) for each in handlers} == handlers
                runner.run(asyncio.wait_for(loses(engine, [pid for pid in mine if "scheduler" in title(pid)]), 120))
            finally:
                runner.run(engine.close())
            assert stranger.poll() is None
            assert not mine & below(os.getpid())
        finally:
            stranger.kill()


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"no_such_option": 1}, af.ConfigError, "no_such_option"),
        ({"host": "0.0.0.0"}, af.ConfigError, "'host' of SGLang is set by this adapter"),
    ],
)
def test_options_that_sglang_does_not_take_are_named(options: dict[str, Any], error: type, why: str) -> None:
    from asyncflow_sglang.engine import SGLangEngine

    with pytest.raises(error, match=why):
        SGLangEngine(one_server.model(), **options)
