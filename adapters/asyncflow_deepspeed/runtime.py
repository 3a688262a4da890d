"""DeepSpeed in a process: its start, its end, and models partitioned during their load."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from asyncflow_sdk.errors import ConfigError
from asyncflow_torch.devices import device_kind


def start(device: str) -> tuple[Any, str]:
    """Return the module ``deepspeed`` and its kind of device: "cuda", "cpu" or another name of
    torch. ``device``: "auto" is CUDA if available, else the CPU. Raises ConfigError if DeepSpeed
    was imported for another device."""
    kind = device_kind(device)
    if "deepspeed" not in sys.modules:
        os.environ.setdefault("DS_ACCELERATOR", kind)
    os.environ.setdefault("LOCAL_RANK", "0")  # stage 3 reads it, even with one rank
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    found = get_accelerator().device_name()
    if found != kind:
        raise ConfigError(
            f"device {device!r} differs from DeepSpeed's device in this process, {found!r}, which was set by"
            " DS_ACCELERATOR in the environment or detected when it was imported"
        )
    # Hazard: on a CPU its first collective would compile an operator for a minute and leave files in /dev/shm; gloo needs none.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed, kind


def reset() -> None:
    """Clear DeepSpeed's references to closed process groups, so another engine can be made in this process."""
    if torch.distributed.is_initialized():  # a group of another owner, still open
        return
    with contextlib.suppress(ImportError):
        from deepspeed.comm import comm
        from deepspeed.runtime.zero import parameter_offload
        from deepspeed.utils import groups

        comm.cdb = None
        groups._WORLD_GROUP = None
        parameter_offload.FWD_MODULE_STACK.clear()  # stage-3 models, which keep their engines and groups alive


def partitioned(load: Callable[[], Any], config: Mapping[str, Any]) -> Any:
    """Return the model of ``load``, partitioned parameter by parameter as transformers makes it
    (ZeRO-3): no rank holds a whole model. Only rank 0 reads the weights. A collective."""
    from transformers.integrations import HfDeepSpeedConfig  # imports DeepSpeed

    registered = HfDeepSpeedConfig(dict(config))  # transformers checks if such an object exists
    try:
        model = load()
    finally:
        del registered
    # Hazard: here transformers also keeps conversions that matched no name of the folder, and would reverse them.
    model._weight_conversions = [
        each for each in getattr(model, "_weight_conversions", None) or () if each.was_used()
    ]
    return model
