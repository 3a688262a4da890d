"""What the rollout engine asks of vLLM's workers beside vLLM's own calls: mixed into their class (``worker_extension_cls``)."""

from __future__ import annotations

from typing import Any

from .sampler import return_whole_logprobs


class WorkerExtension:
    """Names begin with ``asyncflow_``, since they must not be vLLM's."""

    weight_transfer_engine: Any
    model_runner: Any

    def asyncflow_outcome(self) -> dict[str, Any]:
        """Why this rank has not loaded the last version, or "", and the names that it has taken."""
        loaded = self.weight_transfer_engine
        return {"failure": loaded.failure, "taken": sorted(loaded.taken)}

    def asyncflow_whole_logprobs(self) -> bool:
        """Have log-probs of tokens given under the whole vocabulary, also where the draw is cut. Whether that could be done."""
        return return_whole_logprobs(self.model_runner)
