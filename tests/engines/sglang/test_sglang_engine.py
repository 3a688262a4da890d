"""SGLang in the process that uses it: the contract of rollout engines, and what it does to its process and its process to it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any, NamedTuple

import one_server
import pytest
from processes import below, title

import asyncflow_sdk as af
from asyncflow_sdk.errors import EngineGone
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.testing.kit.check import Check
from asyncflow_sdk.testing.kit.conformance import BoundCheck, checks_of

# The server's engine differs in its link; all checks of what both share are asked there.
OF_REQUESTS = ["capabilities", "completions", "logprobs", "bad_requests", "does_not_block", "abort", "whole_context"]
OF_LOADS = ["update", "stale_cache", "memory", "update_in_flight", "during_load", "interrupted", "scores"]
OF_THE_LINK = [*OF_REQUESTS, *OF_LOADS, "stop_texts", "sampling_mask"]
closing = Conformance("rollout", "sglang-engine", options=one_server.INSIDE, only=["closes"], limit_s=300.0)


class Inside(NamedTuple):
    """``lab``: of an engine in this process. ``handlers``, ``others``: handlers of signals, and processes, before it."""

    lab: Any
    handlers: dict[int, Any]
    others: set[int]


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    from asyncflow_sdk.testing.kit.rollout.lab import RolloutLab
    from asyncflow_sglang.engine import SGLangEngine
    from asyncflow_torch.reference import HuggingFacePolicy

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)}
    others = below(os.getpid())
    # On the main thread, where SGLang would set handlers.
    engine = SGLangEngine(one_server.model(), **one_server.INSIDE)
    lab = RolloutLab(lambda **_: engine, HuggingFacePolicy(one_server.model()), {}, limit_s=300.0)
    lab.start()
    yield Inside(lab, handlers, others)
    lab.close()


@pytest.mark.parametrize("check", [each for each in checks_of("rollout") if each.name in OF_THE_LINK], ids=str)
def test_an_engine_in_this_process_conforms(inside: Inside, check: Check) -> None:
    inside.lab.ask(check.body, f"check {check}")


def test_it_can_what_its_adapter_declares(inside: Inside) -> None:
    declared, can = registry().get("rollout", "sglang-engine").spec, inside.lab.engine.capabilities
    flags = ("token_versions", "logprobs", "held_weights", "stop_texts", "sampling_mask")
    has = {flag for flag in flags if getattr(can, flag)}
    assert (set(declared.declared("swap") or ()), set(declared.declared("has") or ())) == (can.swap, has)


async def asks(lab: Any) -> None:
    while True:  # a request is under way at any moment, however fast the engine answers
        await lab.answer(lab.request(lab.policy.prompts(1)[0], max_tokens=200))


def test_it_names_what_it_lost_and_ends_nothing_that_is_not_its_own(inside: Inside) -> None:
    """The last test of this engine."""

    async def loses(lab: Any) -> None:
        running = asyncio.create_task(asks(lab))
        await lab.answer(lab.request(lab.policy.prompts(1)[0], max_tokens=1))  # what was asked for before runs, too
        for pid in mine:
            if "scheduler" in title(pid):
                os.kill(pid, signal.SIGKILL)
        for what in (running, lab.update(), asks(lab)):
            with pytest.raises(EngineGone, match=r"has lost process \d+, which ended with signal SIGKILL"):
                await what

    with subprocess.Popen(["sleep", "600"]) as stranger:
        try:
            mine = below(os.getpid()) - inside.others - {stranger.pid}
            assert {each: signal.getsignal(each) for each in inside.handlers} == inside.handlers
            inside.lab.ask(loses, "the loss of a scheduler")
            inside.lab.close()
            assert stranger.poll() is None
            assert not mine & below(os.getpid())
        finally:
            stranger.kill()


@closing.parametrize
def test_an_engine_in_this_process_that_is_closed_leaves_nothing(check: BoundCheck) -> None:
    check()


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
