"""Prefill: read prompts, and responses already under way, into a cache.

    cache, mask, logits = prefill(model, prompts)                 # equal prompts once
    cache, mask = extend(model, cache, mask, lengths, responses)

A mask is bool (rows, tokens), False for padding, on the left; None without padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncflow_sdk.types import Ragged

from . import kv

# Maximum of tokens in one pass, padding included: bounds its memory.
PASS_TOKENS = 16384

_Ids = npt.NDArray[np.int32]


def prefill(model: Any, prompts: Sequence[_Ids]) -> tuple[Any, Any, Any]:
    """Read the prompt of each row in one pass; equal prompts once. Return cache, mask, and the
    logits (rows, vocabulary) of the next token."""
    place: dict[bytes, int] = {}
    prompt_of = [place.setdefault(prompt.tobytes(), len(place)) for prompt in prompts]
    ids, columns = _left_padded([np.frombuffer(prompt, np.int32) for prompt in place], model.device)
    mask = None if bool((columns[:, 0] == 0).all()) else columns >= 0
    cache = kv.new_cache(model)
    logits = kv.read(model, cache, ids, mask, columns.clamp(min=0))
    rows = torch.tensor(prompt_of, device=model.device)
    kv.keep(cache, rows, 0)
    return cache, None if mask is None else mask[rows], logits[rows]


def extend(model: Any, cache: Any, mask: Any, lengths: Sequence[int], tokens: Sequence[_Ids]) -> tuple[Any, Any]:
    """Read ``tokens`` of each row, none or more, after the ``lengths`` tokens read already. Return
    cache and mask. The cache must be joinable, and for prompts with padding."""
    if not any(len(ids) for ids in tokens):
        return cache, mask
    ids, columns = _left_padded(tokens, model.device)
    if mask is None:
        mask = torch.ones(len(tokens), kv.width(cache), dtype=torch.bool, device=model.device)
    mask = torch.cat([mask, columns >= 0], 1)
    positions = torch.tensor(lengths, device=model.device)[:, None] + columns.clamp(min=0)
    kv.read(model, cache, ids, None if mask.all() else mask, positions)
    width = int(mask.sum(1).max())
    if width < mask.shape[1]:  # rows of different lengths were padded in their middle
        left = mask.to(torch.uint8).argsort(dim=1, stable=True)[:, -width:]
        kv.rearrange(cache, left)
        mask = mask.gather(1, left)
    return cache, None if mask.all() else mask


def passes(prompts: Sequence[_Ids], tokens: Sequence[_Ids] = (), *, padded: bool = True) -> Iterator[list[int]]:
    """Yield the rows of each pass of ``prefill``, and of ``extend`` with ``tokens``. Rows with the
    same prompt array count it once. ``padded``: False if only prompts of one length share a pass."""
    rows: list[int] = []
    distinct: set[int] = set()
    longest = longest_on = 0
    lengths = [0 if padded else len(prompt) for prompt in prompts]
    for row in np.argsort(lengths, kind="stable").tolist():
        prompt, on = prompts[row], len(tokens[row]) if tokens else 0
        longer = lengths[row] > longest
        distinct.add(id(prompt))
        longest, longest_on = max(longest, len(prompt)), max(longest_on, on)
        if rows and (longer or len(distinct) * longest + (len(rows) + 1) * longest_on > PASS_TOKENS):
            yield rows
            rows, distinct, longest, longest_on = [], {id(prompt)}, len(prompt), on
        rows.append(row)
    if rows:
        yield rows


def _left_padded(rows: Sequence[_Ids], device: Any) -> tuple[Any, Any]:
    """Return token ids, int64 (rows, longest), and their positions in their rows, negative for
    padding."""
    ragged = Ragged.of([np.asarray(ids, np.int32) for ids in rows])
    ids = torch.from_numpy(ragged.padded(0, side="left").astype(np.int64)).to(device)
    lengths = torch.from_numpy(ragged.lengths).to(device)
    return ids, torch.arange(ids.shape[1], device=device) - ids.shape[1] + lengths[:, None]
