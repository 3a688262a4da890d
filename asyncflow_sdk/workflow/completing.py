"""Completing: finished responses become columns, and go to the ledger together, in one command a lease: at once when a lease
is through, else with what finishes in the next moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import LeaseLost
from ..interfaces import Completion, Completions
from ..queue import AsyncLeasedBatch
from ..queue.coroutines import wait_for_event
from ..types import LOSS_MASK, VERSION_SPANS, Ragged, one_version
from .drawing import spans_of
from .text import Text

WAITS_S = 0.1
"""So long a response waits for others at most, where its lease is not through (seconds)."""
Ids = np.ndarray[tuple[int], np.dtype[np.int32]]


class Answer(NamedTuple):
    """What a row came to, or several. ``version`` drew all of it where the response has no spans. ``mask``: bool (length,), False for
    tokens that were observed; None for a response that is drawn as a whole. ``columns``: what an agent gave beside it."""

    response: Completion | Completions
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
    done: list[tuple[Sequence[int], Answer]] = field(default_factory=list)
    left: set[int] = field(default_factory=set)
    """Rows that are not completed yet."""

    def forget(self, ended: npt.NDArray[np.int64]) -> set[int]:
        """Rows with these ids have ended: nothing more is said of them. Returns which of the lease they are."""
        lost = self.among(ended)
        self.left -= lost
        if lost:
            self.done = [each for rows, answer in self.done for each in _without(lost, rows, answer)]
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

    def add(self, work: Work, rows: Sequence[int], answer: Answer) -> None:
        """Rows ``rows`` of a lease are finished."""
        work.done.append((rows, answer))
        work.tokens += len(_values(answer.response.token_ids))
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
        while True:
            await self._wanted.wait()
            await asyncio.sleep(0)  # whoever the engine woke in this turn adds its rows first
            if not self._through.is_set():
                await wait_for_event(self._through, WAITS_S)
            self._wanted.clear()
            self._through.clear()
            await self.now()

    async def now(self) -> None:
        """Complete what is finished."""
        async with self.held:
            finished, self._finished = self._finished, {}
            for work in finished.values():
                await self._complete(work)

    async def _complete(self, work: Work) -> None:
        done, work.done = work.done, []
        if not done:
            return  # they went with an earlier command, sent while this one was due
        index = [row for rows, _ in done for row in rows]
        work.left.difference_update(index)
        columns = self._columns([answer for _, answer in done])
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
            "logprobs": Ragged(_joined([response.logprobs for response in responses], np.float32), ids.offsets),
            VERSION_SPANS: _spans(answers, ids.lengths),
        }
        if self._text is not None:
            columns["response"] = self._text.decode(ids)
        masks = [answer.mask for answer in answers if answer.mask is not None]
        if masks:
            columns[LOSS_MASK] = _ragged(masks, np.bool_)
        return columns | {name: [answer.columns[name] for answer in answers] for name in answers[0].columns}


def _without(lost: set[int], rows: Sequence[int], answer: Answer) -> Iterable[tuple[Sequence[int], Answer]]:
    """Those of ``rows`` that are not ``lost``, and what they came to."""
    if lost.isdisjoint(rows):
        return [(rows, answer)]
    each = zip(rows, answer.response.each(), strict=True)
    return [([row], answer._replace(response=response)) for row, response in each if row not in lost]


def _ragged(parts: Sequence[Any], dtype: npt.DTypeLike) -> Ragged:
    """Rows of which each part is one, or several."""
    lengths: list[int] = []
    for part in parts:
        lengths += part.lengths.tolist() if isinstance(part, Ragged) else (len(part),)
    return Ragged.from_lengths(_joined(parts, dtype), np.array(lengths))


def _joined(parts: Sequence[Any], dtype: npt.DTypeLike) -> Any:
    return np.concatenate([*map(_values, parts)]).astype(dtype, copy=False)


def _values(part: Any) -> Any:
    return part.values if isinstance(part, Ragged) else part


def _spans(answers: Sequence[Answer], lengths: npt.NDArray[np.int64]) -> Ragged:
    """The responses' own spans, or all of the version that was loaded."""
    singles = [answer.response for answer in answers if isinstance(answer.response, Completion)]
    if not any(response.spans for response in singles):
        counts = [len(a.response.index) if isinstance(a.response, Completions) else 1 for a in answers]
        return one_version(np.repeat([answer.version for answer in answers], counts), lengths)
    each = [spans_of(response, answer.version) for answer in answers for response in answer.response.each()]
    return Ragged.of([np.array(spans, np.int64).reshape(-1, 3) for spans in each])
