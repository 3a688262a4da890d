"""A vLLM that dies is told of, and nothing waits for it; one whose worker dies, dies too. The last module that uses the shared engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from one_vllm import OPTIONS, ask_until_an_error
from processes import below, title, wait_gone

from asyncflow_sdk.errors import EngineGone

STARTS = """
import json, sys
from asyncflow_vllm.rollout import VllmEngine

if __name__ == "__main__":
    engine = VllmEngine(sys.argv[1], **json.loads(sys.argv[2]))
    print("STARTED", flush=True)
    sys.stdin.read()
"""


def test_a_worker_that_is_killed_takes_vllm_with_it(tied: Any, tmp_path: Path) -> None:
    script = tmp_path / "starts.py"
    script.write_text(STARTS)
    with subprocess.Popen(
        [sys.executable, str(script), tied.policy.folder, json.dumps(OPTIONS)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as worker:  # fmt: skip
        assert worker.stdout is not None
        assert any("STARTED" in line for line in worker.stdout)
        pids = below(worker.pid)
        os.kill(worker.pid, signal.SIGKILL)
        assert len(pids) >= 2
        wait_gone(pids)


def test_a_dead_core_is_named_by_all_that_is_asked_of_it(tied: Any) -> None:
    async def body(lab: Any) -> None:
        await lab.check_greedy(lab.policy.prompts(2))
        children = below(os.getpid())
        # a server of another test, if one still runs, has a session of its own
        (core,) = [pid for pid in children if "EngineCore" in title(pid) and os.getsid(pid) == os.getsid(0)]
        endless = lab.request(lab.policy.prompts(1)[0], 4, temperature=1.0, max_tokens=480)
        running = asyncio.create_task(ask_until_an_error(lab, endless))
        await lab.answer(lab.request(lab.policy.prompts(1)[0], max_tokens=1))  # what was asked for before runs, too
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
        wait_gone(children)

    tied.ask(body, "a core that is killed")
