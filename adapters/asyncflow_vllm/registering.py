"""What vLLM calls in each of its processes (entry point group ``vllm.general_plugins``), the first thing it does there."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator

BACKEND = "asyncflow"
"""By which name vLLM's workers know the weight transfer engine of this package."""
OWNER = "ASYNCFLOW_VLLM_OWNER"
"""The environment variable that has the process for which vLLM was started."""


def register() -> None:
    """Idempotent. In a vLLM that the SDK did not start it only makes a name known."""
    with contextlib.suppress(ImportError, ValueError):  # an older vLLM; registered already
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory

        WeightTransferEngineFactory.register_engine(BACKEND, "asyncflow_vllm.weight_engine", "HandedWeights")
    owner = int(os.environ.get(OWNER, "0"))
    if owner and owner != os.getpid():
        threading.Thread(target=_end_with, args=(owner,), daemon=True, name="asyncflow-owner").start()


@contextlib.contextmanager
def owned() -> Iterator[None]:
    """What vLLM starts meanwhile ends with this process, however that ends. vLLM's core would outlive one that is killed, with its
    memory and its GPUs."""
    os.environ[OWNER] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[OWNER]


def _end_with(owner: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        descriptor = os.pidfd_open(owner)
        select.select([descriptor], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
