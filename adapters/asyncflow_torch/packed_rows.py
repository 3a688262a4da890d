"""Packing: rows of a step one after another in a single row of a model, without padding.

    if packs(options, plain, model, critic, ranks=ranks, vocabulary=vocabulary, device=device): ...

Only position ids tell packed rows apart. A layer with a state or a convolution reads across them,
and so does attention with a mask made without them (GPT-OSS without FlashAttention). Rows are
packed only after a trial in this process, with its attention and kernels: other tokens in the first
of a few short rows must not change the hidden states of the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.utils.generic import is_flash_attention_requested

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.types import Batch

from .collate import MicroBatch, collate
from .critic import ValueCritic
from .logprobs import response_logprobs
from .ranks import Ranks
from .train_options import ShardedOptions

_LENGTHS = (7, 5, 4, 3)
_READ_ACROSS, _ROUNDED = 1e-3, 0.2
"""Relative differences of hidden states. Passes of the same shape are rounded alike: of 30 families
none without a leak differed by more than 4e-7 in float32, and not at all in bfloat16; none with a
leak by less than 1e-2. Packed and padded rows are rounded differently: experts chosen otherwise
changed up to 9 % in bfloat16."""


def packs(
    options: ShardedOptions,
    plain: Any,
    model: Any,
    critic: ValueCritic | None,
    *,
    ranks: Ranks,
    vocabulary: int,
    device: Any,
) -> bool:
    """Return True if rows are packed: if ``options.packed`` demands it, or is None and attention is
    FlashAttention, and ``model`` and ``critic`` keep packed rows apart. Raises ConfigError for a
    demand on models that do not. A collective. ``plain``: the policy, wrapped by ``model``."""
    text = plain.config.get_text_config()
    if not (is_flash_attention_requested(text) if options.packed is None else options.packed):
        return False
    found = _problem(plain, model, critic, vocabulary=vocabulary, device=device)
    problem = next(filter(None, ranks.gather(found)), "")
    if problem and options.packed:
        raise ConfigError(
            f"packed=True with attention {text._attn_implementation!r} gives wrong log-probs: {problem}. Leave packed out: rows are"
            " then padded"
        )
    return not problem


def _problem(plain: Any, model: Any, critic: ValueCritic | None, *, vocabulary: int, device: Any) -> str:
    """Return why packed rows are not exact, "" if they are."""
    if "position_ids" not in inspect.signature(plain.forward).parameters:
        return f"{type(plain).__name__} takes no position ids"
    readers: list[tuple[Any, Callable[[MicroBatch], Any]]] = [
        (model.get_output_embeddings(), partial(response_logprobs, model, head=None, temperature=1.0))
    ]
    if critic is not None:
        readers.append((critic.model.head, critic.values))
    for (head, read), name in zip(readers, ("policy", "critic"), strict=False):
        across, rounded = _trial(head, read, vocabulary=vocabulary, device=device)
        if not across <= _READ_ACROSS:
            return f"the tokens of a row change the hidden states of the next in the {name} by {across:.0%}"
        if not rounded <= _ROUNDED:
            return f"hidden states of packed rows are others than of padded ones in the {name}, by {rounded:.0%}"
    return ""


def _trial(head: Any, read: Callable[[MicroBatch], Any], *, vocabulary: int, device: Any) -> tuple[float, float]:
    """Return how much the hidden states of packed rows change with the tokens of an earlier row, and
    how much they differ from padded rows. ``head``: the output layer of the model that ``read`` calls."""
    # From the middle of the vocabulary: placeholders of images stand at its ends.
    ids = np.random.default_rng(0).integers(vocabulary // 4, vocabulary // 2 + 1, sum(_LENGTHS) + len(_LENGTHS))
    rows = np.split(ids, np.cumsum([1 + length for length in _LENGTHS])[:-1])
    other = [rows[0] % (vocabulary // 4) + vocabulary // 2, *rows[1:]]
    found: list[Any] = []
    hook = head.register_forward_hook(lambda _head, inputs, _: found.append(inputs[0].flatten(0, -2).float()))
    try:
        with torch.no_grad():
            for given, packed in ((rows, False), (rows, True), (other, True)):
                batch = Batch.of(
                    {"prompt_ids": [row[:1] for row in given], "response_ids": [row[1:] for row in given]}
                )
                read(collate(batch, np.arange(batch.rows), device=device, packed=packed))
    finally:
        hook.remove()
    padded, kept, changed = found
    later = slice(_LENGTHS[0], None)
    return _difference(changed[later], kept[later]), _difference(kept, padded)


def _difference(one: Any, other: Any) -> float:
    return float((one - other).norm() / other.norm())
