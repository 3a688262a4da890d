"""Policy: a model with known answers, the reference for engines with its weights."""

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
    """Versions 0, 1, 2, ... of one model.

    Engines load version 0 from ``folder``; the others are updates, with differences in every weight large enough to
    change the answers. ``vocabulary``: token ids are below it. ``context``: the most tokens of prompt and response.
    """

    vocabulary: int
    context: int
    ends: Sequence[int] | None = None
    """End tokens, the last tokens of their responses; None if responses also end for other reasons."""
    learns: bool = True
    """True if training on rewards changes the answers accordingly."""
    rollout: tuple[str, Mapping[str, Any]] = ("timed", {"median": 8.0, "sigma": 0.5, "longest": 24, "step_s": 0.002})
    """A rollout engine for runs of train engines, with its options: it loads this policy's
    weights and gives rows to train on."""

    @property
    @abc.abstractmethod
    def folder(self) -> str:
        """The ``model`` argument of an engine's factory."""

    @abc.abstractmethod
    def tensors(self, version: int) -> Tensors:
        """Return the weights of a version, by the checkpoint's names, tied ones once; bfloat16 and
        the like by ml_dtypes."""

    @abc.abstractmethod
    def logprobs(self, version: int, prompt: Ids, response: Ids, temperature: float = 1.0) -> Logprobs:
        """Return the natural log-prob of each token of ``response`` after ``prompt``, float64
        (length,), over the whole vocabulary."""

    @abc.abstractmethod
    def greedy(self, version: int, prompt: Ids, max_tokens: int) -> Ids:
        """Return the most likely response, with its end token if there is one."""

    def next_logprobs(self, version: int, prompt: Ids, temperature: float = 1.0) -> Logprobs | None:
        """Return the log-prob of each possible next token: (vocabulary,). None if answers are not drawn."""
        return None

    def ahead(self, version: int, prompt: Ids, response: Ids) -> Logprobs | None:
        """Return the log-probs of all tokens at each place of ``response``: (length, vocabulary).
        None if answers are not drawn."""
        rows = []
        for at in range(len(response)):
            row = self.next_logprobs(version, np.concatenate([prompt, response[:at]]))
            if row is None:
                return None
            rows.append(row)
        return np.stack(rows)

    def text(self, ids: Ids) -> str | None:
        """Return the text of ids, without special tokens. None without text."""
        return None

    def retokenised(self, ids: Ids) -> Ids | None:
        """Return ids after decoding to text and encoding again. None without text."""
        return None

    def logprobs_of(self, tensors: Tensors, prompt: Ids, response: Ids) -> Logprobs:
        """Return log-probs as `logprobs` at temperature 1, under the given weights. For checks of
        train engines only."""
        raise NotAsked(f"{type(self).__name__} has no logprobs_of(), which answers by given weights")

    def read(self, folder: Path) -> Tensors:
        """Return the weights in a model folder exported by a train engine, with the names of `tensors`."""
        raise NotAsked(f"{type(self).__name__} has no read(), which reads an exported model folder")

    def rounded(self, dtype: str) -> Policy:
        """Return this model with weights rounded to bfloat16, in a folder with ``dtype``:
        "bfloat16", or equal numbers in "float32".

        For checks of train engines only.
        """
        raise DoesNotApply(f"{type(self).__name__} has no rounded(), which makes a checkpoint in bfloat16")

    def prompts(self, count: int, *, longest: int = 12, seed: int = 0) -> Sequence[Ids]:
        """Return prompts of 2 to ``longest`` tokens."""
        random = np.random.default_rng(seed)
        low = min(3, self.vocabulary - 1)  # below are padding, begin and end
        return [
            random.integers(low, self.vocabulary, random.integers(2, longest + 1)).astype(np.int32)
            for _ in range(count)
        ]


class EchoPolicy(Policy):
    """The policy of `EchoRollout` and `EchoTrain`: a response repeats its prompt, its log-probs are
    minus the version."""

    vocabulary = 1000
    context = 4096
    folder = ""
    learns = False
    rollout = ("echo", {"delay_s": 0.01})

    def tensors(self, version: int) -> Tensors:
        """Return weights with ``version`` steps."""
        return weights(version)

    def logprobs(self, version: int, prompt: Ids, response: Ids, temperature: float = 1.0) -> Logprobs:
        """Return minus the version for each token."""
        return np.full(len(response), -float(version))

    def logprobs_of(self, tensors: Tensors, prompt: Ids, response: Ids) -> Logprobs:
        """Return minus the steps of the weights for each token."""
        return np.full(len(response), -float(tensors["scale"]))

    def read(self, folder: Path) -> Tensors:
        """Return the weights of an echo export."""
        return weights(json.loads((folder / "echo.json").read_text())["steps"])

    def greedy(self, version: int, prompt: Ids, max_tokens: int) -> Ids:
        """Return the prompt, cut to ``max_tokens``."""
        return prompt[:max_tokens]
