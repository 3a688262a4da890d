"""Decoder: rows in batches, one token per step, so no row waits for the end of another.

    decoder = Decoder(model, end_tokens(folder))
    done = decoder.admit([DecodeWork(id=0, prompt=ids, n=8, sampling=Sampling(max_tokens=64))])
    while decoder.rows:
        done.append(decoder.step())        # FinishedBatch, or None: the rows that ended in this step

Works admitted together form a batch: its distinct prompts are read once, and each response starts
from a copy of the cache. Recurrent states must not contain padding: their models read prompts of
one length as one batch. A new batch joins a running one if that wastes little; otherwise they take
turns. Ended rows are dropped once they are half of a batch. Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from . import kv
from .decode_batch import DecodeBatch, begin
from .prefill import passes
from .sequence_slots import DecodeWork, FinishedBatch
from .stop_texts import StopNumbers


class Decoder:
    """Decodes rows of many requests with one model. Methods run the model and block. ``ends``: end tokens. Raises
    ConfigError for a model with states that it cannot keep."""

    def __init__(self, model: Any, ends: Sequence[int]) -> None:
        self._model, self._texts = model, StopNumbers()
        with torch.inference_mode():
            self._padded = kv.padded(kv.checked_cache(model))
        self._batches: deque[DecodeBatch] = deque()
        self._ends = torch.tensor(ends, dtype=torch.int64, device=model.device)

    @property
    def rows(self) -> int:
        """Number of running rows."""
        return sum(batch.rows for batch in self._batches)

    @property
    def batches(self) -> int:
        """Number of forward passes for one more token of each row."""
        return len(self._batches)

    def admit(self, works: Sequence[DecodeWork]) -> list[FinishedBatch | None]:
        """Read the prompts of ``works`` and draw the first token of each response."""
        ended = []
        with torch.inference_mode():
            for rows in passes([work.prompt for work in works], padded=self._padded):
                batch, logits = begin(self._model, [works[row] for row in rows], self._texts)
                ended.append(batch.draw(logits, self._ends, self._texts))
                if batch.rows and not self._joined(batch):
                    self._batches.append(batch)
        return ended

    def step(self) -> FinishedBatch | None:
        """Draw one token for each row of the next batch in turn."""
        batch = self._batches[0]
        self._batches.rotate(-1)
        with torch.inference_mode():
            finished = batch.draw(batch.read(self._model), self._ends, self._texts)
            if 2 * batch.rows < len(batch.slots):
                batch.compact()
        if not batch.rows:
            self._batches.remove(batch)
        return finished

    def recompute(self, prompts: Mapping[int, npt.NDArray[np.int32]]) -> dict[int, int]:
        """Read all tokens of the running rows again, with the current weights. ``prompts``: of each
        work with running rows. Return the number of tokens drawn so far, by work."""
        drawn: dict[int, int] = {}
        batches, self._batches = self._batches, deque()
        with torch.inference_mode():
            while batches:
                for batch in batches.popleft().recompute(self._model, prompts):
                    drawn.update(zip(batch.slots.work.tolist(), batch.slots.drawn.tolist(), strict=True))
                    if not self._joined(batch):
                        self._batches.append(batch)
        return drawn

    def _joined(self, batch: DecodeBatch) -> bool:
        for running in self._batches:
            if running.suits(batch):
                running.join(batch)
                return True
        return False

    def abort(self, ids: Collection[int]) -> None:
        """Drop the rows of works ``ids``; no FinishedBatch contains them."""
        with torch.inference_mode():
            gone = torch.tensor(sorted(ids), dtype=torch.int64, device=self._ends.device)
            for batch in self._batches:
                batch.abort(gone)
        self._batches = deque(batch for batch in self._batches if batch.rows)

    def interrupt(self) -> list[FinishedBatch]:
        """End all rows and return them with the tokens drawn so far."""
        with torch.inference_mode():
            ended = [batch.slots.interrupt() for batch in self._batches]
        self._batches.clear()
        return [finished for finished in ended if finished is not None]

    def clear(self) -> None:
        """Drop all rows."""
        self._batches.clear()
