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
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .lanes import Finished, Work
from .wave import Wave, begin


class Decoder:
    """Decodes rows of many requests with one model. Its methods run the model and so block."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._waves: deque[Wave] = deque()
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
            wave, logits = begin(self._model, works)
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

    def read_again(self, prompts: Mapping[int, npt.NDArray[np.int32]]) -> dict[int, int]:
        """Read what every row has read once more, with the weights the model has now. ``prompts``: of each work
        that has rows. Returns how many tokens each of these works has drawn so far."""
        drawn: dict[int, int] = {}
        waves, self._waves = self._waves, deque()
        with torch.inference_mode():
            while waves:
                for wave in waves.popleft().read_again(self._model, prompts):
                    drawn.update(zip(wave.lanes.work.tolist(), wave.lanes.drawn.tolist(), strict=True))
                    if not self._joined(wave):
                        self._waves.append(wave)
        return drawn

    def _joined(self, wave: Wave) -> bool:
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

    def interrupt(self) -> list[Finished]:
        """End every row where it is: what each has drawn so far."""
        with torch.inference_mode():
            ended = [wave.lanes.interrupt() for wave in self._waves]
        self._waves.clear()
        return [finished for finished in ended if finished is not None]

    def clear(self) -> None:
        """Forget every row."""
        self._waves.clear()


def end_tokens(model: Any) -> list[int]:
    """Token ids that end a response: the generation configuration's, else the model configuration's."""
    generation = getattr(model, "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    if ends is None:
        ends = getattr(model.config.get_text_config(), "eos_token_id", None)
    if ends is None:
        return []
    return [int(end) for end in ends] if isinstance(ends, (list, tuple)) else [int(ends)]
