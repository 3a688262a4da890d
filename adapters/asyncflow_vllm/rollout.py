"""VllmEngine: generates with vLLM, whose engine runs in processes of its own.

    af.Rollout("vllm", model="models/mine", tensor_parallel=2, max_rows=256)

New weights are not sent to vLLM: its workers map the bytes that the SDK has fetched and verified.
See `weight_engine`.
"""

from __future__ import annotations

from typing import Any

from asyncflow_http.limits import MAX_ROWS
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.types import check_least
from asyncflow_sdk.types.dtypes import floating_name
from asyncflow_sdk.workflow.model_folder import ModelFolder

from .engine import VllmRollout
from .requests import Limits

_REASONS = {
    "logprobs_mode": "log-probs are those of the contract",
    "generation_config": "defaults of a model folder would change what is drawn",
    "override_generation_config": "defaults would change what is drawn",
    "skip_tokenizer_init": "nothing is tokenised",
    "tokenizer": "nothing is tokenised",
    "weight_transfer_config": "weights come from the SDK",
    "worker_extension_cls": "the SDK sets it",
    "max_num_seqs": "say max_rows",
    "max_model_len": "use context",
    "tensor_parallel_size": "use tensor_parallel",
    "data_parallel_size": "use replicas= of the rollout",
    "speculative_config": "its log-probs have not been checked",
    "logits_processors": "log-probs would not be the policy's",
}


class VllmEngine(VllmRollout):
    """``model``: a Hugging Face folder with safetensors. ``dtype``: of vLLM; "auto" is the folder's.
    ``tensor_parallel``: ranks of one engine. ``max_rows``: responses generated at once (vLLM's max_num_seqs).
    ``context``: maximum of tokens of prompt and response; None: the model's. ``version``: of the folder's weights.
    ``options``: other engine arguments of vLLM (``gpu_memory_utilization``, ``enforce_eager``, ...).

    Log-probs are under the whole vocabulary at the request's temperature (at 1 for greedy), also with top-k or top-p.
    A request with a seed repeats its tokens up to rounding, which in vLLM depends on concurrent requests.

    A version must be whole: all tensors of the folder, in its shapes, in its dtypes or the engine's.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        tensor_parallel: int = 1,
        max_rows: int = MAX_ROWS,
        context: int | None = None,
        version: int = 0,
        **options: Any,
    ) -> None:
        self.check_options(model, dtype=dtype, max_rows=max_rows, tensor_parallel=tensor_parallel, **options)
        from .arguments import arguments, check_installed
        from .in_process import InProcessAccess

        folder = ModelFolder(model)
        check_installed()
        made = arguments(
            model, dtype=dtype, tensor_parallel=tensor_parallel, max_rows=max_rows, context=context, options=options
        )
        try:
            config = made.create_engine_config()
            access = InProcessAccess(config, disable_log_stats=made.disable_log_stats)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"vLLM cannot be started with {model!r}: {type(error).__name__}: {error}") from error
        of = config.model_config
        limits = Limits(vocabulary=of.get_vocab_size(), context=of.max_model_len, rows=max_rows)
        super().__init__(access, folder, str(of.dtype).removeprefix("torch."), limits, version=version)

    @staticmethod
    def check_options(
        model: str, *, dtype: str = "auto", max_rows: int = 1, tensor_parallel: int = 1, **options: Any
    ) -> None:
        """Raise ConfigError for values wrong anywhere and for options set by the SDK, before a worker starts."""
        check_least(1, max_rows=max_rows, tensor_parallel=tensor_parallel)
        if dtype != "auto" and not floating_name(dtype):
            raise ConfigError(f"dtype {dtype!r} is none of vLLM: say auto, bfloat16, float16 or float32")
        for name in _REASONS.keys() & options.keys():
            raise ConfigError(f"option {name!r} of vLLM cannot be set here: {_REASONS[name]}")
