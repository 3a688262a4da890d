"""StopNumbers: the running rows at a stop text.

Only the last tokens of a row are decoded, so a step costs the same at any length. The caller of the
engine decides by the whole response where it ends.
"""

from __future__ import annotations

from typing import Any

import torch

from asyncflow_sdk.interfaces import StopTexts


class StopNumbers:
    """The stop texts of requests. Rows refer to theirs by a ``number``; 0 is none. Not
    thread-safe."""

    def __init__(self) -> None:
        self._numbers: dict[StopTexts | None, int] = {None: 0}

    def number(self, stops: StopTexts | None) -> int:
        """Return the number of some stop texts."""
        return self._numbers.setdefault(stops, len(self._numbers))

    def found(self, slots: Any) -> Any:
        """Return True for rows whose last tokens hold one of their stop texts: bool (rows,)."""
        rows = (slots.live & (slots.stop_texts > 0)).nonzero()[:, 0]
        found = torch.zeros_like(slots.live)
        if not len(rows):
            return found
        known = list(self._numbers)
        ended = []
        each = (slots.stop_texts, slots.begun, slots.drawn)
        for number, begun, drawn, ids in zip(
            *(field[rows].tolist() for field in each), slots.token_ids[rows].cpu(), strict=True
        ):
            stops = known[number]
            assert stops is not None
            whole = [token - 1 for token in begun if token] + ids[max(0, drawn - stops.window) : drawn].tolist()
            ended.append(stops.inside(whole[-stops.window :]))
        found[rows] = torch.tensor(ended, device=found.device)
        return found
