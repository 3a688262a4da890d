"""DecodeBatch: rows with a common cache, decoded together from their prompts to the end of the last
one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncflow_sdk.errors import EngineError

from . import kv
from .prefill import extend, passes, prefill
from .sampler import draw, uniforms
from .sequence_slots import DecodeWork, FinishedBatch, SequenceSlots
from .stop_texts import StopNumbers

# Cost of a row in a step without attention, in tokens attended to; factor of cost accepted for padding.
_ROW_COST = 128
_WASTE = 1.5


class DecodeBatch:
    """``mask``: bool (rows, tokens), False for padding; None without padding. ``truncated``: True if
    rows draw by top-k, top-p or min-p; ``stopped``: if they have stop texts."""

    def __init__(self, slots: SequenceSlots, cache: Any, mask: Any, truncated: bool, stopped: bool) -> None:
        self.slots, self.cache, self.mask = slots, cache, mask
        self.truncated, self.stopped = truncated, stopped
        self.rows = len(slots)

    def read(self, model: Any) -> Any:
        """Read each row's last token; return the logits (rows, vocabulary) of the next one."""
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.slots), 1)], 1)
        slots = self.slots
        logits = kv.read(model, self.cache, slots.token[:, None], self.mask, slots.position[:, None])
        slots.position += slots.live
        return logits

    def draw(self, logits: Any, ends: Any, texts: StopNumbers) -> FinishedBatch | None:
        """Draw a token per row. Raises EngineError if the model's logits are not finite."""
        slots = self.slots
        cut = {"top_k": slots.top_k, "top_p": slots.top_p, "min_p": slots.min_p} if self.truncated else {}
        if slots.seen.shape[1]:
            cut |= {"seen": slots.seen, "penalty": slots.penalty}
        if slots.kept_ids.shape[1]:
            cut["masked"] = slots.masked
        slots.accept(*draw(logits, slots.temperature, uniforms(slots.key, slots.past + slots.drawn), **cut))
        token = slots.token[:, None]
        stop = (token == ends).any(1) | (token + 1 == slots.stops).any(1)
        finished = slots.finish(stop | texts.found(slots) if self.stopped else stop)
        if finished is not None:
            self.rows -= len(finished.work)
            if not np.isfinite(finished.ragged["logprobs"].values).all():
                raise EngineError("the model's logits are not finite: the loaded weights are broken")
        return finished

    def recompute(self, model: Any, prompts: Mapping[int, npt.NDArray[np.int32]]) -> Iterator[DecodeBatch]:
        """Read the tokens of the running rows once more, and yield them in batches of one pass
        each. This batch must not be used afterwards. ``prompts``: by work."""
        padded = kv.padded(self.cache)
        extended = padded and kv.joinable(self.cache)
        self.cache = self.mask = None  # frees the memory for the new one
        slots = self.slots.take(self.slots.live.nonzero()[:, 0])
        heads = [prompts[work] for work in slots.work.tolist()]
        # The next step reads the last drawn token.
        drawn = zip(slots.token_ids.cpu().numpy(), slots.drawn.tolist(), strict=True)
        tails = [ids[: count - 1] for ids, count in drawn]
        if not extended:
            # Hazard: a window or a recurrent state cannot always be extended by many tokens at once.
            heads, tails = [np.concatenate(both) for both in zip(heads, tails, strict=True)], []
        for rows in passes(heads, tails, padded=padded):
            cache, mask, _ = prefill(model, [heads[row] for row in rows])
            if tails:
                cache, mask = extend(
                    model, cache, mask, [len(heads[row]) for row in rows], [tails[row] for row in rows]
                )
            taken = slots.take(torch.tensor(rows, device=slots.live.device))
            yield DecodeBatch(taken, cache, mask, self.truncated, self.stopped)

    def abort(self, ids: Any) -> None:
        """End the rows of these works."""
        self.slots.live &= ~torch.isin(self.slots.work, ids)
        self.rows = int(self.slots.live.sum())

    def compact(self) -> None:
        """Drop ended rows, and padding needed only by them."""
        if self.rows == len(self.slots):
            return
        rows = self.slots.live.nonzero()[:, 0]
        self.slots.keep(rows)
        cut = 0
        if self.mask is not None:
            self.mask = self.mask[rows]
            if kv.joinable(self.cache):
                cut = int(self.mask.any(0).to(torch.int8).argmax())
                self.mask = self.mask[:, cut:]
            if self.mask.all():
                self.mask = None
        kv.keep(self.cache, rows, cut)

    def suits(self, other: DecodeBatch) -> bool:
        """True if one pass over both batches costs little more than one pass over each."""
        if not (kv.joinable(self.cache) and kv.joinable(other.cache)):
            return False
        shapes = [(batch.rows, kv.width(batch.cache) + _ROW_COST) for batch in (self, other)]
        apart = sum(rows * cost for rows, cost in shapes)
        together = sum(rows for rows, _ in shapes) * max(cost for _, cost in shapes)
        return bool(together <= _WASTE * apart)

    def join(self, other: DecodeBatch) -> None:
        """Append the rows of ``other``, which must not be used afterwards."""
        self.compact()
        other.compact()
        masks = [batch._columns() for batch in (self, other)]
        width = max(mask.shape[1] for mask in masks)
        mask = torch.cat([torch.nn.functional.pad(mask, (width - mask.shape[1], 0)) for mask in masks])
        self.mask = None if mask.all() else mask
        kv.join(self.cache, other.cache)
        self.slots.join(other.slots)
        self.rows += other.rows
        self.truncated |= other.truncated
        self.stopped |= other.stopped

    def _columns(self) -> Any:
        """Return the mask, also without padding."""
        if self.mask is not None:
            return self.mask
        shape = (len(self.slots), kv.width(self.cache))
        return torch.ones(shape, dtype=torch.bool, device=self.slots.live.device)


def begin(model: Any, works: Sequence[DecodeWork], texts: StopNumbers) -> tuple[DecodeBatch, Any]:
    """Return the batch of all rows of ``works``, and the logits (rows, vocabulary) of their first
    tokens."""
    cache, mask, logits = prefill(model, [work.prompt for work in works for _ in range(work.n)])
    truncated = any(work.truncated for work in works)
    numbers = [texts.number(work.stops) for work in works]
    slots = SequenceSlots.of(works, model.device, logits.shape[-1], numbers)
    return DecodeBatch(slots, cache, mask, truncated, any(numbers)), logits
