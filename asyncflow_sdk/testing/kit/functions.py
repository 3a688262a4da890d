"""What workers do that are started to check others: importable where they run."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

FAILURE = "told to fail, to see whether anyone hears of it"


def where(x: Sequence[Any]) -> list[int]:
    """The process that it runs in, for each row."""
    return [os.getpid()] * len(x)


def odd(response_ids: Sequence[Any]) -> list[float]:
    """A reward that differs between responses to a prompt, and means nothing."""
    return [float(len(ids) % 2) for ids in response_ids]


def fails(x: Sequence[Any]) -> list[int]:
    raise RuntimeError(FAILURE)


def sleeps(x: Sequence[Any]) -> list[int]:
    time.sleep(3600)
    return [0] * len(x)
