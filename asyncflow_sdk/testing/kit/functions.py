"""What workers do that are started to check a launcher: importable where they run."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

FAILURE = "told to fail, to see whether anyone hears of it"


def where(x: Sequence[Any]) -> list[int]:
    """The process that it runs in, for each row."""
    return [os.getpid()] * len(x)


def fails(x: Sequence[Any]) -> list[int]:
    raise RuntimeError(FAILURE)


def sleeps(x: Sequence[Any]) -> list[int]:
    time.sleep(3600)
    return [0] * len(x)
