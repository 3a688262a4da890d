"""Decoding: rows in waves, a token a step, so that no row waits for another to end.

    decoder = Decoder(model)
    done = [decoder.admit([Work(id=0, prompt=ids, n=8, sampling=Sampling(max_tokens=64))])]
    while decoder.rows:
        done.append(decoder.step())        # Finished, or None: the rows that ended in this step

A wave is what was admitted together: its distinct prompts are read once, and every response starts from a
copy of what was read. A new wave joins a running one where that wastes little, else they take turns. Rows
that ended are dropped once they are half of a wave. Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from asyncflow_sdk.errors import EngineError
from asyncflow_sdk.types import Ragged

from . import kv
from .lanes import Finished, Lanes, Work
from .sampling import draw, uniforms

# What a row costs in a step beside attention, in tokens attended to; and how much more padding may cost.
_ROW_COST = 128
_WASTE = 1.5


class Decoder:
    """Decodes rows of many requests with one model. Its methods run the model and so block."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._waves: deque[_Wave] = deque()
        self._ends = torch.tensor(end_tokens(model), dtype=torch.int64, device=model.device)

    @property
    def rows(self) -> int:
        """The rows being decoded."""
        return sum(wave.rows for wave in self._waves)

    @property
    def waves(self) -> int:
        """The forward passes one more token for every row takes."""
        return len(self._waves)

    def admit(self, works: Sequence[Work]) -> Finished | None:
        """Read the prompts of ``works`` and draw the first token of each response."""
        with torch.inference_mode():
            wave, logits = _prefill(self._model, works)
            finished = wave.draw(logits, self._ends)
            if wave.rows and not self._joined(wave):
                self._waves.append(wave)
            return finished

    def step(self) -> Finished | None:
        """One token for each row of the wave whose turn it is."""
        wave = self._waves[0]
        self._waves.rotate(-1)
        with torch.inference_mode():
            finished = wave.draw(wave.read(self._model), self._ends)
            if 2 * wave.rows < len(wave.lanes):
                wave.compact()
        if not wave.rows:
            self._waves.remove(wave)
        return finished

    def _joined(self, wave: _Wave) -> bool:
        for running in self._waves:
            if running.suits(wave):
                running.join(wave)
                return True
        return False

    def abort(self, ids: Collection[int]) -> None:
        """End the rows of works ``ids``; they are not among any Finished."""
        with torch.inference_mode():
            gone = torch.tensor(sorted(ids), dtype=torch.int64, device=self._ends.device)
            for wave in self._waves:
                wave.abort(gone)
        self._waves = deque(wave for wave in self._waves if wave.rows)

    def clear(self) -> None:
        """Forget every row."""
        self._waves.clear()


class _Wave:
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
        token, logprob = draw(logits, lanes.temperature, uniforms(lanes.key, lanes.drawn), **cut)
        lanes.accept(token, logprob)
        finished = lanes.finish((token[:, None] == ends).any(1))
        if finished is not None:
            self.rows -= len(finished.work)
            if not np.isfinite(finished.logprobs.values).all():
                raise EngineError("the model's logits are not finite: the loaded weights are broken")
        return finished

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

    def suits(self, other: _Wave) -> bool:
        """Whether one pass over both costs little more than one over each."""
        if not (kv.joinable(self.cache) and kv.joinable(other.cache)):
            return False
        shapes = [(wave.rows, wave.cache.get_seq_length() + _ROW_COST) for wave in (self, other)]
        apart = sum(rows * cost for rows, cost in shapes)
        together = sum(rows for rows, _ in shapes) * max(cost for _, cost in shapes)
        return bool(together <= _WASTE * apart)

    def join(self, other: _Wave) -> None:
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


def _prefill(model: Any, works: Sequence[Work]) -> tuple[_Wave, Any]:
    """Read the distinct prompts once; the wave of all rows, and the logits (rows, vocabulary) they start from."""
    place: dict[bytes, int] = {}
    prompt_of = [place.setdefault(work.prompt.tobytes(), len(place)) for work in works]
    prompts = Ragged.of([np.frombuffer(prompt, np.int32) for prompt in place])
    ids = torch.from_numpy(prompts.padded(0, side="left").astype(np.int64)).to(model.device)
    lengths = torch.from_numpy(prompts.lengths).to(model.device)
    columns = torch.arange(ids.shape[1], device=model.device) - ids.shape[1] + lengths[:, None]
    mask = None if bool((columns[:, 0] == 0).all()) else columns >= 0
    cache = kv.new_cache(model)
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=columns.clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    rows = torch.from_numpy(np.repeat(prompt_of, [work.n for work in works])).to(model.device)
    kv.keep(cache, rows, 0)
    truncated = any(work.sampling.top_k or work.sampling.top_p < 1 for work in works)
    wave = _Wave(Lanes.of(works, model.device), cache, None if mask is None else mask[rows], truncated)
    return wave, output.logits[:, -1][rows]


def end_tokens(model: Any) -> list[int]:
    """Token ids that end a response: the generation configuration's, else the model configuration's."""
    generation = getattr(model, "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    if ends is None:
        ends = getattr(model.config.get_text_config(), "eos_token_id", None)
    if ends is None:
        return []
    return [int(end) for end in ends] if isinstance(ends, (list, tuple)) else [int(ends)]
