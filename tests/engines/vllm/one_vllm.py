"""With which options vLLM is started in tests: small, and without compiling; and one server, which several engines use one after another."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from waiting import until

from asyncflow_sdk.workflow.processes.ranks import free_port

OPTIONS = {"dtype": "float32", "max_rows": 32, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
ARGUMENTS = [
    "--dtype", "float32", "--max-num-seqs", "32", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20),
    "--skip-tokenizer-init",
]  # fmt: skip
WANTED = [
    "--logprobs-mode", "processed_logprobs", "--weight-transfer-config", '{"backend": "asyncflow"}',
    "--worker-extension-cls", "asyncflow_vllm.worker.WorkerExtension",
]  # fmt: skip
"""What an engine wants of a server."""
KEY_ENV, KEY = "ASYNCFLOW_TEST_VLLM_KEY", "a-key"
"""Where its key is, and what it is."""


class Server:
    """``arguments``: beside those above. It is there when it is made, and ends with ``close``."""

    def __init__(self, model: str, arguments: list[str], **env: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        place = ["--host", "127.0.0.1", "--port", str(port), "--model", model]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *place, *ARGUMENTS, *arguments],
            env={**os.environ, **env}, stdout=self._log, stderr=self._log, start_new_session=True,
        )  # fmt: skip
        try:
            until(lambda: self.process.poll() is not None or self._answers(), "the vLLM server", 300)
            said = os.pread(self._log.fileno(), 1 << 24, 0).decode(errors="replace")
            assert self.process.poll() is None, f"the vLLM server did not start:\n{said[-5000:]}"
        except AssertionError:
            self.close()
            raise

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5):
                return True
        except OSError:
            return False


_started: dict[bytes, Server] = {}


def server(folder: str) -> Server:
    """The one for models like that in ``folder``, which is there until this process ends."""
    config = Path(folder, "config.json").read_bytes()
    if config not in _started:
        made = Server(folder, ["--enable-scale-out", "--api-key", KEY, *WANTED], VLLM_SERVER_DEV_MODE="1")
        atexit.register(made.close)
        _started[config] = made
    return _started[config]


def attached(model: str, **options: Any) -> Any:
    from asyncflow_vllm.server import VllmServer

    os.environ[KEY_ENV] = KEY
    return VllmServer(model, **{"url": server(model).url, "key_env": KEY_ENV, "max_rows": 32, **options})


async def ask_until_an_error(lab: Any, request: Any) -> None:
    """A request is under way at any moment, however fast the engine answers."""
    while True:
        await lab.answer(request)
