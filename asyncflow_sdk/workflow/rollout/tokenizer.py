"""Tokenizer: text to token ids and back, by a tokenizer.json; checks of given token ids; end tokens of model
folders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, PluginError, SchemaError
from ...types import Batch, Ragged, Sampling
from .control_tokens import ControlTokens

LARGEST_ID = 2**31 - 1


def end_tokens(folder: str | Path) -> list[int]:
    """Return the end tokens of a model folder: of its generation configuration, its configuration, the
    part of it for text, and its tokenizer. Every engine ends a response at each of them."""
    return list(dict.fromkeys(end for ends in named_end_tokens(folder).values() for end in ends))


def named_end_tokens(folder: str | Path) -> dict[str, list[int]]:
    """Return the end tokens of a model folder by where they are named."""
    found: dict[str, Any] = {}
    for file in ("generation_config.json", "config.json"):
        config = read_json(Path(folder, file))
        found[file] = config.get("eos_token_id")
        for part in ("text_config", "llm_config"):
            found[f"{part} of {file}"] = (config.get(part) or {}).get("eos_token_id")
    found["the tokenizer"] = _end_token(Path(folder))
    return {name: [ids] if isinstance(ids, int) else list(ids) for name, ids in found.items() if ids is not None}


def _end_token(folder: Path) -> int | None:
    """Return the id of the end token that a folder's tokenizer names; None without one."""
    config = read_json(folder / "tokenizer_config.json") | read_json(folder / "special_tokens_map.json")
    if config.get("eos_token") is None:
        return None
    text, tokenizer = token_text(config["eos_token"]), read_json(folder / "tokenizer.json")
    for added in tokenizer.get("added_tokens", ()):
        if added["content"] == text:
            return int(added["id"])
    for number, added in config.get("added_tokens_decoder", {}).items():
        if added["content"] == text:
            return int(number)
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if not isinstance(vocabulary, dict):  # of Unigram: pairs of token and score
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    return vocabulary.get(text)


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file; empty without the file. Raises ConfigError for another content."""
    try:
        found = json.loads(file.read_bytes())
    except OSError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def token_text(token: Any) -> str:
    """Return the text of a token in a tokenizer's configuration."""
    return str(token["content"] if isinstance(token, dict) else token)


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
    """The tokenizer in ``file``, by the package ``tokenizers``. Thread-safe. ``ends``: decoded texts keep
    special tokens such as markers, except one of these at the end; None: they keep none."""

    def __init__(self, file: str, ends: Iterable[int] | None = None) -> None:
        try:
            import tokenizers
        except ImportError:
            raise PluginError(
                "text prompts need tokenizers; install it with: pip install 'asyncflow-sdk[text]'"
            ) from None
        self.file, self._tokenizer = Path(file), tokenizers.Tokenizer.from_file(file)
        self.control = ControlTokens(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self._ends = None if ends is None else {end for end in ends if end in added and added[end].special}

    @property
    def size(self) -> int:
        """The number of its tokens."""
        return int(self._tokenizer.get_vocab_size())

    def is_doubled(self, encoded: Ragged) -> bool:
        """True if a text begins twice with the special token that this tokenizer adds to each."""
        starts = encoded.offsets[:-1][encoded.lengths > 1]
        return any(
            bool(((encoded.values[starts] == first) & (encoded.values[starts + 1] == first)).any())
            for first in self.encode([""])[0][:1]
        )

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[npt.NDArray[np.int32]]:
        """Return the token ids of each text. ``special``: with the tokenizer's special tokens, as
        at the beginning of a text. Raises SchemaError with the first text without an encoding."""
        try:
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
        except Exception as error:  # its only exception class, without the text
            if len(texts) > 1:
                return [self.encode([text], special=special)[0] for text in texts]
            raise SchemaError(f"{texts[0]!r:.80} cannot be encoded by {self.file}: {error}") from error
        return [np.array(e.ids, np.int32) for e in encoded]

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of one row, without special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def decode(self, ids: Ragged) -> list[str]:
        """Return the text of each row."""
        if self._ends is None:
            return list(self._tokenizer.decode_batch(ids.tolist(), skip_special_tokens=True))
        rows = [row[:-1] if row and row[-1] in self._ends else row for row in ids.tolist()]
        return list(self._tokenizer.decode_batch(rows, skip_special_tokens=False))
