"""DeepSpeed's configuration: the engine's options, and the user's additions.

config = make_config(stage=3, dtype="bfloat16", max_grad_norm=1.0, offload_optimizer=False,
                     given={"zero_optimization": {"stage3_prefetch_bucket_size": 1_000_000}})
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from asyncflow_sdk.errors import ConfigError

STAGES = (0, 1, 2, 3)
_REFUSED = {
    "optimizer": "the engine steps by AdamW: give it learning_rate, betas and weight_decay",
    "scheduler": "give the engine lr_scheduler_type, warmup_steps and max_steps",
    "train_batch_size": "the run says which rows a step has",
    "train_micro_batch_size_per_gpu": "a pass has as many rows as micro_batch_tokens allows",
    "gradient_accumulation_steps": "a step has as many passes as micro_batch_tokens makes of it",
    "managed_gradient_accumulation": "the engine says which pass is a step's last",
    "fp16": "its loss scaling leaves steps out: use dtype 'bfloat16' or 'float32'",
    "amp": "give the engine a dtype",
    "torch_autocast": "give the engine a dtype",
    "gradient_predivide_factor": "gradients are sums over all ranks",
    "prescale_gradients": "gradients are sums over all ranks",
    "tensor_parallel": "ranks are data-parallel only",
    "sequence_parallel_size": "ranks are data-parallel only",
    "data_parallel_size": "ranks are data-parallel only",
    "elasticity": "a run starts as many ranks as its trainer asks for",
    "compression_training": "what is published is what is trained",
    "curriculum_learning": "the run says which rows a step has",
    "data_efficiency": "the run says which rows a step has",
    "progressive_layer_drop": "the ratio to the policy that generated would be noise",
    "hybrid_engine": "rollouts are another engine's",
}
_REFUSED_OF_ZERO = {
    "mics_shard_size": "parameters are cut over all ranks",
    "zero_hpz_partition_size": "parameters are cut over all ranks",
    "zero_quantized_weights": "what is published is what is trained",
    "zenflow": "a step is made when it is called",
    "super_offload": "the engine steps by torch's AdamW",
}


def make_config(
    *, stage: int, dtype: str, max_grad_norm: float, offload_optimizer: bool, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    """``given``: a DeepSpeed configuration; "auto" in it stands for the engine's option. Raises
    ConfigError for contradictions to the engine's options, and for unsupported settings."""
    if stage not in STAGES:
        raise ConfigError(f"stage must be one of {', '.join(map(str, STAGES))}, not {stage!r}")
    if offload_optimizer and not stage:
        raise ConfigError("offload needs stage 1, 2 or 3: at stage 0 DeepSpeed does not part the optimizer")
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype {dtype!r} is not computed by DeepSpeed here: say dtype='bfloat16' or 'float32'")
    given = copy.deepcopy(dict(given or {}))
    _refuse(given, _REFUSED, "")
    zero = given.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise ConfigError(f"config has zero_optimization={zero!r}, which is no mapping")
    _refuse(zero, _REFUSED_OF_ZERO, "zero_optimization.")
    for name in ("offload_optimizer", "offload_param"):
        if (zero.get(name) or {}).get("device") == "nvme":
            raise ConfigError(
                f"config has zero_optimization.{name}.device='nvme', of which no checkpoint is made; use 'cpu'"
            )
    own: dict[str, Any] = {
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if offload_optimizer:
        own["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    elif stage and (zero.get("offload_optimizer") or {}).get("device", "none") not in ("none", "auto"):
        raise ConfigError("config has zero_optimization.offload_optimizer: give the engine offload=True as well")
    usual: dict[str, Any] = {"communication_data_type": "fp32", "zero_force_ds_cpu_optimizer": False}
    if dtype == "bfloat16" and stage >= 2:
        usual["data_types"] = {"grad_accum_dtype": "fp32"}
    passes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    return usual | _merged(own, given, "") | passes


def _refuse(given: Mapping[str, Any], refused: Mapping[str, str], where: str) -> None:
    for name in given.keys() & refused.keys():
        value = given[name]
        off = value in ("auto", None, False) or (isinstance(value, Mapping) and value.get("enabled") is False)
        if not off:
            raise ConfigError(f"config has {where}{name}={value!r}; {refused[name]}")


def _merged(own: Mapping[str, Any], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Both, where they say the same."""
    found = {name: value for name, value in given.items() if value != "auto" and name not in _REFUSED}
    for name, value in own.items():
        other = found.get(name, value)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            found[name] = _merged(value, other, f"{where}{name}.")
        elif other != value:
            raise ConfigError(f"config has {where}{name}={other!r}, and the engine's options say {value!r}")
        else:
            found[name] = value
    return found
