"""Rows of a batch as input of a forward pass: token ids, right-padded or packed, and the places of
responses.

    for rows in split(batch, tokens=16384):
        part = collate(batch, rows, device="cuda")
        logprobs = response_logprobs(model, part, head=None, temperature=1.0)        # (tokens of its responses,)

Padding is on the right, behind all tokens of a causal model. A pass needs neither attention mask
nor position ids, and attention can use its causal kernel: a tenth less time on a CPU. Packed rows
lie one after another in a single row without padding, and positions start anew with each, for
attention of varied lengths (FlashAttention); any other attention makes a mask of them, of the
square of all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncflow_sdk.errors import SchemaError
from asyncflow_sdk.interfaces import SAMPLING_MASK
from asyncflow_sdk.types import Batch, Ragged, loss_mask

KEPT_IDS, KEPT_COUNTS = SAMPLING_MASK
_CUT = -1e30
"""The logit of an impossible token: finite, since an entropy multiplies it by 0."""


@dataclass(frozen=True)
class KeptTokens:
    """The kept tokens of each target's draw. ``ends``: int64 (targets + 1,), the ends of its ids among ``ids``,
    int64, both on the device; a target without ids is not restricted."""

    ends: Any
    ids: Any

    def cut_(self, logits: Any, first: int = 0) -> Any:
        """Set the logits (targets, vocabulary) of the other tokens to a very low number, in place.
        ``first``: number of the first target."""
        ends = self.ends[first : first + len(logits) + 1]
        at = torch.repeat_interleave(torch.arange(len(logits), device=logits.device), ends.diff())
        outside = (ends.diff() > 0)[:, None].expand_as(logits).clone()
        outside[at, self.ids[ends[0] : ends[-1]]] = False
        return logits.masked_fill_(outside, _CUT)


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch for a causal model.

    ``rows``: int64 (rows,), numbers in the batch, on the host. ``input_ids``: int64 (rows, width),
    prompt and response without its last token, then padding. Targets are the response tokens (with
    a mask, its tokens), packed row by row: ``targets``: int64 (tokens,), their ids;
    ``predicted_at``: int64 (tokens,), the flattened (rows * width) position predicting each.
    ``position_ids``: int64 (1, width) of packed rows, else None. ``kept``: None without sampling masks.
    """

    rows: npt.NDArray[np.int64]
    input_ids: Any
    targets: Any
    predicted_at: Any
    position_ids: Any = None
    kept: KeptTokens | None = None


def micro_batches(
    batch: Batch, *, tokens: int | None, device: Any, mask: Ragged | None = None
) -> Iterator[MicroBatch]:
    """Yield the rows of ``batch`` in parts of at most ``tokens`` input tokens, padding included.
    ``mask``: response tokens to predict, all for None; the model reads the others too."""
    for rows in split(batch, tokens=tokens):
        yield collate(batch, rows, device=device, mask=mask)


def split(batch: Batch, *, tokens: int | None, packed: bool = False) -> list[npt.NDArray[np.int64]]:
    """Return the row numbers of each part of at most ``tokens`` input tokens, padding included
    unless ``packed``.

    None makes one part. Rows of similar length come together, the longest first: memory runs out at
    once or never. A row longer than ``tokens`` is a part of its own.
    """
    widths = batch.ragged("prompt_ids").lengths + batch.ragged("response_ids").lengths - 1
    order = np.argsort(-widths, kind="stable")
    ends = np.cumsum(widths[order])
    parts = []
    start = 0
    while start < len(order):
        fitting = len(order)
        if tokens is not None and packed:
            before = ends[start] - widths[order[start]]
            fitting = max(1, int(np.searchsorted(ends, before + tokens, side="right")) - start)
        elif tokens is not None:
            fitting = max(1, tokens // int(widths[order[start]]))
        parts.append(order[start : start + fitting])
        start += fitting
    return parts


def collate(
    batch: Batch, rows: npt.NDArray[np.int64], *, device: Any, mask: Ragged | None = None, packed: bool = False
) -> MicroBatch:
    """Return these rows of ``batch`` for a model on ``device``. ``mask``: see `micro_batches`."""
    prompts, responses = batch.ragged("prompt_ids").take(rows), batch.ragged("response_ids").take(rows)
    starts, lengths = prompts.lengths, responses.lengths
    ends = starts + lengths
    places = np.arange(int(ends.max()))
    ids = np.zeros((len(rows), len(places)), np.int64)
    ids[places < starts[:, None]] = prompts.values
    ids[(places >= starts[:, None]) & (places < ends[:, None])] = responses.values
    width = len(places) - 1
    ids, positions = ids[:, :-1], None
    begins = np.arange(len(rows)) * width
    if packed:
        read = places[:-1] < ends[:, None] - 1
        begins = np.cumsum(ends - 1) - (ends - 1)
        ids, positions = ids[read][None], np.broadcast_to(places[:-1], read.shape)[read][None]
    at = np.repeat(begins + starts - 1 - responses.offsets[:-1], lengths) + np.arange(len(responses.values))
    targets, chosen = responses.values, np.ones(len(at), np.bool_)
    if mask is not None:
        chosen = mask.take(rows).values.astype(np.bool_)
        at, targets = at[chosen], targets[chosen]
    kept = None
    if KEPT_IDS in batch:
        counts, kept_ids = (batch.ragged(name).take(rows).values.astype(np.int64) for name in (KEPT_COUNTS, KEPT_IDS))
        kept_ids, kept_ends = kept_ids[np.repeat(chosen, counts)], np.concatenate([[0], np.cumsum(counts[chosen])])
        kept = KeptTokens(*(torch.from_numpy(each).to(device) for each in (kept_ends, kept_ids)))
    return MicroBatch(
        rows=rows,
        input_ids=torch.from_numpy(ids).to(device),
        targets=torch.from_numpy(targets.astype(np.int64)).to(device),
        predicted_at=torch.from_numpy(at).to(device),
        position_ids=None if positions is None else torch.from_numpy(positions).to(device),
        kept=kept,
    )


def no_rows(*, device: Any) -> MicroBatch:
    """Return a pass of one token without targets, for a rank with fewer rows than others."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroBatch(np.zeros(0, np.int64), torch.zeros((1, 1), dtype=torch.int64, device=device), none, none)


def check_tokens(batch: Batch, *, vocabulary: int, context: int | None) -> None:
    """Raise SchemaError, with the rows, for tokens unfit for a forward pass."""
    if not batch.rows:
        raise SchemaError("the batch has no rows")
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    _refuse(batch, prompts.lengths == 0, "have an empty prompt")
    _refuse(batch, responses.lengths == 0, "have an empty response")
    for name, column in (("prompt_ids", prompts), ("response_ids", responses)):
        outside = (column.values < 0) | (column.values >= vocabulary)
        _refuse(batch, any_in_row(outside, column), f"have {name} outside the vocabulary of {vocabulary}")
    if context is not None:
        longer = prompts.lengths + responses.lengths > context
        _refuse(batch, longer, f"are longer than the model's context of {context} tokens")
    if not SAMPLING_MASK.keys().isdisjoint(batch):
        _check_kept(batch, responses, vocabulary)


def _check_kept(batch: Batch, responses: Ragged, vocabulary: int) -> None:
    counts, kept = batch.ragged(KEPT_COUNTS), batch.ragged(KEPT_IDS)
    _refuse(batch, counts.lengths != responses.lengths, f"do not have one of {KEPT_COUNTS} for each response token")
    for name, column, most in ((KEPT_COUNTS, counts, vocabulary), (KEPT_IDS, kept, vocabulary - 1)):
        if column.values.dtype.kind not in "iu" or column.values.ndim > 1:
            raise SchemaError(f"column {name!r} is {batch.spec(name)}; a sampling mask has whole numbers")
        outside = (column.values < 0) | (column.values > most)
        _refuse(batch, any_in_row(outside, column), f"have {name} outside the vocabulary of {vocabulary}")
    numbers = counts.values.astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(numbers)])
    _refuse(
        batch, np.diff(ends[counts.offsets]) != kept.lengths, f"have other {KEPT_IDS} than their {KEPT_COUNTS} say"
    )
    found = np.concatenate([[0], np.cumsum(kept.values == np.repeat(responses.values, numbers))])[ends]
    _refuse(
        batch,
        any_in_row((np.diff(found) == 0) & (numbers > 0), counts),
        f"have a response token missing from its {KEPT_IDS}",
    )


def check_training(batch: Batch) -> None:
    """Raise SchemaError, with the rows, for rewards, log-probs or loss masks unfit for training."""
    rewards, logprobs = batch.array("reward"), batch.ragged("logprobs")
    if rewards.ndim != 1 or rewards.dtype.kind not in "fiub":
        raise SchemaError(f"column 'reward' is {batch.spec('reward')}; training takes one number a row")
    _refuse(batch, ~np.isfinite(rewards), "have a reward that is no finite number")
    unequal = logprobs.lengths != batch.ragged("response_ids").lengths
    _refuse(batch, unequal, "do not have one log-prob for each response token")
    _refuse(batch, any_in_row(~np.isfinite(logprobs.values), logprobs), "have log-probs that are not finite")
    mask = loss_mask(batch)
    if mask is None:
        return
    _refuse(batch, mask.lengths != logprobs.lengths, "do not have one value of the loss mask for each response token")
    odd = (mask.values != 0) & (mask.values != 1)
    _refuse(batch, any_in_row(odd, mask), "have a loss mask of other values than 0 and 1")
    _refuse(batch, ~any_in_row(mask.values != 0, mask), "have no token that the loss mask has trained")


def any_in_row(flags: npt.NDArray[np.bool_], column: Ragged) -> npt.NDArray[np.bool_]:
    """True for rows with a flagged element: bool (rows,)."""
    counts = np.concatenate([[0], np.cumsum(flags)])
    return np.asarray(counts[column.offsets[1:]] > counts[column.offsets[:-1]])


def _refuse(batch: Batch, bad: npt.NDArray[np.bool_], what: str) -> None:
    if bad.any():
        ids = batch.ids[bad]
        more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
        raise SchemaError(f"rows {', '.join(map(str, ids[:8]))}{more} {what}")
