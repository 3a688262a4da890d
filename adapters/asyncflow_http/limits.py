"""Limits of served engines: defaults of their options, and RequestLimits: which requests they can
answer."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncflow_sdk.errors import EngineError
from asyncflow_sdk.interfaces import Request

MAX_ROWS = 256
"""Concurrent responses of an engine."""
START_S = 600.0
"""Limit of an engine's start."""
RESPONSE_S = 1800.0
"""Limit of a response."""
UPDATE_S = 600.0
"""Limit of each call of a load."""
PARTS = 64
"""Most parts of a response with stop texts: each is searched, and up to 1/64 is drawn behind a text."""


def interval(max_tokens: int) -> int:
    """Return the tokens of one part of a response with stop texts."""
    return max(1, max_tokens // PARTS)


class RequestLimits:
    """``vocabulary``: token ids are below it. ``context``: maximum of tokens of prompt and
    response, None if unknown. ``rows``: maximum of responses per request."""

    def __init__(self, *, vocabulary: int, context: int | None, rows: int) -> None:
        self.vocabulary, self.context, self.rows = vocabulary, context, rows

    def check(self, request: Request) -> list[int]:
        """Return the prompt. Raises EngineError for a request that cannot be answered."""
        prompt, most = self.tokens(request.prompt_ids), request.sampling.max_tokens
        if not prompt:
            raise EngineError("a prompt has one token or more, and this one has none")
        if not 1 <= request.n <= self.rows:
            raise EngineError(f"n must be 1 to max_rows={self.rows}, not {request.n}")
        if self.context is not None and len(prompt) + most > self.context:
            raise EngineError(
                f"a prompt of {len(prompt)} tokens and max_tokens={most} need {len(prompt) + most}; the context is"
                f" {self.context}"
            )
        if not 0 <= request.drawn < len(prompt) or request.first < 0:
            raise EngineError(
                f"no response has drawn {request.drawn} of {len(prompt)} tokens, or number {request.first}"
            )
        return prompt

    def tokens(self, ids: Any) -> list[int]:
        """Return a row of token ids as a list. Raises EngineError for other shapes, dtypes and ids."""
        row: np.ndarray[Any, Any] = np.asarray(ids)
        if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
            raise EngineError(
                f"expected the shape (tokens,) of token ids, not {row.dtype}: {row.dtype}{list(row.shape)} came"
            )
        outside = row[(row < 0) | (row >= self.vocabulary)] if row.size else row
        if outside.size:
            raise EngineError(f"token id {outside[0]} is not in the vocabulary of {self.vocabulary}")
        return row.tolist()  # type: ignore[no-any-return]

    def pairs(self, prompts: Any, responses: Any) -> list[tuple[list[int], list[int]]]:
        """Return prompts and responses to score. Raises EngineError for unequal numbers."""
        if len(prompts) != len(responses):
            raise EngineError(f"{len(prompts)} prompts and {len(responses)} responses are no pairs")
        return [
            (self.tokens(prompt), self.tokens(response)) for prompt, response in zip(prompts, responses, strict=True)
        ]
