"""How SGLang runs on this CPU, and one server that several engines use one after another."""

from __future__ import annotations

import atexit
import functools
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

SERVER = {
    "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "dtype": "float32",
    "max_total_tokens": 8192, "max_running_requests": 32, "mem_fraction_static": 0.5, "sleep_on_idle": True,
}  # fmt: skip
OWN: dict[str, Any] = {"server": SERVER, "max_rows": 32}
"""Options of an engine with a server of its own."""
INSIDE: dict[str, Any] = {**SERVER, "max_rows": 32}
"""Options of an engine in the process that makes it."""


class Server(NamedTuple):
    """``options``: of an engine that uses it."""

    url: str
    options: dict[str, Any]
    process: Any


@functools.cache
def model() -> str:
    """The conformance kit's."""
    from asyncflow_torch.kit_model import kit_model

    folder = tempfile.TemporaryDirectory(prefix="asyncflow-sglang-model-")
    atexit.register(folder.cleanup)
    return kit_model(Path(folder.name))


@functools.cache
def server() -> Server:
    """The one that is shared, of models like the kit's: there until this process ends."""
    from asyncflow_sdk.workflow.processes.ranks import free_port
    from asyncflow_sglang.arguments import own_arguments, own_environment
    from asyncflow_sglang.process import SGLangProcess

    port, key = free_port(), secrets.token_hex(8)
    url, key_env = f"http://127.0.0.1:{port}", f"ASYNCFLOW_TEST_SGLANG_KEY_{port}"
    options = {name: value for name, value in SERVER.items() if name != "dtype"}
    arguments = own_arguments(model(), options, port=port, key=key, dtype="float32", context=256, version=0)
    process = SGLangProcess(arguments, own_environment())
    atexit.register(process.close)
    process.wait_ready(port, 600.0)
    os.environ[key_env] = key
    return Server(url, {"url": url, "key_env": key_env, "max_rows": 32}, process)


def attached(model: str, **options: Any) -> Any:
    from asyncflow_sglang.server import SGLangServer

    return SGLangServer(model, **{**server().options, **options})
