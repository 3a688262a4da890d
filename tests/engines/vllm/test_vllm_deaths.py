"""A vLLM that dies is told of, and nothing waits for it; one whose worker dies, dies too."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from vllm_options import OPTIONS

from asyncflow_sdk._guard import descendants
from asyncflow_sdk.errors import EngineGone

STARTS = """
import json, sys
from asyncflow_vllm.rollout import VllmEngine

if __name__ == "__main__":
    engine = VllmEngine(sys.argv[1], **json.loads(sys.argv[2]))
    print("STARTED", flush=True)
    sys.stdin.read()
"""


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def of_vllm(pid: int) -> list[int]:
    """The processes below one, but for the helper that Python keeps for as long as it runs itself."""
    return [each for each in descendants(pid) if "resource_tracker" not in _title(each)]


def gone(pids: list[int], within_s: float = 60.0) -> list[int]:
    """Those that are still there when the time is over; what has ended and was not waited for counts as gone."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        pids = [pid for pid in pids if _lives(pid)]
        if not pids:
            break
        time.sleep(0.1)
    return pids


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_worker_that_is_killed_takes_vllm_with_it(tied: Any, tmp_path: Path) -> None:
    script = tmp_path / "starts.py"
    script.write_text(STARTS)
    with subprocess.Popen(
        [sys.executable, str(script), tied.policy.folder, json.dumps(OPTIONS)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as worker:  # fmt: skip
        assert worker.stdout is not None
        assert any("STARTED" in line for line in worker.stdout)
        pids = of_vllm(worker.pid)
        os.kill(worker.pid, signal.SIGKILL)
        assert len(pids) >= 2
        assert gone(pids) == []


def test_a_dead_core_is_named_by_all_that_is_asked_of_it(tied: Any) -> None:
    async def body(lab: Any) -> None:
        await lab.check_greedy(lab.policy.prompts(2))
        children = of_vllm(os.getpid())
        (core,) = [pid for pid in children if "EngineCore" in _title(pid)]
        running = asyncio.create_task(
            lab.answer(lab.request(lab.policy.prompts(1)[0], 4, temperature=1.0, max_tokens=480))
        )
        while not lab.engine._running:  # and no longer, or all may have ended
            await asyncio.sleep(0)
        loading = asyncio.create_task(lab.update())
        os.kill(core, signal.SIGKILL)
        for waiting in (running, loading):
            with pytest.raises(EngineGone, match="EngineCore has died"):
                await waiting
        with pytest.raises(EngineGone, match="EngineCore has died"):
            await lab.check_greedy(lab.policy.prompts(1))
        with pytest.raises(EngineGone, match="EngineCore has died"):
            await lab.update()
        with pytest.raises(EngineGone, match="EngineCore has died"):
            await lab.engine.logprobs([[5]], [[6]])
        await lab.close_engine()
        assert gone(children) == []

    tied.ask(body, "a core that is killed")
