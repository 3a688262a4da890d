"""Wave: rows that share a cache and decode together, from their prompts to the last one's end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncflow_sdk.errors import EngineError

from . import kv
from .lanes import Finished, Lanes, Work
from .reading import passes, read, read_on
from .sampling import draw, uniforms

# What a row costs in a step beside attention, in tokens attended to; and how much more padding may cost.
_ROW_COST = 128
_WASTE = 1.5


class Wave:
    """Rows that share a cache. ``mask``: bool (rows, tokens), False for padding; None where there is none."""

    def __init__(self, lanes: Lanes, cache: Any, mask: Any, truncated: bool) -> None:
        self.lanes, self.cache, self.mask, self.truncated = lanes, cache, mask, truncated
        self.rows = len(lanes)

    def read(self, model: Any) -> Any:
        """The model reads each row's last token; logits (rows, vocabulary) of the next one."""
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.lanes), 1)], 1)
        output = model(
            input_ids=self.lanes.token[:, None],
            attention_mask=self.mask,
            position_ids=self.lanes.position[:, None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.lanes.position += self.lanes.live
        return output.logits[:, -1]

    def draw(self, logits: Any, ends: Any) -> Finished | None:
        """Draw a token a row. Raises EngineError when the model gives no numbers."""
        lanes = self.lanes
        cut = {"top_k": lanes.top_k, "top_p": lanes.top_p} if self.truncated else {}
        token, logprob = draw(logits, lanes.temperature, uniforms(lanes.key, lanes.past + lanes.drawn), **cut)
        lanes.accept(token, logprob)
        finished = lanes.finish((token[:, None] == ends).any(1) | (token[:, None] + 1 == lanes.stops).any(1))
        if finished is not None:
            self.rows -= len(finished.work)
            if not np.isfinite(finished.logprobs.values).all():
                raise EngineError("the model's logits are not finite: the loaded weights are broken")
        return finished

    def read_again(self, model: Any, prompts: Mapping[int, npt.NDArray[np.int32]]) -> Iterator[Wave]:
        """The rows left, in waves of as many as one pass reads, what they have read so far read once more.

        This wave must not be used after. ``prompts``: by work.
        """
        self.cache = self.mask = None  # its memory is free for the new one
        lanes = self.lanes.take(self.lanes.live.nonzero()[:, 0])
        heads = [prompts[work] for work in lanes.work.tolist()]
        # The token drawn last has not been read; the next step does that.
        drawn = zip(lanes.token_ids.cpu().numpy(), lanes.drawn.tolist(), strict=True)
        tails = [ids[: count - 1] for ids, count in drawn]
        if not kv.joinable(kv.new_cache(model)):
            # Hazard: a window or a recurrent state cannot always be read on into with many tokens at once.
            heads, tails = [np.concatenate(both) for both in zip(heads, tails, strict=True)], []
        for rows in passes(heads, tails):
            cache, mask, _ = read(model, [heads[row] for row in rows])
            if tails:
                cache, mask = read_on(
                    model, cache, mask, [len(heads[row]) for row in rows], [tails[row] for row in rows]
                )
            yield Wave(lanes.take(torch.tensor(rows, device=lanes.live.device)), cache, mask, self.truncated)

    def abort(self, ids: Any) -> None:
        """End the rows of these works."""
        self.lanes.live &= ~torch.isin(self.lanes.work, ids)
        self.rows = int(self.lanes.live.sum())

    def compact(self) -> None:
        """Drop the rows that ended, and padding that no row left needs."""
        if self.rows == len(self.lanes):
            return
        rows = self.lanes.live.nonzero()[:, 0]
        self.lanes.keep(rows)
        cut = 0
        if self.mask is not None:
            self.mask = self.mask[rows]
            if kv.joinable(self.cache):
                cut = int(self.mask.any(0).to(torch.int8).argmax())
                self.mask = self.mask[:, cut:]
            if self.mask.all():
                self.mask = None
        kv.keep(self.cache, rows, cut)

    def suits(self, other: Wave) -> bool:
        """Whether one pass over both costs little more than one over each."""
        if not (kv.joinable(self.cache) and kv.joinable(other.cache)):
            return False
        shapes = [(wave.rows, wave.cache.get_seq_length() + _ROW_COST) for wave in (self, other)]
        apart = sum(rows * cost for rows, cost in shapes)
        together = sum(rows for rows, _ in shapes) * max(cost for _, cost in shapes)
        return bool(together <= _WASTE * apart)

    def join(self, other: Wave) -> None:
        """Take the rows of ``other``, which must not be used after."""
        self.compact()
        other.compact()
        masks = [wave._columns() for wave in (self, other)]
        width = max(mask.shape[1] for mask in masks)
        mask = torch.cat([torch.nn.functional.pad(mask, (width - mask.shape[1], 0)) for mask in masks])
        self.mask = None if mask.all() else mask
        for mine, its in zip(self.cache.layers, other.cache.layers, strict=True):
            mine.join(its)
        self.lanes.join(other.lanes)
        self.rows += other.rows
        self.truncated |= other.truncated

    def _columns(self) -> Any:
        """The mask, also where nothing is padded."""
        if self.mask is not None:
            return self.mask
        shape = (len(self.lanes), self.cache.get_seq_length())
        return torch.ones(shape, dtype=torch.bool, device=self.lanes.live.device)


def begin(model: Any, works: Sequence[Work]) -> tuple[Wave, Any]:
    """The wave of all rows of ``works``, and the logits (rows, vocabulary) of their first tokens."""
    cache, mask, logits = read(model, [work.prompt for work in works for _ in range(work.n)])
    truncated = any(work.sampling.top_k or work.sampling.top_p < 1 for work in works)
    return Wave(Lanes.of(works, model.device), cache, mask, truncated), logits
