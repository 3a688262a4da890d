"""What vLLM calls in each of its processes (entry point group ``vllm.general_plugins``), the first thing it does there."""

from __future__ import annotations

import contextlib

BACKEND = "asyncflow"
"""By which name vLLM's workers know the weight transfer engine of this package."""


def register() -> None:
    """Idempotent, and without effect on a vLLM that the SDK did not start: it only makes a name known."""
    with contextlib.suppress(ImportError, ValueError):  # an older vLLM; registered already
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory

        WeightTransferEngineFactory.register_engine(BACKEND, "asyncflow_vllm.weight_engine", "HandedWeights")
