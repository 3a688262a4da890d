"""Registration in vLLM: called at the start of each of its processes (entry point group ``vllm.general_plugins``)."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator

BACKEND = "asyncflow"
"""Name of this package's weight transfer engine in vLLM."""
OWNER = "ASYNCFLOW_VLLM_OWNER"
"""Environment variable with the pid of the process that started vLLM."""


def register() -> None:
    """Register the weight transfer engine. In a vLLM started by the SDK, also end this process
    with its owner. Idempotent."""
    with contextlib.suppress(ImportError, ValueError):  # an older vLLM, or registered already
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory

        WeightTransferEngineFactory.register_engine(BACKEND, "asyncflow_vllm.weight_engine", "HandedWeightEngine")
    owner = int(os.environ.get(OWNER, "0"))
    if owner and owner != os.getpid():
        threading.Thread(target=_end_with, args=(owner,), daemon=True, name="asyncflow-owner").start()


@contextlib.contextmanager
def owned() -> Iterator[None]:
    """Processes that vLLM starts within the block end with this process. Otherwise vLLM's core,
    its memory and its GPUs would outlive a killed worker."""
    os.environ[OWNER] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[OWNER]


def _end_with(owner: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has already ended
        descriptor = os.pidfd_open(owner)
        select.select([descriptor], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
