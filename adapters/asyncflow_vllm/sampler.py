"""Log-probs under the whole vocabulary with top-k or top-p.

vLLM returns them before the temperature (``raw_logprobs``) or after the cut
(``processed_logprobs``). A trainer computes them after the temperature and before the cut.
"""

from __future__ import annotations

from typing import Any


def return_whole_logprobs(model_runner: Any) -> bool:
    """Patch the sampler of a model runner in the mode ``processed_logprobs``. Idempotent. Return False if this vLLM
    has no such sampler: log-probs are then right without top-k and top-p only."""
    sampler = getattr(getattr(model_runner, "sampler", None), "topk_topp_sampler", None)
    if sampler is None or getattr(sampler, "logprobs_mode", None) != "processed_logprobs":
        return False
    if not getattr(sampler.forward, "whole", False):
        sampler.forward = _whole(sampler.forward)
    return True


def _whole(draw: Any) -> Any:
    def forward(logits: Any, generators: Any, k: Any, p: Any) -> tuple[Any, Any]:
        if k is None and p is None:
            return draw(logits, generators, k, p)  # type: ignore[no-any-return]
        whole = logits.log_softmax(dim=-1, dtype=logits.float().dtype)  # the draw may change logits in place
        drawn, _ = draw(logits, generators, k, p)
        return drawn, whole

    forward.whole = True  # type: ignore[attr-defined]
    return forward
