"""StopTexts: the stop texts of a request, searched in the tokens of its responses.

watch = request.watch()                               # in an engine, for each response
async for ids in stream:                              # all tokens of the response so far
    if watch is not None and watch.found(ids):
        abort(...)                                    # and yield it, with the reason "stop"
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TOKENS_OF_A_LETTER, MARGIN = 4, 4
"""A token has at least one byte of a letter. Decoders change the text of the first token."""
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class StopTexts:
    """``texts``: one or more. ``decode``: returns the text of token ids, without special tokens."""

    texts: tuple[str, ...]
    decode: Decode

    @property
    def window(self) -> int:
        """Number of tokens at the end of a response that are decoded in search of a text."""
        return MARGIN + TOKENS_OF_A_LETTER * max(map(len, self.texts))

    def inside(self, ids: Sequence[int]) -> bool:
        """True if the text of ``ids`` contains one of the texts."""
        text = self.decode(ids)
        return any(each in text for each in self.texts)

    def end(self, ids: Sequence[int]) -> int | None:
        """Return the number of tokens up to the completion of the first text; None without one."""
        if not self.inside(ids):
            return None
        return bisect.bisect_left(range(len(ids)), True, key=lambda count: self.inside(ids[:count]))


class StopWatch:
    """Follows one response. ``past``: its tokens in the prompt, of a continued response."""

    def __init__(self, stops: StopTexts, past: Sequence[int] = ()) -> None:
        self._stops, self._past = stops, list(past)
        self._seen, self._found = 0, False

    def found(self, ids: Sequence[int]) -> bool:
        """True if the response contains a text. ``ids``: all its tokens behind the prompt, so far.

        Decodes the new tokens and the window before them, and the whole response only if a text is
        in those. False again once the engine has removed the tokens of the text.
        """
        whole = [*self._past, *ids]
        if len(whole) < self._seen:
            self._seen, self._found = 0, False
        if not self._found:
            near = whole[max(self._seen - self._stops.window, 0) :]
            self._found = self._stops.inside(near) and (len(near) == len(whole) or self._stops.inside(whole))
        self._seen = len(whole)
        return self._found
