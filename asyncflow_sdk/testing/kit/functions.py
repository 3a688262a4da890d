"""Functions of workers started by checks: importable in the worker."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from ...workflow.loops.user_code import ServiceAway

FAILURE = "told to fail, to see whether anyone hears of it"


def where(x: Sequence[Any]) -> list[int]:
    """Return the worker's process id for each row."""
    return [os.getpid()] * len(x)


def odd(response_ids: Sequence[Any]) -> list[float]:
    """Return a meaningless reward with differences within a group."""
    return [float(len(ids) % 2) for ids in response_ids]


def fails(x: Sequence[Any]) -> list[int]:
    """Raise an error without a fault of its rows: it ends the worker."""
    raise ServiceAway(FAILURE)


def sleeps(x: Sequence[Any]) -> list[int]:
    """Sleep for an hour."""
    time.sleep(3600)
    return [0] * len(x)
