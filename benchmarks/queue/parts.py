"""The rows of the table: what is measured, of whom, and which figure of it counts."""

from __future__ import annotations

import statistics as st
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .contender import SPEEDUP

Result = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """A contender at a workload, with its options by whether it shall be quick."""

    contender: str
    workload: str
    options: Callable[[str, bool], dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """``limit``: what ours is held against besides the peer. Rows of the same trial share its runs."""

    work: str
    unit: str
    ours: Trial
    peer: Trial | None
    limit: Trial | None
    value: Callable[[Result], float]

    @property
    def trials(self) -> list[Trial]:
        return [trial for trial in (self.ours, self.peer, self.limit) if trial is not None]


def rows_a_second(result: Result) -> float:
    return float(result["rows"] / _seconds(result))


def rows_taken_a_second(result: Result) -> float:
    return float(result["rows"] / st.median(result["take_s"]))


def gigabytes_a_second(result: Result) -> float:
    return float(result["bytes"] / _seconds(result) / 1e9)


def _seconds(result: Result) -> float:
    """Of the median repetition, puts and takes together."""
    if "seconds" in result:
        return float(st.median(result["seconds"]))
    return float(st.median(put + take for put, take in zip(result["put_s"], result["take_s"], strict=True)))


def small(contender: str, batch: int, batches: int, take: int | None = None) -> Trial:
    """``batches``: for the peer; who is faster gets more."""

    def options(contender: str, quick: bool) -> dict[str, Any]:
        count = max(batches * SPEEDUP[contender] // (4 if quick else 1), 2)
        if take is not None:  # the peer gives a whole batch or nothing
            count = -(-count // take) * take
        return {"batches": count, "batch": batch, "take": take or batch, "repeats": 2 if quick else 3}

    return Trial(contender, "put_get", options)


def large(contender: str, rows: int) -> Trial:
    def options(contender: str, quick: bool) -> dict[str, Any]:
        nbytes = (1 << 30) // rows // (4 if quick else 1)
        return {"batches": 1, "batch": rows, "take": rows, "nbytes": nbytes, "repeats": 2}

    return Trial(contender, "put_get", options)


def chained(contender: str) -> Trial:
    def options(contender: str, quick: bool) -> dict[str, Any]:
        return {"batches": 24 * SPEEDUP[contender] // (4 if quick else 1)}

    return Trial(contender, "stream", options)


def _three(work: str, unit: str, trial: Callable[[str], Trial], value: Callable[[Result], float]) -> Part:
    return Part(work, unit, trial("ours"), trial("peer"), trial("shm"), value)


PARTS = [
    _three("put + get, batch 1", "rows/s", lambda c: small(c, 1, 100), rows_a_second),
    _three("put + get, batch 32", "rows/s", lambda c: small(c, 32, 30), rows_a_second),
    _three("put + get, batch 256", "rows/s", lambda c: small(c, 256, 8), rows_a_second),
    _three("1 GiB in 64 x 16 MB, copied out", "GB/s", lambda c: large(c, 64), gigabytes_a_second),
    _three("1 GiB in 1024 x 1 MB, copied out", "GB/s", lambda c: large(c, 1024), gigabytes_a_second),
    _three("stream: 2 producers, 3 tasks x 2 consumers, batch 32", "rows/s", chained, rows_a_second),
    Part(
        "the same over tcp, no shared memory (limit: zmq)", "rows/s",
        chained("ours-tcp"), chained("peer"), chained("zmq-tcp"), rows_a_second,
    ),
    Part(
        "put + get over tcp, batch 32 (limit: zmq)", "rows/s",
        small("ours-tcp", 32, 30), small("peer", 32, 30), small("zmq-tcp", 32, 30), rows_a_second,
    ),
    Part(
        "get 256 of rows put one by one (limit: put 256 at a time)", "rows/s",
        small("ours", 1, 256, 256), small("peer", 1, 256, 256), small("ours", 256, 8), rows_taken_a_second,
    ),
    Part(
        "put + get, batch 32, journal on (limit: journal off)", "rows/s",
        small("ours-journal", 32, 30), small("peer", 32, 30), small("ours", 32, 30), rows_a_second,
    ),
]  # fmt: skip
