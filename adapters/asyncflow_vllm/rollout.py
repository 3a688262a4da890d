"""VllmEngine: generates with vLLM, whose engine runs in processes of its own.

    af.Rollout("vllm", model="models/mine", tensor_parallel=2, max_rows=256)

New weights are not sent to vLLM: its workers are told where the bytes lie that the SDK has fetched and verified. See `weight_engine`.
"""

from __future__ import annotations

from typing import Any

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.types import check_least

from .checkpoint import Checkpoint
from .engine import VllmRollout
from .requests import Limits


class VllmEngine(VllmRollout):
    """``model``: a Hugging Face folder with safetensors. ``dtype``: vLLM's; "auto" is the folder's. ``max_rows``: responses generated at once
    (vLLM's max_num_seqs). ``context``: the most tokens of prompt and response; None: the model's. ``version``: what the
    folder's weights count as. ``options``: any other engine argument of vLLM (``gpu_memory_utilization``, ``enforce_eager``, ...).

    Log-probs are under the whole vocabulary at the request's temperature (at 1 for greedy), also where top-k or top-p cut the draw. A
    request with a seed repeats its tokens but for rounding, which in vLLM depends on what runs beside it.

    A version must be whole: all tensors of the folder, in its shapes, in its dtypes or in that of the engine.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        tensor_parallel: int = 1,
        max_rows: int = 256,
        context: int | None = None,
        version: int = 0,
        **options: Any,
    ) -> None:
        check_least(1, max_rows=max_rows, tensor_parallel=tensor_parallel)
        from .inside import Inside
        from .starting import arguments, swaps

        checkpoint, swap = Checkpoint(model), swaps()
        made = arguments(
            model, dtype=dtype, tensor_parallel=tensor_parallel, max_rows=max_rows, context=context, options=options
        )
        try:
            config = made.create_engine_config()
            inside = Inside(config, disable_log_stats=made.disable_log_stats)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"vLLM cannot be started with {model!r}: {type(error).__name__}: {error}") from error
        of = config.model_config
        checkpoint.dtype = str(of.dtype).removeprefix("torch.")
        limits = Limits(vocabulary=of.get_vocab_size(), context=of.max_model_len, rows=max_rows)
        super().__init__(inside, model, checkpoint, limits, version=version, swap=swap)
