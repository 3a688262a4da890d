"""VllmServer: generates with a vLLM server that runs already, on this host.

    VLLM_SERVER_DEV_MODE=1 vllm serve models/mine --enable-scale-out --logprobs-mode processed_logprobs \\
      --weight-transfer-config '{"backend": "asyncflow"}' --worker-extension-cls asyncflow_vllm.worker.WorkerExtension

    af.Rollout("vllm-server", model="models/mine", url="http://127.0.0.1:8000")

The environment of the server has this package; that of the engine needs no vLLM.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncflow_http.calls import Calls, Refused, base_url, is_loopback
from asyncflow_http.finding import Claim, call_now
from asyncflow_sdk.errors import ConfigError, EngineError, WeightError
from asyncflow_sdk.types import check_least
from asyncflow_sdk.weights import Handover

from .checkpoint import Checkpoint
from .engine import VllmRollout
from .folder import FolderWeights
from .registering import BACKEND
from .requests import Limits
from .served import OUTCOME, PAUSE, RESUME, WHOLE, Outcomes, Said, Served, naming, takes

EXTENSION = "asyncflow_vllm.worker.WorkerExtension"
INFO_BYTES, INFO_S = 16 << 20, 120.0


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


class ServerInfo(msgspec.Struct):
    """Of /server_info: what it was started with, as far as it matters here."""

    vllm_config: _Config

    def check(self, name: str, doors: Sequence[str] = ()) -> None:
        """Raise ConfigError, with all reasons, unless versions can be loaded into it and its log-probs are a trainer's. ``doors``:
        reasons that are known already."""
        config, problems = self.vllm_config, list(doors)
        backend = config.weight_transfer_config.backend if config.weight_transfer_config else "none"
        if backend != BACKEND:
            problems.append(
                f'its weights come by {backend!r}: start it with --weight-transfer-config \'{{"backend": "{BACKEND}"}}\', in an'
                " environment that has asyncflow-sdk"
            )
        parallel = config.parallel_config
        if parallel.worker_extension_cls != EXTENSION:
            problems.append(f"its workers do not say what they loaded: --worker-extension-cls {EXTENSION}")
        if config.model_config.logprobs_mode != "processed_logprobs":
            problems.append(
                f"its log-probs are {config.model_config.logprobs_mode!r}, before the temperature: --logprobs-mode processed_logprobs"
            )
        if parallel.data_parallel_size != 1 or parallel.api_process_count != 1:
            problems.append("it has several front ends or replicas, of which only one would hear of a pause")
        if parallel.nnodes != 1:
            problems.append("its workers are on several hosts, and the weights on this one")
        for what, why in (
            (config.speculative_config, "it drafts tokens, and a version has no weights for its draft model"),
            (config.lora_config, "it serves LoRA adapters, of which a version has no weights"),
            (config.watermark_config, "it marks what it draws"),
            (config.kv_transfer_config, "its cache is shared with others and outlives a version"),
        ):
            if what is not None:
                problems.append(why)
        if problems:
            raise _unusable(name, problems)


def _unusable(name: str, problems: Sequence[str]) -> ConfigError:
    return ConfigError(f"{name} cannot be used: " + "; ".join(problems))


class VllmServer(VllmRollout):
    """``model``: the Hugging Face folder with safetensors that the server serves. ``url``: where. ``key_env``: the environment variable that
    holds its --api-key. ``max_rows``: responses asked for at once. ``version``: what the weights in the folder count as: they
    are loaded when the engine is made, whatever the server was left on. ``request_s``, ``update_s``: how long a response and a call
    of a load may take; a server that takes longer counts as lost.

    The server is one engine's: another that asks for it on this host is refused. All else is as with ``vllm``. A server
    that is lost raises EngineGone in whatever waits for it.
    """

    def __init__(
        self,
        model: str,
        *,
        url: str,
        key_env: str | None = None,
        max_rows: int = 256,
        version: int = 0,
        request_s: float = 1800.0,
        update_s: float = 600.0,
    ) -> None:
        check_least(1, max_rows=max_rows)
        key = os.environ.get(key_env) if key_env is not None else None
        if key_env is not None and not key:
            raise ConfigError(f"key_env={key_env!r}: this environment variable of the worker is not set")
        at = base_url(url)
        if not is_loopback(at):
            raise ConfigError(
                f"url={url!r} is another host: vLLM's routes for weights ask for no key, and its workers map the weights in the"
                " memory of this host; run the rollout worker there (asyncflow worker), and give it a loopback address"
            )
        checkpoint, name = Checkpoint(model), f"the vLLM server at {at}"
        doors, info = _no_tokens(at, key), _server_info(at, key)
        if info is None:
            doors.append("it has no routes for new weights: start it with VLLM_SERVER_DEV_MODE=1 in its environment")
            raise _unusable(name, doors)
        info.check(name, doors)
        of = info.vllm_config.model_config
        checkpoint.dtype = of.dtype.removeprefix("torch.")
        limits = Limits(vocabulary=_vocabulary(model), context=of.max_model_len, rows=max_rows)
        claim = Claim(at)
        try:
            cuts = _first_version(at, key, FolderWeights(model, checkpoint, version), update_s)
        except BaseException:
            claim.close()
            raise
        served = Served(Calls(at, key, name), claim, cuts=cuts, request_s=request_s, update_s=update_s)
        super().__init__(served, model, checkpoint, limits, version=version)


def _server_info(url: str, key: str | None) -> ServerInfo | None:
    """None of a server that does not say."""
    try:
        said = call_now(url, "/server_info?config_format=json", key, timeout_s=INFO_S, most_bytes=INFO_BYTES)
    except Refused as error:
        if error.status != 404:
            raise
        return None
    try:
        return msgspec.json.decode(said, type=ServerInfo)
    except msgspec.DecodeError as error:
        raise ConfigError(f"what answers at {url} is no vLLM server that this adapter knows: {error}") from None


def _no_tokens(url: str, key: str | None) -> list[str]:
    """Why it would take no token ids from here. Asked for nothing, so that nothing is generated."""
    try:
        call_now(url, "/inference/v1/generate", key, {})
    except Refused as error:
        if error.status == 401:
            asked = "it asks for a key: say key_env=" if key is None else "it has another key than that in key_env="
            return [f"{asked}, the environment variable that holds its --api-key"]
        if error.status in (403, 404):
            return ["it takes no token ids: start it with --enable-scale-out"]
        if error.status >= 500:
            raise
    return []


def _first_version(url: str, key: str | None, weights: FolderWeights, update_s: float) -> bool:
    """Load the folder's weights into a server that others may have left paused, or on other weights. Whether its log-probs are right
    where a draw is cut."""
    handover = Handover()
    try:
        with handover.give(weights) as told:
            for path, body in (PAUSE, *takes(told)):
                call_now(url, path, key, body, timeout_s=update_s)
            path, body = OUTCOME
            outcomes = msgspec.json.decode(call_now(url, path, key, body, most_bytes=INFO_BYTES), type=Outcomes)
        failures = [each.failure for each in outcomes.results if each.failure]
        if failures:
            raise WeightError(f"the weights in the model folder could not be loaded: {'; '.join(failures)}")
        path, body = WHOLE
        said = msgspec.json.decode(call_now(url, path, key, body), type=Said)
        for path, body in (naming(weights.version), RESUME):
            call_now(url, path, key, body)
        return said.all_true
    except msgspec.DecodeError as error:
        raise EngineError(f"{url}{path} answered what cannot be read: {error}") from None
    finally:
        handover.close()


def _vocabulary(folder: str) -> int:
    try:
        config = json.loads(Path(folder, "config.json").read_bytes())
        text = config | next((config[key] for key in ("text_config", "llm_config") if key in config), {})
        return int(text["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model folder {folder!r} has no config.json that says a vocab_size: {error!r}") from None
