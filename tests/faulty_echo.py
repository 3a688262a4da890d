"""The echo rollout engine with faults of loads."""

from __future__ import annotations

from typing import Any

from asyncflow_sdk.errors import EngineError
from asyncflow_sdk.testing import EchoRollout


class FaultyRollout(EchoRollout):
    """From version ``fail_load_at`` on, ``fail_loads`` loads raise half-way and leave weights of two versions (log-probs
    NaN). From version ``take_fewer_at`` on, one tensor is not loaded. Version ``ignore_at`` is reported as loaded and is
    not."""

    def __init__(
        self,
        model: str = "",
        *,
        fail_load_at: int = -1,
        fail_loads: int = 1,
        take_fewer_at: int = -1,
        ignore_at: int = -1,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self._fail_load_at, self._fails_left, self._failing = fail_load_at, fail_loads, False
        self._take_fewer_at, self._ignore_at = take_fewer_at, ignore_at

    def _take(self, version: int, new: dict[str, Any]) -> None:
        self._failing = self._failing or -1 < self._fail_load_at <= version
        if self._failing and self._fails_left:
            self._fails_left -= 1
            super()._take(self._version, dict(list(new.items())[: len(new) // 2]))
            raise EngineError(f"told to fail while loading version {version}")
        if -1 < self._take_fewer_at <= version:
            del new[next(iter(new))]
        super()._take(version, {} if version == self._ignore_at else new)
