"""SGLang in the process that uses it: the contract of rollout engines, and what it does to its process and its process to it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import one_server
import pytest

import asyncflow_sdk as af
from asyncflow_sdk._guard import descendants
from asyncflow_sdk.errors import EngineGone
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.testing.kit.conformance import BoundCheck, checks_of
from asyncflow_sdk.testing.kit.updates import HeldUpdate

# In one kit, since an engine takes a while to start: what the last check asks of one that is there already it need not start.
CHECKS = [each.name for each in checks_of("rollout") if each.tier in ("basic", "full") or each.name == "killed"]
kit = Conformance("rollout", "sglang-engine", options=one_server.INSIDE, only=CHECKS, limit_s=300.0)
any_order = Conformance("rollout", "sglang-engine", options=one_server.INSIDE, only=["any_order"], limit_s=80.0)


@kit.parametrize
def test_an_engine_in_this_process_conforms(check: BoundCheck) -> None:
    check()


@any_order.parametrize
def test_an_engine_in_this_process_conforms_in_any_order(check: BoundCheck) -> None:
    check()


def version(number: int) -> HeldUpdate:
    from asyncflow_torch.reference import HuggingFacePolicy

    return HeldUpdate(number, HuggingFacePolicy(one_server.model()).tensors(number))


def request(max_tokens: int) -> af.Request:
    return af.Request(np.array([5, 6, 7], np.int32), af.Sampling(temperature=0.0, max_tokens=max_tokens))


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def of_sglang(pids: Iterable[int]) -> set[int]:
    """Without the helper that Python keeps for as long as it runs itself."""
    return {pid for pid in pids if "resource_tracker" not in title(pid)}


async def checksum(engine: Any) -> str:
    return str((await engine._calls.post("/weights_checker", {"action": "checksum"}, dict))["per_engine_checksum"])


def test_it_holds_what_came_names_what_it_lost_and_ends_nothing_that_is_not_its_own() -> None:
    from asyncflow_sglang.engine import SGLangEngine

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)}
    before = set(descendants(os.getpid()))

    async def holds(engine: Any) -> list[str]:
        sums = [await checksum(engine)]
        for number in (1, 2, 1):
            await engine.load_weights(version(number))
            sums.append(await checksum(engine))
        return sums

    async def asks(engine: Any) -> None:
        async for _ in engine.generate(request(240)):
            pass

    async def loses(engine: Any, pids: list[int]) -> None:
        running = asyncio.create_task(asks(engine))
        while not any(asked.sent for asked in engine._asking._running):
            await asyncio.sleep(0)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for what in (running, engine.load_weights(version(2)), asks(engine)):
            with pytest.raises(EngineGone, match=r"has lost process \d+, which ended with signal SIGKILL"):
                await what

    with asyncio.Runner() as runner, subprocess.Popen(["sleep", "600"]) as stranger:
        try:
            engine = SGLangEngine(one_server.model(), **one_server.INSIDE)
            declared = registry().get("rollout", "sglang-engine").spec
            has = {
                flag for flag in ("token_versions", "logprobs", "held_weights") if getattr(engine.capabilities, flag)
            }
            assert (set(declared.declared("swap") or ()), set(declared.declared("has") or ())) == (
                engine.capabilities.swap,
                has,
            )
            mine = of_sglang(set(descendants(os.getpid())) - before - {stranger.pid})
            try:
                sums = runner.run(asyncio.wait_for(holds(engine), 120))
                assert sums[1] == sums[3]
                assert len(set(sums)) == 3
                assert {each: signal.getsignal(each) for each in handlers} == handlers
                runner.run(asyncio.wait_for(loses(engine, [pid for pid in mine if "scheduler" in title(pid)]), 120))
            finally:
                runner.run(engine.close())
            assert stranger.poll() is None
            assert not mine & set(descendants(os.getpid()))
        finally:
            stranger.kill()


def test_it_ends_with_a_worker_that_is_killed_and_leaves_no_memory(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import one_server
from asyncflow_sglang.engine import SGLangEngine
if __name__ == "__main__":
    engine = SGLangEngine({one_server.model()!r}, **one_server.INSIDE)
    print("started", flush=True)
    sys.stdin.read()
"""
    (tmp_path / "worker.py").write_text(code)
    files = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "worker.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        assert any("started" in line for line in worker.stdout)
        pids = descendants(worker.pid)
        assert len(pids) >= 2
        worker.kill()
    until = time.monotonic() + 60
    while left := [pid for pid in pids if os.path.exists(f"/proc/{pid}/exe")]:
        assert time.monotonic() < until, f"{left} live"
        time.sleep(0.05)
    assert not [name for name in set(os.listdir("/dev/shm")) - files if name.startswith("sgl")]


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"no_such_option": 1}, af.ConfigError, "no_such_option"),
        ({"host": "0.0.0.0"}, af.ConfigError, "'host' of SGLang is this adapter's to say"),
    ],
)
def test_options_that_sglang_does_not_take_are_named(options: dict[str, Any], error: type, why: str) -> None:
    from asyncflow_sglang.engine import SGLangEngine

    with pytest.raises(error, match=why):
        SGLangEngine(one_server.model(), **options)
