"""DeepSpeed before its first use in a process, and after its last."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import torch

from asyncflow_sdk.errors import ConfigError
from asyncflow_torch.devices import device_kind


def start(device: str) -> tuple[Any, str]:
    """The module ``deepspeed`` and the kind of device that it computes on: "cuda", "cpu", or whatever torch calls another one. "auto":
    CUDA where there is one, else the CPU. Raises ConfigError where DeepSpeed was imported for another."""
    kind = device_kind(device)
    if "deepspeed" not in sys.modules:
        os.environ.setdefault("DS_ACCELERATOR", kind)
    os.environ.setdefault("LOCAL_RANK", "0")  # stage 3 asks for it, also of one that is alone
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    found = get_accelerator().device_name()
    if found != kind:
        raise ConfigError(
            f"device {device!r} is not what DeepSpeed computes on in this process, which is {found!r}: DS_ACCELERATOR in its"
            " environment says so, or what it has found when it was imported"
        )
    # Hazard: on a CPU its first collective would compile an operator for a minute, which leaves files in /dev/shm; gloo needs none.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed, kind


def end() -> None:
    """Forget process groups that are gone, so that another engine may be made in this process."""
    if torch.distributed.is_initialized():  # somebody else's, and still there
        return
    with contextlib.suppress(ImportError):
        from deepspeed.comm import comm
        from deepspeed.runtime.zero import parameter_offload
        from deepspeed.utils import groups

        comm.cdb = None
        groups._WORLD_GROUP = None
        parameter_offload.FWD_MODULE_STACK.clear()  # models of stage 3, and with each its engine and its groups
