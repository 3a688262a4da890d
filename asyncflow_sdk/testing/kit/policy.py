"""Policy: a model whose every answer is known, so that an engine that holds it can be told right from wrong."""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..echo import weights
from .check import DoesNotApply, NotAsked

Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float64]
Tensors = Mapping[str, npt.NDArray[Any]]


class Policy(abc.ABC):
    """Versions 0, 1, 2, ... of one model. Version 0 is what an engine loads from ``folder``; others reach it as updates, and
    differ from each other in every weight so much that their answers do.

    ``vocabulary``: token ids run below it. ``context``: the most tokens of prompt and response.
    """

    vocabulary: int
    context: int
    ends: Sequence[int] | None = None
    """The tokens that end a response, which has them as its last; None where responses end for another reason too."""
    learns: bool = True
    """Whether training on rewards changes its answers by them."""
    rollout: tuple[str, Mapping[str, Any]] = ("timed", {"median": 8.0, "sigma": 0.5, "longest": 24, "step_s": 0.002})
    """A rollout engine for runs of train engines, and its options: it takes this policy's weights, and gives rows to train on."""

    @property
    @abc.abstractmethod
    def folder(self) -> str:
        """What an engine's factory is given as ``model``."""

    @abc.abstractmethod
    def tensors(self, version: int) -> Tensors:
        """The weights of a version, by the names of the checkpoint, tied ones once; bfloat16 and the like by ml_dtypes."""

    @abc.abstractmethod
    def logprobs(self, version: int, prompt: Ids, response: Ids, temperature: float = 1.0) -> Logprobs:
        """Of each token of ``response`` after ``prompt``: natural log, float64 (length,), over the whole vocabulary."""

    @abc.abstractmethod
    def greedy(self, version: int, prompt: Ids, max_tokens: int) -> Ids:
        """The most likely response, with the end token if it comes to one."""

    def next_logprobs(self, version: int, prompt: Ids, temperature: float = 1.0) -> Logprobs | None:
        """Of each token as the next one: (vocabulary,). None where answers are not drawn."""
        return None

    def ahead(self, version: int, prompt: Ids, response: Ids) -> Logprobs | None:
        """Of each token at each place of ``response``, after all that comes before it: (length, vocabulary). None where answers
        are not drawn."""
        rows = []
        for at in range(len(response)):
            row = self.next_logprobs(version, np.concatenate([prompt, response[:at]]))
            if row is None:
                return None
            rows.append(row)
        return np.stack(rows)

    def retokenised(self, ids: Ids) -> Ids | None:
        """What ids become that are decoded to text and encoded again. None where there is no text."""
        return None

    def logprobs_of(self, tensors: Tensors, prompt: Ids, response: Ids) -> Logprobs:
        """As ``logprobs`` at temperature 1, under weights that are given. Checks of train engines need it, and no others."""
        raise NotAsked(f"{type(self).__name__} has no logprobs_of(), which answers by given weights")

    def read(self, folder: Path) -> Tensors:
        """The weights in a model folder that a train engine has exported, named as in ``tensors``."""
        raise NotAsked(f"{type(self).__name__} has no read(), which reads an exported model folder")

    def rounded(self, dtype: str) -> Policy:
        """This model, its weights rounded to bfloat16, from a folder where they are stored as ``dtype``: "bfloat16", or the same numbers
        in "float32". Checks of train engines need it, and no others."""
        raise DoesNotApply(f"{type(self).__name__} has no rounded(), which makes a checkpoint in bfloat16")

    def prompts(self, count: int, *, longest: int = 12, seed: int = 0) -> Sequence[Ids]:
        """Prompts of 2 to ``longest`` tokens."""
        random = np.random.default_rng(seed)
        low = min(3, self.vocabulary - 1)  # below are padding, begin and end
        return [
            random.integers(low, self.vocabulary, random.integers(2, longest + 1)).astype(np.int32)
            for _ in range(count)
        ]


class EchoPolicy(Policy):
    """What `EchoRollout` and `EchoTrain` are: a response repeats its prompt, its log-probs are minus the version."""

    vocabulary = 1000
    context = 4096
    folder = ""
    learns = False
    rollout = ("echo", {"delay_s": 0.01})

    def tensors(self, version: int) -> Tensors:
        return weights(version)

    def logprobs(self, version: int, prompt: Ids, response: Ids, temperature: float = 1.0) -> Logprobs:
        return np.full(len(response), -float(version))

    def logprobs_of(self, tensors: Tensors, prompt: Ids, response: Ids) -> Logprobs:
        return np.full(len(response), -float(tensors["scale"]))

    def read(self, folder: Path) -> Tensors:
        return weights(json.loads((folder / "echo.json").read_text())["steps"])

    def greedy(self, version: int, prompt: Ids, max_tokens: int) -> Ids:
        return prompt[:max_tokens]
