"""WorkerExtension: calls of the rollout engine to vLLM's workers, mixed into their class
(``worker_extension_cls``)."""

from __future__ import annotations

from typing import Any

from .sampler import return_whole_logprobs


class WorkerExtension:
    """Names begin with ``asyncflow_`` to differ from vLLM's."""

    weight_transfer_engine: Any
    model_runner: Any

    def asyncflow_outcome(self) -> dict[str, Any]:
        """Return failure and loaded names of this rank's last load."""
        loaded = self.weight_transfer_engine
        return {"failure": loaded.failure, "taken": sorted(loaded.taken)}

    def asyncflow_whole_logprobs(self) -> bool:
        """Make the sampler return log-probs under the whole vocabulary with top-k or top-p. Return
        True on success."""
        return return_whole_logprobs(self.model_runner)
