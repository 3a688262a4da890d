"""Tokenizer: text to token ids and back, by a tokenizer.json; and checks of given token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, PluginError, SchemaError
from ...types import Batch, Ragged, Sampling

LARGEST_ID = 2**31 - 1


def token_ids(batch: Batch, column: str) -> Ragged:
    """Return a column of token ids as int32. Raises SchemaError, with the row, for other values."""
    ids = batch.ragged(column)
    if ids.values.ndim != 1 or ids.values.dtype.kind not in "iu":
        raise SchemaError(
            f"column {column!r} holds token ids, a list of whole numbers a row, and not {batch.spec(column)}"
        )
    wrong = (ids.values < 0) | (ids.values > LARGEST_ID)
    if wrong.any():
        first = int(wrong.argmax())
        row = int(np.searchsorted(ids.offsets, first, side="right")) - 1
        raise SchemaError(f"column {column!r}: row {row} has {ids.values[first]}, which is no token id")
    return Ragged(ids.values.astype(np.int32, copy=False), ids.offsets)


def with_stop_ids(sampling: Sampling, tokenizer: Tokenizer | None) -> Sampling:
    """Add the texts of ``stop`` that are one token to ``stop_ids``, so that every engine ends at it.
    Raises ConfigError without a tokenizer."""
    if not sampling.stop:
        return sampling
    if tokenizer is None:
        raise ConfigError(
            f"stop={sampling.stop!r} is text, and there is no tokenizer to encode it: name a tokenizer, or give"
            " stop_ids"
        )
    encoded = [ids.tolist() for ids in tokenizer.encode(sampling.stop, special=False)]
    single = [ids[0] for ids in encoded if len(ids) == 1]
    return replace(sampling, stop_ids=tuple(dict.fromkeys((*sampling.stop_ids, *single))))


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first of the stop texts in it."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


class Tokenizer:
    """The tokenizer in ``file``, by the package ``tokenizers``. Thread-safe."""

    def __init__(self, file: str) -> None:
        try:
            import tokenizers
        except ImportError:
            raise PluginError(
                "text prompts need tokenizers; install it with: pip install 'asyncflow-sdk[text]'"
            ) from None
        self.file, self._tokenizer = Path(file), tokenizers.Tokenizer.from_file(file)

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[npt.NDArray[np.int32]]:
        """Return the token ids of each text. ``special``: with the tokenizer's special tokens, as
        at the beginning of a text. Raises SchemaError for a text that cannot be encoded."""
        try:
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
        except Exception as error:  # its only exception class, without the text
            raise SchemaError(f"{self._find_invalid(texts)} cannot be encoded by {self.file}: {error}") from error
        return [np.array(e.ids, np.int32) for e in encoded]

    def _find_invalid(self, texts: Sequence[str]) -> str:
        for number, text in enumerate(texts):
            try:
                self._tokenizer.encode(text)
            except Exception:
                return f"text {number} of {len(texts)}, {text!r:.80},"
        return f"one of {len(texts)} texts"

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of one row, without special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def decode(self, ids: Ragged) -> list[str]:
        """Return the text of each row, without special tokens."""
        return list(self._tokenizer.decode_batch(ids.tolist(), skip_special_tokens=True))
