"""The data of the benchmarks, known to no library: a column is one array, or (values, offsets) of ragged rows."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.generic]
Columns: TypeAlias = dict[str, "Array | tuple[Array, npt.NDArray[np.int64]]"]

NUMBERS = ("uid", "group", "version", "prompt_len", "response_len", "reward", "at")
RAGGED = ("prompt_ids", "response_ids", "logprobs")
SMALL = NUMBERS + RAGGED


def small(rows: int, seed: int) -> Columns:
    """Text samples as reinforcement learning has them, 3.2 KB a row: seven numbers and three ragged columns."""
    random = np.random.default_rng(seed)
    prompts, responses = random.integers(64, 257, rows), random.integers(128, 513, rows)
    total = int(responses.sum())
    return {
        "uid": np.arange(rows) + seed * 1_000_003,
        "group": np.arange(rows) // 8,
        "version": np.full(rows, seed),
        "prompt_len": prompts,
        "response_len": responses,
        "reward": random.random(rows, np.float32),
        "at": np.zeros(rows),
        "prompt_ids": (random.integers(0, 150_000, int(prompts.sum()), np.int32), offsets(prompts)),
        "response_ids": (random.integers(0, 150_000, total, np.int32), offsets(responses)),
        "logprobs": (random.random(total, np.float32), offsets(responses)),
    }


def large(rows: int, nbytes: int) -> Columns:
    """One column of tensors, ``nbytes`` a row."""
    values = np.empty((rows, nbytes // 4), np.float32)
    values[:] = np.arange(rows, dtype=np.float32)[:, None]
    return {"tensor": values}


def offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)])


def pick(columns: Columns, names: tuple[str, ...]) -> Columns:
    return {name: columns[name] for name in names}
