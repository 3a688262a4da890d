"""SGLangServer: generates with an SGLang server, started by the engine or already running.

af.Rollout("sglang", model="models/mine", server={"tp_size": 2, "mem_fraction_static": 0.8})
af.Rollout("sglang", model="models/mine", url="http://127.0.0.1:30000")
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from asyncflow_http.limits import MAX_ROWS, RESPONSE_S, START_S, UPDATE_S
from asyncflow_http.server import HttpServer
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.types import check_least
from asyncflow_sdk.types.dtypes import floating_name
from asyncflow_sdk.workflow.processes.ranks import free_port

from .arguments import folder_and_options, own_arguments, own_environment
from .info import ServerInfo
from .process import SGLangProcess
from .requests import load_calls
from .rollout import SGLangRollout
from .served_folder import ServedFolder, folder_of_server

_HEALTH = "/model_info"


class SGLangServer(SGLangRollout):
    """``model``: a Hugging Face folder with safetensors, served by the server.

    ``server``: options of ``sglang.launch_server`` for a server of the engine's own. It listens on this host only,
    requires a random key, has this process's environment, and ends with it. ``log``: file for its output. ``url``: a
    running server instead; nobody else may load weights into it. ``key_env``: environment variable with its key.
    ``directory``: versions are written there, and the server must be able to read it; None: this host's shared
    memory.

    ``max_rows``: concurrent responses. ``version``: of the folder's weights. ``start_s``, ``request_s``,
    ``update_s``: time limits of a start, a response and each call of a load; a slower server counts as lost.
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
        max_rows: int = MAX_ROWS,
        version: int = 0,
        start_s: float = START_S,
        request_s: float = RESPONSE_S,
        update_s: float = UPDATE_S,
    ) -> None:
        check_least(1, max_rows=max_rows)
        if url is None:
            found = _start(model, dict(server or {}), log, version, start_s)
        elif server is not None or log is not None:
            raise ConfigError("url= names a server that runs already: server, log are of one that is to be started")
        else:
            found = _attach(model, url, key_env, version, update_s)
        super().__init__(*found, directory=directory, max_rows=max_rows, request_s=request_s, update_s=update_s)


def _start(
    model: str, options: dict[str, Any], log: str | None, version: int, start_s: float
) -> tuple[HttpServer, ServedFolder, ServerInfo]:
    folder, left = folder_and_options(model, options)
    port, key = free_port(), secrets.token_hex(16)
    arguments = own_arguments(
        model, left, port=port, key=key, dtype=folder.dtype, context=folder.context, version=version
    )
    process = SGLangProcess(arguments, own_environment(), log)
    try:
        process.wait_ready(port, start_s)
        name = f"the SGLang server of this worker (process {process.pid})"
        server = HttpServer(f"http://127.0.0.1:{port}", key, name, health=_HEALTH, process=process)
        return server, folder, _checked_info(server)
    except BaseException:
        process.close()
        raise


def _attach(
    model: str, url: str, key_env: str | None, version: int, update_s: float
) -> tuple[HttpServer, ServedFolder, ServerInfo]:
    server = HttpServer.running(url, key_env, "SGLang", health=_HEALTH)
    if not server.key and not server.is_local:  # clients of an SGLang server without a key can run code in it
        raise ConfigError(
            f"url={url!r} is another host, and there is no key: start that server with --api-key, and name the"
            " environment variable that holds the key with key_env="
        )
    info = _checked_info(server)
    dtype = info.dtype
    if dtype == "auto":  # SGLang's own rule
        dtype = ServedFolder(model).dtype.replace("float32", "float16")
    folder = ServedFolder(model, floating_name(dtype) or dtype)
    folder.check_alike(folder_of_server(info.model_path, info.revision, server.name), server.name)
    server.claim()
    calls = load_calls(os.path.abspath(model), version, load_format="auto")

    async def load() -> None:
        for path, body in calls:
            await server.post(path, body, object, timeout_s=update_s)

    try:
        server.wait_for(load())  # the last user may have left the server paused, or with other weights
    except BaseException:
        server.release()
        raise
    return server, folder, info


def _checked_info(server: HttpServer) -> ServerInfo:
    info = server.wait_for(server.describe("/server_info", ServerInfo, "SGLang"))
    info.check(server.name)
    return info
