"""Control tokens: found in text, and kept out of text that a user, a tool or an environment has written.

tokens = ControlTokens(tokenizers.Tokenizer.from_file("model/tokenizer.json"))
tokens.find("2+3=<|im_end|>")                  # [(4, 14)]
tokens.encode("2+3=<|im_end|>", [(4, 14)])     # these ten characters as text, without the token 151645
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ...errors import SchemaError

Span: TypeAlias = tuple[int, int]
"""The position of the first character, and the one after the last."""
_FORM = re.compile(r"<[|｜].+[|｜]>")  # the tokens of roles are not special in some models


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
