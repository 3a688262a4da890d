"""An engine that removes the memory of its run's rows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncflow_sdk as af
from asyncflow_sdk.testing import EchoRollout


class RemovesRows(EchoRollout):
    """At its first request, removes every segment of rows in the directories that ``pattern`` names."""

    def __init__(self, model: str = "", *, pattern: str, **options: Any) -> None:
        super().__init__(model, **options)
        self._pattern = pattern

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        pattern, self._pattern = self._pattern, ""
        if pattern:
            _remove(pattern)
        async for completion in super().generate(request):
            yield completion


def _remove(pattern: str) -> None:
    for path in Path("/dev/shm").glob(f"{pattern}/s[0-9]*"):
        path.unlink()
