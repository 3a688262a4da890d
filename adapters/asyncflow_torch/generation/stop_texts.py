"""StopTexts: which running rows have come to a stop text.

Only the last tokens of a row are decoded, so a step costs the same at any length. The caller of the
engine decides by the whole response where it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

TOKENS_OF_A_LETTER, MARGIN = 4, 4
"""A token has at least one byte of a letter. Decoders change the text of the first token."""


class StopTexts:
    """The stop texts of requests. ``folder``: the model's, with its tokenizer.json; None: without one
    no text is found. Rows refer to their texts by the number that ``number`` returns; 0 is none. Not
    thread-safe."""

    def __init__(self, folder: str | None = None) -> None:
        self._file = Path(folder or "-") / "tokenizer.json"
        self.available = self._file.is_file()
        self._tokenizer: Any = None
        self._numbers: dict[tuple[str, ...], int] = {}
        self._texts: list[tuple[str, ...]] = [()]

    def number(self, texts: Sequence[str]) -> int:
        """Return the number of some stop texts."""
        key = tuple(texts)
        if not key or not self.available:
            return 0
        if key not in self._numbers:
            self._numbers[key] = len(self._texts)
            self._texts.append(key)
        return self._numbers[key]

    def found(self, slots: Any) -> Any:
        """Return True for rows whose last tokens hold one of their stop texts: bool (rows,)."""
        rows = (slots.live & (slots.stop_texts > 0)).nonzero()[:, 0]
        found = torch.zeros_like(slots.live)
        if not len(rows):
            return found
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(self._file))
        wanted = [self._texts[number] for number in slots.stop_texts[rows].tolist()]
        tails = []
        for texts, ids, drawn in zip(wanted, slots.token_ids[rows].cpu(), slots.drawn[rows].tolist(), strict=True):
            window = MARGIN + TOKENS_OF_A_LETTER * max(map(len, texts))
            tails.append(ids[max(0, drawn - window) : drawn].tolist())
        decoded = self._tokenizer.decode_batch(tails, skip_special_tokens=True)
        ended = [any(text in tail for text in texts) for texts, tail in zip(wanted, decoded, strict=True)]
        found[rows] = torch.tensor(ended, device=found.device)
        return found
