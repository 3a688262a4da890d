"""Tokenizer: text to token ids and back, by a tokenizer.json; checks of given token ids; end tokens of model
folders. Control tokens are found in text, and kept out of text that a user, a tool or an environment has written.

tokens = Tokenizer("model/tokenizer.json").control
tokens.find("2+3=<|im_end|>")                  # [(4, 14)]
tokens.encode("2+3=<|im_end|>", [(4, 14)])     # these ten characters as text, without the token 151645
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, PluginError, SchemaError
from ...types import Batch, Ragged, Sampling

Ids: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int32]]
Span: TypeAlias = tuple[int, int]  # the position of the first character, and the one after the last
LARGEST_ID = 2**31 - 1
_FORM = re.compile(r"<[|｜].+[|｜]>")  # the tokens of roles are not special in some models


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
        text = f"column {column!r} holds token ids, a list of whole numbers a row, and not {batch.spec(column)}"
        raise SchemaError(text)
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
        text = f"stop={sampling.stop!r} is text, and there is no tokenizer to encode it"
        raise ConfigError(f"{text}: name a tokenizer, or give stop_ids")
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
            text = "text prompts need tokenizers; install it with: pip install 'asyncflow-sdk[text]'"
            raise PluginError(text) from None
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


# ---- control tokens


class ControlTokens:
    """The special tokens of a tokenizer, and added ones in the form "<|User|>". Other added tokens,
    as "<think>" of some models, are text for any message."""

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._plain: tuple[Any, dict[int, str], dict[int, int], int | None] | None = None
        self._tokens = {i: each for i, each in added.items() if each.special or _FORM.fullmatch(each.content)}
        texts = sorted((each.content for each in self._tokens.values()), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._normalizer = tokenizer.normalizer if any(each.normalized for each in self._tokens.values()) else None

    def find(self, text: str) -> list[Span]:
        """Return the parts of a text read as control tokens. Raises SchemaError for one without an encoding."""
        return [span for _, span in self._read(text)]

    def hidden(self, value: Any) -> tuple[Any, Callable[[str], tuple[str, list[Span]]]] | None:
        """Return a copy of nested ``value`` with stand-ins for the control tokens in its texts, and the
        function putting them back into a text and returning their places; None without any. Raises
        SchemaError if only several texts together make one."""
        texts, names = list(_texts(value)), list(_texts(value, names=True))
        joined = "".join(text.strip() for text in texts if text != "text")  # the type of a part stands between two
        if not self._matches(" ".join([joined, *names])):
            return None
        found = {text: self.find(text) for text in [*texts, *names]}
        if len(self.find(joined)) > sum(len(found[text]) for text in texts):
            raise SchemaError("several of its texts together make a control token")
        stand_in, hidden = f"{secrets.randbelow(10**24):024d}", list[str]()  # digits survive a template's filters

        def _hide(text: str) -> str:
            for start, end in reversed(found[text]):
                hidden.append(text[start:end])
                text = f"{text[:start]}{stand_in}{len(hidden) - 1:06d}{text[end:]}"
            return text

        def _restore(text: str) -> tuple[str, list[Span]]:
            whole, spans = "", []
            for number, piece in enumerate(re.split(rf"{stand_in}(\d{{6}})", text)):
                before, whole = len(whole), whole + (hidden[int(piece)] if number % 2 else piece)
                if number % 2:
                    spans.append((before, len(whole)))
            return whole, spans

        return _mapped(value, _hide), _restore

    def encode(self, text: str, plain: Sequence[Span]) -> list[int]:
        """Return the token ids of a text, reading no control tokens in the parts ``plain``. Raises
        SchemaError for a tokenizer without other tokens for such a part."""
        tokenizer, marks, numbers, unknown = self._plain = self._plain or self._make_plain()
        pieces, at, kept = list[str](), 0, list[int]()
        for number, (start, end) in self._read(text):
            if not any(start < b and a < end for a, b in plain):
                pieces += [text[at:start], marks[number]]
                at = end
                kept.append(number)
        encoded = _encoding(tokenizer, "".join([*pieces, text[at:]])).ids
        ids = [numbers.get(each, each) for each in encoded]
        if [each for each in ids if each in self._tokens and each != unknown] != [e for e in kept if e != unknown]:
            raise SchemaError("it holds the text of a control token, which this tokenizer cannot read as text")
        return ids

    def _matches(self, text: str) -> bool:
        text = text if self._normalizer is None else f"{text} {self._normalizer.normalize_str(text)}"
        return self._pattern.search(text) is not None

    def _read(self, text: str) -> Iterator[tuple[int, Span]]:
        if not self._matches(text):
            return
        encoded = _encoding(self._tokenizer, text)
        for number, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
            if number in self._tokens and self._matches(text[start:end]):  # else it stands for an unknown word
                inner = text[start:end].strip()  # a token may take the spaces beside it
                start = text.index(inner, start)
                yield number, (start, start + len(inner))

    def _make_plain(self) -> tuple[Any, dict[int, str], dict[int, int], int | None]:
        """Return a tokenizer with secret marks in place of control tokens, the mark of each, the ids of all added
        tokens by its own, and the id of unknown words. It splits and normalises all else as the original does."""
        from tokenizers import Tokenizer

        described, secret = json.loads(self._tokenizer.to_str()), secrets.token_hex(12)
        marks = {number: f"control{secret}x{number}x" for number in self._tokens}
        for added in described["added_tokens"]:
            added["content"] = marks.get(added["id"], added["content"])
        made: Any = Tokenizer.from_str(json.dumps(described))
        model = described["model"]
        numbers = {made.token_to_id(added["content"]): added["id"] for added in described["added_tokens"]}
        return made, marks, numbers, model.get("unk_id", made.token_to_id(model.get("unk_token") or ""))


def _encoding(tokenizer: Any, text: str) -> Any:
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # its only exception class
        raise SchemaError(f"it holds the text of a control token, and the tokenizer refuses it: {error}") from None


def _texts(value: Any, *, names: bool = False) -> Iterator[str]:
    """Yield all texts of a nested value, or the names of its records' keys."""
    if isinstance(value, Mapping):
        yield from value if names else ()
    elif isinstance(value, str) and not names:
        yield value
    if isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each, names=names)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): _mapped(each, change) for name, each in value.items()}
    return [_mapped(each, change) for each in value] if isinstance(value, (list, tuple)) else value
