"""Leased prompts: the rows of one lease, with the token ids of their prompts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, SchemaError
from ...queue import AsyncLeasedBatch
from ...types import Batch
from .chat import Encoded, PromptEncoder
from .tokenizer import token_ids

Ids: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass(eq=False)
class PromptLease:
    """``shared``: ranges of rows with the same prompt. ``prompt_ids``: one a row. ``version``:
    loaded when the lease began. ``requests``: unfinished ones. ``tokens``: generated so far."""

    batch: AsyncLeasedBatch
    shared: list[range]
    prompt_ids: list[Encoded]
    version: int
    began: float = field(default_factory=time.monotonic)
    requests: int = 0
    tokens: int = 0

    def prompt(self, row: int) -> Ids:
        """Return the token ids of a row's prompt. Raises SchemaError if it could not be encoded."""
        prompt = self.prompt_ids[row]
        if isinstance(prompt, SchemaError):
            raise SchemaError(f"the prompt cannot be encoded: {prompt}")
        return prompt

    def find(self, ids: npt.NDArray[np.int64]) -> set[int]:
        """Return the positions of the rows with these ids."""
        return set(np.flatnonzero(np.isin(self.batch.ids, ids)).tolist())


class PromptReader:
    """Reads the prompts of leased rows. ``column``: "prompt_ids" holds token ids, any other text, chats or token ids.
    ``per_row``: each row has its own prompt; default: groups share one. ``limit``: the tokens kept of a longer
    prompt, its last ones."""

    def __init__(
        self, column: str, encoder: PromptEncoder | None, *, per_row: bool = False, limit: int | None = None
    ) -> None:
        self._column, self._encoder, self._per_row, self._limit = column, encoder, per_row, limit

    def read(self, batch: AsyncLeasedBatch, version: int) -> PromptLease:
        """Encode prompts. Raises SchemaError for invalid token ids, ConfigError without a tokenizer."""
        firsts = np.arange(batch.rows) if self._per_row else np.flatnonzero(np.diff(batch.groups, prepend=-1))
        shared = list(map(range, firsts.tolist(), np.append(firsts[1:], batch.rows).tolist()))
        prompts = self._encode(batch, firsts.tolist())
        rows = [prompt for rows, prompt in zip(shared, prompts, strict=True) for _ in rows]
        return PromptLease(batch, shared, rows, version)

    def _encode(self, batch: Batch, rows: list[int]) -> list[Encoded]:
        if self._column == "prompt_ids" or batch.spec(self._column).kind not in ("text", "json"):
            ids = token_ids(batch, self._column)
            return [ids[row].copy() for row in rows]
        if self._encoder is None:
            raise ConfigError(
                f"column {self._column!r} is text, and there is no tokenizer to encode it; name its folder:"
                " Generate(..., tokenizer=FOLDER)"
            )
        encoded = self._encoder.encode_rows(batch.take(rows), self._column)
        return [e if isinstance(e, SchemaError) or not self._limit else e[-self._limit :] for e in encoded]
