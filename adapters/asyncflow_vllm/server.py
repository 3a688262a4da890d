"""VllmServer: generates with a vLLM server that already runs on this host.

    VLLM_SERVER_DEV_MODE=1 vllm serve models/mine --enable-scale-out --logprobs-mode processed_logprobs \\
      --weight-transfer-config '{"backend": "asyncflow"}' --worker-extension-cls asyncflow_vllm.worker.WorkerExtension

    af.Rollout("vllm-server", model="models/mine", url="http://127.0.0.1:8000")

The environment of the server has this package; that of the engine needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from asyncflow_http.client import RequestRefused
from asyncflow_http.limits import MAX_ROWS, RESPONSE_S, UPDATE_S
from asyncflow_http.server import HttpServer
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.types import check_least
from asyncflow_sdk.workflow.model_folder import ModelFolder

from .engine import VllmRollout
from .folder import FolderWeights
from .http import GENERATE, HttpAccess
from .registration import BACKEND
from .requests import Limits

EXTENSION = "asyncflow_vllm.worker.WorkerExtension"


class _Model(msgspec.Struct):
    max_model_len: int
    dtype: str
    logprobs_mode: str


class _Parallel(msgspec.Struct):
    worker_extension_cls: str = ""
    data_parallel_size: int = 1
    nnodes: int = 1
    api_process_count: int = msgspec.field(name="_api_process_count", default=1)


class _Transfer(msgspec.Struct):
    backend: str


class _Config(msgspec.Struct):
    model_config: _Model
    parallel_config: _Parallel
    weight_transfer_config: _Transfer | None = None
    speculative_config: object = None
    lora_config: object = None
    watermark_config: object = None
    kv_transfer_config: object = None

    def problems(self) -> list[str]:
        """Return the reasons why versions cannot be loaded or log-probs are not a trainer's."""
        backend = self.weight_transfer_config.backend if self.weight_transfer_config else "none"
        parallel, mode = self.parallel_config, self.model_config.logprobs_mode
        found = {
            f"its weights come by {backend!r}: start it with --weight-transfer-config"
            f" '{{\"backend\": \"{BACKEND}\"}}',"
            " in an environment that has asyncflow-sdk": backend != BACKEND,
            f"its workers do not say what they loaded: --worker-extension-cls {EXTENSION}":
                parallel.worker_extension_cls != EXTENSION,
            f"its log-probs are {mode!r}, before the temperature: --logprobs-mode processed_logprobs":
                mode != "processed_logprobs",
            "it has several front ends or replicas, and a pause reaches only one":
                parallel.data_parallel_size != 1 or parallel.api_process_count != 1,
            "its workers are on several hosts, and the weights on this one": parallel.nnodes != 1,
            "it drafts tokens, and a version has no weights for its draft model": self.speculative_config is not None,
            "it serves LoRA adapters, and a version has no weights for them": self.lora_config is not None,
            "it marks what it draws": self.watermark_config is not None,
            "its cache is shared with others and outlives a version": self.kv_transfer_config is not None,
        }  # fmt: skip
        return [reason for reason, holds in found.items() if holds]


class _Description(msgspec.Struct):
    """Used fields of /server_info."""

    vllm_config: _Config


class VllmServer(VllmRollout):
    """``model``: the server's Hugging Face folder with safetensors. ``url``: of the server. ``key_env``: environment
    variable with its --api-key. ``max_rows``: concurrent responses. ``version``: of the folder's weights, which are
    loaded when the engine is made. ``request_s``, ``update_s``: time limits of a response and of each call of a load;
    a slower server counts as lost.

    One engine of this host has the server; others are refused. All else is as with ``vllm``. Calls
    raise EngineGone once the server is lost.
    """

    def __init__(
        self,
        model: str,
        *,
        url: str,
        key_env: str | None = None,
        max_rows: int = MAX_ROWS,
        version: int = 0,
        request_s: float = RESPONSE_S,
        update_s: float = UPDATE_S,
    ) -> None:
        check_least(1, max_rows=max_rows)
        server = HttpServer.running(url, key_env, "vLLM", health="/health")
        if not server.is_local:
            raise ConfigError(
                f"url={url!r} is another host: vLLM's routes for weights ask for no key, and its workers map the"
                " weights in the memory of this host; run the rollout worker there (asyncflow worker), and give"
                " it a loopback address"
            )
        folder = ModelFolder(model)
        served = server.wait_for(_checked(server)).model_config
        limits = Limits(vocabulary=folder.vocabulary, context=served.max_model_len, rows=max_rows)
        server.claim()
        access = HttpAccess(server, request_s=request_s, update_s=update_s)
        try:
            server.wait_for(access.load_folder(FolderWeights(folder, version)))
        except BaseException:
            server.release()
            raise
        super().__init__(access, folder, served.dtype.removeprefix("torch."), limits, version=version)


async def _checked(server: HttpServer) -> _Config:
    """Return the server's configuration. Raises ConfigError with all reasons why an engine cannot use the server."""
    problems = await _token_problems(server)
    try:
        found = await server.describe("/server_info?config_format=json", _Description, "vLLM")
    except RequestRefused as error:
        if error.status != 404:
            raise
        problems.append("it has no routes for new weights: start it with VLLM_SERVER_DEV_MODE=1 in its environment")
        raise _unusable(server, problems) from None
    problems += found.vllm_config.problems()
    if problems:
        raise _unusable(server, problems)
    return found.vllm_config


async def _token_problems(server: HttpServer) -> list[str]:
    """Return why the server accepts no token ids from this engine, found by an empty request."""
    try:
        await server.client.post(GENERATE, {}, object)
    except RequestRefused as error:
        if error.status == 401:
            asked = "it has another key than that in key_env=" if server.key else "it asks for a key: say key_env="
            return [f"{asked}, the environment variable that holds its --api-key"]
        if error.status in (403, 404):
            return ["it takes no token ids: start it with --enable-scale-out"]
        if error.status >= 500:
            raise
    return []


def _unusable(server: HttpServer, problems: Sequence[str]) -> ConfigError:
    return ConfigError(f"{server.name} cannot be used: " + "; ".join(problems))
