"""Drawing of tokens: temperature, penalty, min-p, top-k, top-p, and random numbers of a request.

The log-prob of a drawn token is under softmax(logits / temperature) over the *whole* vocabulary,
without penalty and cuts, as a trainer recomputes it; of a row with a sampling mask, over the tokens
left by min-p, top-k and top-p. Greedy tokens (temperature 0) carry their log-prob at temperature 1.

Random numbers are counted, not streamed: the number for token t of response i of a request is a
hash of (seed, i, t). A request with a seed draws the same numbers beside any other requests, and
gives the same tokens unless rounding in the model, which may depend on the batch, changes a choice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, as the int64 of the same bits
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def row_keys(seed: int | None, n: int) -> npt.NDArray[np.int64]:
    """Return a key for each of ``n`` responses: int64 (n,), the same for the same seed; None seeds
    from the system."""
    entropy = None if seed is None else seed % (1 << 64)
    return np.random.SeedSequence(entropy).generate_state(n, np.uint64).view(np.int64)


def uniforms(keys: Any, count: Any) -> Any:
    """Return numbers in [0, 1), float32 (rows,), from keys and token numbers, both int64 (rows,).

    SplitMix64 (Steele, Lea, Flood 2014), jumped to position ``count`` of the stream of each key.
    """
    x = keys + (count + 1) * _GOLDEN
    x = (x ^ _shift_right(x, 30)) * _MIX1
    x = (x ^ _shift_right(x, 27)) * _MIX2
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 40).to(torch.float32) * 2.0**-24


def _shift_right(x: Any, bits: int) -> Any:
    """Shift logically: torch shifts int64 arithmetically, so the sign bits are masked."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def draw(
    logits: Any, temperature: Any, uniform: Any, *, top_k: Any = None, top_p: Any = None, min_p: Any = None,
    seen: Any = None, penalty: Any = None, masked: Any = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Draw one token per row: (token int64 (rows,), log-prob float32 (rows,), kept tokens bool (rows, vocabulary) or None).

    ``logits``: (rows, vocabulary), any floating dtype. ``temperature``, ``uniform``, ``top_p``:
    float32 (rows,); ``top_k``: int64 (rows,), 0 is off; None for all cuts skips their sort.
    ``min_p``, ``penalty``: float32 (rows,). ``seen``: bool (rows, vocabulary), the tokens with a
    penalty (Keskar et al. 2019, CTRL, section 4.1; on logits of either sign as in transformers).
    ``masked``: bool (rows,), rows with a sampling mask; others, and those that keep all, have no kept tokens. None: no mask.
    """
    greedy = temperature == 0
    scale = torch.where(greedy, 1.0, temperature)[:, None]
    logits = logits.float()
    weights = probs = (logits / scale).softmax(-1)
    if seen is not None:
        by = penalty[:, None]
        weights = (torch.where(seen, torch.where(logits > 0, logits / by, logits * by), logits) / scale).softmax(-1)
    if top_k is not None:
        weights = _truncated(weights, top_k, top_p, min_p)
    cumulative = weights.cumsum(-1)
    # The first place whose cumulative weight exceeds the number has weight above 0: no cut token is drawn.
    target = (uniform * cumulative[:, -1])[:, None]
    token = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    if greedy.any():
        token = torch.where(greedy, weights.argmax(-1), token)
    kept = None
    if masked is not None:
        kept = weights > 0
        cut = (masked & ~kept.all(-1))[:, None]
        kept &= cut
        probs = torch.where(cut, (logits / scale).masked_fill(~kept, -torch.inf).softmax(-1), probs)
    return token, probs.gather(-1, token[:, None])[:, 0].log(), kept


def _truncated(probs: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
    """Set ``probs`` to 0 below ``min_p`` of the largest, outside the ``top_k`` most likely tokens, and
    outside the fewest of them with ``top_p`` of their mass (the order of vLLM). At least one token
    stays."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    ordered = ordered.masked_fill(ordered < min_p[:, None] * ordered[:, :1], 0)
    ordered = ordered.masked_fill((rank >= top_k[:, None]) & (top_k > 0)[:, None], 0)
    mass = ordered.cumsum(-1)
    within = (mass - ordered < top_p[:, None] * mass[:, -1:]) | (top_p >= 1)[:, None]
    keep = within & (ordered > 0)
    return probs * torch.zeros_like(keep).scatter_(-1, order, keep)
