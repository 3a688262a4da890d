"""Log-probs of response tokens under a causal language model, with logits only where a token is predicted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncflow_sdk.types import Batch, Ragged

from .chunked_head import ChunkedHead
from .collate import MicroBatch, micro_batches


class TokenStats(NamedTuple):
    """Of each response token, packed: its log-prob (with gradient), and the entropy of the distribution it was drawn
    from (with gradient where it was asked for); float32, or float64 for a model in float64, (tokens,), natural
    logarithm."""

    logprobs: Any
    entropy: Any


def response_logprobs(
    model: Any, part: MicroBatch, *, head: ChunkedHead | None, temperature: float, entropy_gradient: bool = False
) -> TokenStats:
    """Log-probs under softmax(logits / temperature) over the whole vocabulary, or over the tokens of a sampling mask.

    One forward pass. The output layer sees response positions only, so logits are (tokens, vocabulary)
    however long the prompts and however ragged the rows; with ``head`` not more than a chunk of them
    at a time.
    """
    places = {} if part.position_ids is None else {"position_ids": part.position_ids}
    forward = partial(model, input_ids=part.input_ids, use_cache=False, **places)
    if head is not None and len(part.targets) > head.tokens:
        found = head.stats(model, forward, part, temperature=temperature, entropy_gradient=entropy_gradient)
        return TokenStats(found[0], found[1] if entropy_gradient else found[1].detach())
    with _output_layer_at(model, part.predicted_at):
        logits = forward().logits[0]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        logits = logits / temperature
    if part.kept is not None:
        logits = part.kept.cut_(logits.clone())
    log_total = logits.logsumexp(-1)
    logprobs = logits.gather(1, part.targets[:, None])[:, 0] - log_total
    with contextlib.nullcontext() if entropy_gradient else torch.no_grad():
        entropy = log_total - torch.einsum("tv,tv->t", logits.softmax(-1), logits)
    return TokenStats(logprobs, entropy)


def batch_logprobs(
    model: Any, batch: Batch, *, head: ChunkedHead | None, temperature: float, tokens: int | None
) -> Ragged:
    """Log-probs of ``response_ids`` after ``prompt_ids``, without gradient, in the batch's order; in passes of
    at most ``tokens`` input tokens. The ids must be checked."""
    parts = micro_batches(batch, tokens=tokens, device=model.device)
    return of_parts(lambda p: response_logprobs(model, p, head=head, temperature=temperature).logprobs, batch, parts)


def of_parts(numbers: Callable[[MicroBatch], Any], batch: Batch, parts: Iterable[MicroBatch]) -> Ragged:
    """``numbers`` of each response token, float32, without gradient, in the batch's order, by parts with each row of
    ``batch`` once. Parts without rows are passed through the model as well."""
    rows: list[Any] = [np.zeros(0, np.int64)]
    values: list[Any] = [np.zeros(0, np.float32)]
    with torch.no_grad():
        for part in parts:
            rows.append(part.rows)
            values.append(numbers(part).float().cpu().numpy())
    order = np.concatenate(rows)
    lengths = batch.ragged("response_ids").lengths
    return Ragged.from_lengths(np.concatenate(values), lengths[order]).take(np.argsort(order))


@contextlib.contextmanager
def _output_layer_at(model: Any, positions: Any) -> Iterator[None]:
    """Give the output layer (1, positions, hidden) instead of (rows, width, hidden) within the
    block.

    A hook keeps the model's own changes of its logits (scaling, soft caps), unlike a direct call of
    the layer.
    """

    def pick(_layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs[0].flatten(0, 1)[positions][None], *inputs[1:])

    hook = model.get_output_embeddings().register_forward_pre_hook(pick)
    try:
        yield
    finally:
        hook.remove()
