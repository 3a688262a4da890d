"""SGLangServer: generates with an SGLang server, one of its own or one that runs already.

af.Rollout("sglang", model="models/mine", server={"tp_size": 2, "mem_fraction_static": 0.8})
af.Rollout("sglang", model="models/mine", url="http://127.0.0.1:30000")
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping
from typing import Any

from asyncflow_http.calls import Calls, Dropped
from asyncflow_http.finding import Claim, call_now
from asyncflow_sdk.errors import AsyncFlowError, ConfigError, EngineError, EngineGone
from asyncflow_sdk.types import check_least
from asyncflow_sdk.types.dtypes import floating_name

from .arguments import own_arguments, own_environment, served
from .checkpoint import Checkpoint, served_checkpoint
from .info import ServerInfo
from .process import ServerProcess, free_port
from .requests import load_calls
from .rollout import SGLangRollout
from .serving import check_url, server_info

DEAD_S = 5.0


class SGLangServer(SGLangRollout):
    """``model``: a Hugging Face folder with weights in safetensors, which the server serves.

    ``server``: options of ``sglang.launch_server`` by their names, for a server of its own. It listens on this host alone, wants a
    key that nobody else has, has this process's environment, and ends with it. ``log``: a file that its output goes to. Or ``url``: a server that runs already and reads ``directory`` (this host's shared memory unless said otherwise);
    ``key_env``: the environment variable that holds its key. No one else may load weights into it.

    ``max_rows``: responses asked for at once. ``version``: what the weights in the folder count as. ``start_s``, ``request_s``,
    ``update_s``: how long a start, a response and a load may take; a server that takes longer counts as lost.
    """

    def __init__(
        self,
        model: str,
        *,
        server: Mapping[str, Any] | None = None,
        log: str | None = None,
        url: str | None = None,
        key_env: str | None = None,
        directory: str | None = None,
        max_rows: int = 256,
        version: int = 0,
        start_s: float = 600.0,
        request_s: float = 1800.0,
        update_s: float = 600.0,
    ) -> None:
        check_least(1, max_rows=max_rows)
        own = {"server": server, "log": log}
        if url is not None and any(value is not None for value in own.values()):
            raise ConfigError(
                f"url= names a server that runs already: {', '.join(own)} are of one that is to be started"
            )
        self._process: ServerProcess | None = None
        self._claim: Claim | None = None
        if url is None:
            calls, checkpoint, info = self._start(model, dict(server or {}), log, version, start_s)
        else:
            calls, checkpoint, info = self._attach(model, url, key_env, version, update_s)
        self._http = calls
        super().__init__(
            calls, checkpoint, info, context=checkpoint.context_of(info.max_req_input_len), directory=directory,
            max_rows=max_rows, request_s=request_s, update_s=update_s,
        )  # fmt: skip

    def _start(
        self, model: str, options: dict[str, Any], log: str | None, version: int, start_s: float
    ) -> tuple[Calls, Checkpoint, ServerInfo]:
        checkpoint, left = served(model, options)
        port, key = free_port(), secrets.token_hex(16)
        arguments = own_arguments(
            model, left, port=port, key=key, dtype=checkpoint.dtype, context=checkpoint.context, version=version
        )
        process = ServerProcess(arguments, own_environment(), log)
        try:
            process.wait_ready(port, start_s)
            calls = Calls(
                f"http://127.0.0.1:{port}", key, f"the SGLang server of this worker (process {process.pid})"
            )
            info = server_info(f"http://127.0.0.1:{port}", key)
            info.check(calls.name)
        except BaseException:
            process.close()
            raise
        self._process = process
        return calls, checkpoint, info

    def _attach(
        self, model: str, url: str, key_env: str | None, version: int, update_s: float
    ) -> tuple[Calls, Checkpoint, ServerInfo]:
        key = os.environ.get(key_env) if key_env is not None else None
        if key_env is not None and not key:
            raise ConfigError(f"key_env={key_env!r}: this environment variable of the worker is not set")
        at = check_url(url, key)
        name = f"the SGLang server at {at}"
        info = server_info(at, key)
        info.check(name)
        dtype = info.dtype
        if dtype == "auto":  # SGLang's own rule
            dtype = Checkpoint(model).dtype.replace("float32", "float16")
        checkpoint = Checkpoint(model, floating_name(dtype) or dtype)
        checkpoint.check_alike(served_checkpoint(info.model_path, info.revision, name), name)
        claim = Claim(at)
        # Whoever used it before may have left it paused, or on other weights.
        try:
            for path, body in load_calls(os.path.abspath(model), version, load_format="auto"):
                call_now(at, path, key, body, timeout_s=update_s)
        except BaseException:
            claim.close()
            raise
        self._claim = claim
        return Calls(at, key, name), checkpoint, info

    async def _what_is_lost(self, error: Dropped) -> AsyncFlowError:
        """A server that still answers others has failed one request, and no more."""
        if self._process is not None and await asyncio.to_thread(self._process.ended, DEAD_S):
            return EngineGone(f"{error}; {self._process.last_words()}")
        try:
            await self._http.get("/model_info", object, timeout_s=DEAD_S)
        except AsyncFlowError:
            return EngineGone(str(error))
        return EngineError(str(error))

    async def _closed_too(self) -> None:
        if self._process is not None:
            await asyncio.to_thread(self._process.close)
        if self._claim is not None:
            self._claim.close()
