"""Completing: finished responses become columns, and go to the ledger together, in one command a lease: at once when a lease
is through or nothing was sent for a while, else with what finishes in the next moment."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import LeaseLost
from ..interfaces import Completion
from ..queue import AsyncLeasedBatch
from ..queue.awaiting import is_set
from ..types import LOSS_MASK, VERSION_SPANS, Ragged, one_version
from .drawing import spans_of
from .text import Text

EVERY_S = 0.1
"""So far apart are commands for leases that are not through: responses of a few tokens end all the time (seconds)."""
Ids = np.ndarray[tuple[int], np.dtype[np.int32]]


class Answer(NamedTuple):
    """What a row came to. ``version`` drew all of it where the response has no spans. ``mask``: bool (length,), False for
    tokens that were observed; None for a response that is drawn as a whole. ``columns``: what an agent gave beside it."""

    response: Completion
    version: int
    mask: npt.NDArray[np.bool_] | None = None
    columns: Mapping[str, Any] = {}


@dataclass
class Work:
    """A lease being generated: which rows are finished but not yet completed."""

    batch: AsyncLeasedBatch
    prompt_ids: list[Ids]
    version: int
    began: float
    tasks: int = 0
    tokens: int = 0
    done: list[tuple[int, Answer]] = field(default_factory=list)
    left: set[int] = field(default_factory=set)
    """Rows that are not completed yet."""

    def forget(self, ended: npt.NDArray[np.int64]) -> set[int]:
        """Rows with these ids have ended: nothing more is said of them. Returns which of the lease they are."""
        lost = self.among(ended)
        self.left -= lost
        self.done = [(row, answer) for row, answer in self.done if row not in lost]
        return lost

    def among(self, ids: npt.NDArray[np.int64]) -> set[int]:
        """Positions of the rows that have one of these ids."""
        return set(np.flatnonzero(np.isin(self.batch.ids, ids)).tolist())


class Completing:
    """``prefix``: what the names of columns begin with. ``prompt_ids``: whether rows get those, too. ``late`` is told of
    rows that came too late."""

    def __init__(self, prefix: str, text: Text | None, *, prompt_ids: bool, late: Callable[[str], None]) -> None:
        self._prefix, self._text, self._prompt_ids, self._late = prefix, text, prompt_ids, late
        self._finished: dict[int, Work] = {}
        self._wanted, self._through = asyncio.Event(), asyncio.Event()
        self.held = asyncio.Lock()
        """While it is held nothing is completed."""

    def add(self, work: Work, row: int, answer: Answer) -> None:
        """Row ``row`` of a lease is finished."""
        work.done.append((row, answer))
        work.tokens += len(answer.response.token_ids)
        self._finished[work.batch.token] = work
        self._wanted.set()

    def through(self) -> None:
        """A lease is: nothing more comes of it, so what is finished goes now."""
        self._through.set()

    @property
    def finished(self) -> list[Work]:
        """The leases that have rows which are finished and not completed."""
        return list(self._finished.values())

    def forget(self) -> None:
        """What is finished is not completed."""
        self._finished.clear()

    async def run(self) -> None:
        """Complete what finishes until cancelled."""
        clock, sent_s = asyncio.get_running_loop().time, -math.inf
        while True:
            await self._wanted.wait()
            await asyncio.sleep(0)  # whoever the engine woke in this turn adds its rows first
            if not self._through.is_set() and (left_s := sent_s + EVERY_S - clock()) > 0:
                await is_set(self._through, left_s)
            self._wanted.clear()
            self._through.clear()
            sent_s = clock()
            await self.now()

    async def now(self) -> None:
        """Complete what is finished."""
        async with self.held:
            finished, self._finished = self._finished, {}
            for work in finished.values():
                await self._complete(work)

    async def _complete(self, work: Work) -> None:
        rows, work.done = work.done, []
        if not rows:
            return  # they went with an earlier command, sent while this one was due
        index = [row for row, _ in rows]
        work.left.difference_update(index)
        columns = self._columns([answer for _, answer in rows])
        if self._prompt_ids:
            columns["prompt_ids"] = _ragged([work.prompt_ids[row] for row in index], np.int32)
        try:
            await work.batch.complete({self._prefix + name: v for name, v in columns.items()}, index=index)
        except LeaseLost as error:
            self._late(f"{len(index)} responses came too late: {error}")

    def _columns(self, answers: Sequence[Answer]) -> dict[str, Any]:
        responses = [answer.response for answer in answers]
        ids = _ragged([response.token_ids for response in responses], np.int32)
        columns: dict[str, Any] = {
            "response_ids": ids,
            "logprobs": _ragged([response.logprobs for response in responses], np.float32),
            VERSION_SPANS: _spans(answers, ids.lengths),
        }
        if self._text is not None:
            columns["response"] = self._text.decode(ids)
        masks = [answer.mask for answer in answers if answer.mask is not None]
        if masks:
            columns[LOSS_MASK] = _ragged(masks, np.bool_)
        return columns | {name: [answer.columns[name] for answer in answers] for name in answers[0].columns}


def _ragged(rows: Sequence[Any], dtype: npt.DTypeLike) -> Ragged:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return Ragged.from_lengths(np.concatenate(rows).astype(dtype, copy=False), lengths)


def _spans(answers: Sequence[Answer], lengths: npt.NDArray[np.int64]) -> Ragged:
    """The responses' own spans, or all of the version that was loaded."""
    versions = np.fromiter((answer.version for answer in answers), np.int64, len(answers))
    if not any(answer.response.spans for answer in answers):
        return one_version(versions, lengths)
    each = [spans_of(answer.response, answer.version) for answer in answers]
    counts = np.fromiter(map(len, each), np.int64, len(each))
    return Ragged.from_lengths(np.array([span for spans in each for span in spans], np.int64), counts)
