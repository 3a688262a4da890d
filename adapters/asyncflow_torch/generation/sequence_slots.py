"""SequenceSlots: rows that decode together, one tensor per field; their requests and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncflow_sdk.interfaces import SAMPLING_MASK, StopTexts
from asyncflow_sdk.types import Ragged, Sampling

from .sampler import row_keys

DTYPES = {"token_ids": np.int32, "logprobs": np.float32, **dict.fromkeys(SAMPLING_MASK, np.int32)}
"""Columns of finished rows."""


@dataclass(frozen=True)
class DecodeWork:
    """Request for ``n`` responses to one prompt (int32 (length,)). ``id``: in FinishedBatch and in
    abort. ``past``: number of tokens at the end of the prompt that belong to the response;
    ``first``: number of the first response. Both count in the random numbers. ``stops``: the stop
    texts."""

    id: int
    prompt: npt.NDArray[np.int32]
    n: int
    sampling: Sampling
    seed: int | None = None
    past: int = 0
    first: int = 0
    stops: StopTexts | None = None

    @property
    def truncated(self) -> bool:
        """True if it draws by top-k, top-p or min-p."""
        return bool(self.sampling.top_k or self.sampling.top_p < 1 or self.sampling.min_p)

    @property
    def masked(self) -> bool:
        """True if the kept tokens of its draws are returned."""
        return self.sampling.sampling_mask and self.truncated and self.sampling.temperature > 0

    @property
    def begun(self) -> list[int]:
        """The last response tokens in the prompt: a stop text may begin in them."""
        past = self.prompt[len(self.prompt) - self.past :].tolist()
        return [] if self.stops is None else past[-self.stops.window :]


@dataclass(frozen=True)
class FinishedBatch:
    """Ended rows: work, number among its n, tokens, and True in ``stopped`` for an end token.
    ``ragged``: token_ids, logprobs and the columns of SAMPLING_MASK. ``aborted``: True if all were interrupted."""

    work: npt.NDArray[np.int64]
    index: npt.NDArray[np.int64]
    ragged: Mapping[str, Ragged]
    stopped: npt.NDArray[np.bool_]
    aborted: bool = False


def joined(parts: Sequence[FinishedBatch]) -> FinishedBatch:
    """Return all rows of ``parts``, those of one work together. Either all parts were interrupted,
    or none."""
    if len(parts) == 1:  # a batch keeps the rows of a work together
        return parts[0]
    work = np.concatenate([part.work for part in parts])
    order = np.argsort(work, kind="stable")
    return FinishedBatch(
        work=work[order], index=np.concatenate([part.index for part in parts])[order],
        ragged={name: Ragged.concat([part.ragged[name] for part in parts]).take(order) for name in DTYPES},
        stopped=np.concatenate([part.stopped for part in parts])[order], aborted=parts[0].aborted,
    )  # fmt: skip


def untouched(work: DecodeWork) -> FinishedBatch:
    """Return the rows of a work interrupted before its prompt was read."""
    n, none = work.n, np.zeros(work.n, np.int64)
    return FinishedBatch(
        work=np.full(n, work.id), index=np.arange(n),
        ragged={name: Ragged.from_lengths(np.empty(0, dtype), none) for name, dtype in DTYPES.items()},
        stopped=np.zeros(n, np.bool_), aborted=True,
    )  # fmt: skip


@dataclass
class SequenceSlots:
    """Rows that decode together. The first dimension of each field is the row; all are on one
    device."""

    work: Any  # int64: DecodeWork.id
    index: Any  # int64: which of the n responses
    key: Any  # int64: key of the random numbers
    limit: Any  # int64: maximum of drawn tokens
    temperature: Any  # float32
    top_k: Any  # int64
    top_p: Any  # float32
    min_p: Any  # float32
    penalty: Any  # float32
    seen: Any  # bool (rows, vocabulary): tokens of prompt and response; (rows, 0) without penalties
    position: Any  # int64: position of the next token to read
    drawn: Any  # int64: tokens drawn so far
    past: Any  # int64: response tokens in the prompt
    token: Any  # int64: last drawn token, not read yet
    live: Any  # bool: neither ended nor aborted
    token_ids: Any  # int32 (rows, longest limit)
    logprobs: Any  # float32 (rows, longest limit)
    masked: Any  # bool: the kept tokens are returned
    kept_ids: Any  # int32 (rows, most): of all drawn tokens, one after another; (rows, 0) without masks
    kept_counts: Any  # int32 (rows, longest limit)
    stops: Any  # int64 (rows, most stop ids): id + 1, 0 is none
    begun: Any  # int64 (rows, longest): id + 1 of the last response tokens in the prompt; 0 is none
    stop_texts: Any  # int64: by StopNumbers

    @classmethod
    def of(
        cls, works: Sequence[DecodeWork], device: Any, vocabulary: int, stop_texts: Sequence[int]
    ) -> SequenceSlots:
        """Return the rows of ``works``, one work after another, without drawn tokens. ``stop_texts``: of
        each work."""
        counts = np.array([work.n for work in works])
        ends = counts.cumsum()
        rows, longest = int(ends[-1]), max(work.sampling.max_tokens for work in works)
        stops = _padded([work.sampling.stop_ids for work in works])
        begun = _padded([work.begun for work in works])
        penalised = any(work.sampling.repetition_penalty != 1 for work in works)
        seen = np.zeros((len(works), vocabulary if penalised else 0), np.bool_)
        for number, work in enumerate(works if penalised else ()):
            seen[number, work.prompt] = True

        def per_row(values: Sequence[Any], dtype: Any = np.int64) -> Any:
            return torch.from_numpy(np.repeat(np.array(values, dtype), counts)).to(device)

        return cls(
            work=per_row([work.id for work in works]),
            index=torch.from_numpy(np.arange(rows) - np.repeat(ends - counts, counts)).to(device),
            key=torch.from_numpy(
                np.concatenate([row_keys(work.seed, work.first + work.n)[work.first :] for work in works])
            ).to(device),
            limit=per_row([work.sampling.max_tokens for work in works]),
            temperature=per_row([work.sampling.temperature for work in works], np.float32),
            top_k=per_row([work.sampling.top_k for work in works]),
            top_p=per_row([work.sampling.top_p for work in works], np.float32),
            min_p=per_row([work.sampling.min_p for work in works], np.float32),
            penalty=per_row([work.sampling.repetition_penalty for work in works], np.float32),
            seen=torch.from_numpy(np.repeat(seen, counts, 0)).to(device),
            position=per_row([len(work.prompt) for work in works]),
            drawn=torch.zeros(rows, dtype=torch.int64, device=device),
            past=per_row([work.past for work in works]),
            token=torch.zeros(rows, dtype=torch.int64, device=device),
            live=torch.ones(rows, dtype=torch.bool, device=device),
            token_ids=torch.zeros(rows, longest, dtype=torch.int32, device=device),
            logprobs=torch.zeros(rows, longest, dtype=torch.float32, device=device),
            masked=per_row([work.masked for work in works], np.bool_),
            kept_ids=torch.zeros(rows, int(any(work.masked for work in works)), dtype=torch.int32, device=device),
            kept_counts=torch.zeros(rows, longest, dtype=torch.int32, device=device),
            stops=torch.from_numpy(np.repeat(stops, counts, 0)).to(device),
            begun=torch.from_numpy(np.repeat(begun, counts, 0)).to(device),
            stop_texts=per_row(stop_texts),
        )

    def __len__(self) -> int:
        return len(self.live)

    def take(self, rows: Any) -> SequenceSlots:
        """Return a copy of ``rows``, in this order."""
        return SequenceSlots(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def keep(self, rows: Any) -> None:
        """Keep ``rows``, in this order."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name)[rows])

    def join(self, other: SequenceSlots) -> None:
        """Append the rows of ``other``."""
        for field in fields(self):
            parts = [getattr(slots, field.name) for slots in (self, other)]
            if parts[0].ndim == 2:
                width = max(part.shape[1] for part in parts)
                parts = [torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts]
            setattr(self, field.name, torch.cat(parts))

    def accept(self, token: Any, logprob: Any, kept: Any) -> None:
        """Append one drawn token per row with its log-prob, and the kept tokens, as of `draw`."""
        # Hazard: ended rows draw until they are dropped. Clamped to the edge, they overwrite only tokens already
        # returned, and exceed neither the buffer nor the model's positions.
        at = self.drawn.clamp(max=self.token_ids.shape[1] - 1)[:, None]
        self.token_ids.scatter_(1, at, token[:, None].to(torch.int32))
        self.logprobs.scatter_(1, at, logprob[:, None])
        if self.seen.shape[1]:
            self.seen.scatter_(1, token[:, None], True)
        if kept is not None:
            self._keep_ids(kept & self.live[:, None], at)
        self.token = token
        self.drawn += self.live

    def _keep_ids(self, kept: Any, at: Any) -> None:
        """Append the kept tokens of each row, bool (rows, vocabulary); ``at``: places of their counts."""
        begins, counts = self.kept_counts.sum(1), kept.sum(1)
        rows, ids = kept.nonzero(as_tuple=True)
        places = torch.arange(len(rows), device=rows.device) + (begins - counts.cumsum(0) + counts)[rows]
        width, most = self.kept_ids.shape[1], int((begins + counts).max())
        if most > width:
            self.kept_ids = torch.nn.functional.pad(self.kept_ids, (0, max(most, 2 * width) - width))
        self.kept_ids[rows, places] = ids.to(torch.int32)
        self.kept_counts.scatter_(1, at, counts[:, None].to(torch.int32))

    def finish(self, stop: Any) -> FinishedBatch | None:
        """End live rows at True in ``stop`` (bool (rows,)) or at their limit, and return them; None
        for no rows."""
        return self._end(self.live & (stop | (self.drawn >= self.limit)), stop)

    def interrupt(self) -> FinishedBatch | None:
        """End all live rows and return them; None for no rows."""
        return self._end(self.live, None)

    def _end(self, done: Any, stop: Any) -> FinishedBatch | None:
        rows = done.nonzero()[:, 0]
        if not len(rows):
            return None
        self.live = self.live & ~done
        lengths, counts = self.drawn[rows], self.kept_counts[rows]
        tables = (self.token_ids[rows], self.logprobs[rows], self.kept_ids[rows], counts)
        sizes = (lengths, lengths, counts.sum(1), lengths)
        return FinishedBatch(
            work=self.work[rows].cpu().numpy(),
            index=self.index[rows].cpu().numpy(),
            ragged=dict(zip(DTYPES, map(_begins, tables, sizes), strict=True)),
            stopped=np.zeros(len(rows), np.bool_) if stop is None else stop[rows].cpu().numpy(),
            aborted=stop is None,
        )


def _begins(table: Any, sizes: Any) -> Ragged:
    """Return the first ``sizes`` values of each row."""
    inside = torch.arange(table.shape[1], device=table.device) < sizes[:, None]
    return Ragged.from_lengths(table[inside].cpu().numpy(), sizes.cpu().numpy())


def _padded(lists: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Return ids + 1, one row a list, padded with 0."""
    table = np.zeros((len(lists), max(map(len, lists))), np.int64)
    for number, ids in enumerate(lists):
        table[number, : len(ids)] = np.asarray(ids, np.int64) + 1
    return table
