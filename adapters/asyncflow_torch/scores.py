"""Log-probs of given responses, the proof of the weights that an engine holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncflow_sdk.errors import EngineError, SchemaError
from asyncflow_sdk.types import Batch

from .chunked_head import ChunkedHead
from .collate import check_tokens
from .generation.prefill import PASS_TOKENS
from .logprobs import batch_logprobs
from .policy import context_of, vocabulary_of


def score(
    model: Any, head: ChunkedHead | None, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return log-probs of each response after its prompt, at temperature 1. Raises EngineError for
    sequences that the model cannot take."""
    if len(prompts) != len(responses):
        raise EngineError(f"{len(prompts)} prompts and {len(responses)} responses are no pairs")
    if not len(prompts):
        return []
    batch = Batch.of({"prompt_ids": _ids(prompts), "response_ids": _ids(responses)})
    try:
        check_tokens(batch, vocabulary=vocabulary_of(model), context=context_of(model))
    except SchemaError as error:
        raise EngineError(f"sequences cannot be scored: {error}") from error
    found = batch_logprobs(model, batch, head=head, temperature=1.0, tokens=PASS_TOKENS)
    return [row.tolist() for row in found]


def _ids(rows: Sequence[Sequence[int]]) -> list[npt.NDArray[np.int64]]:
    arrays: list[npt.NDArray[Any]] = [np.asarray(row) for row in rows]
    for number, array in enumerate(arrays):
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise EngineError(f"sequence {number} is {array.dtype}{list(array.shape)}, not a row of token ids")
    return [array.astype(np.int64) for array in arrays]
