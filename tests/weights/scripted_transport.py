"""A transport whose receiver does as a test says: fails, waits, is interrupted, keeps a base."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from memory_transport import MemoryReceiver, MemoryTransport

from asyncflow_sdk.errors import WireError
from asyncflow_sdk.interfaces import Fetched, Host
from asyncflow_sdk.types import Manifest

LIMIT_S = 30.0
"""Only ends a test that would hang."""


class ScriptedReceiver(MemoryReceiver):
    """``script``: what each fetch does before it fetches, one call after another; those after it just fetch."""

    keeps_base: ClassVar[bool] = True

    def __init__(self) -> None:
        self.script: list[Callable[[ScriptedReceiver, Manifest], None]] = []
        self.fetched: list[tuple[int, int | None]] = []  # version, base
        self.given: list[Fetched] = []
        self.wanted_no_more = threading.Event()
        self.busy = threading.Lock()

    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        assert self.busy.acquire(blocking=False), "two fetches at once"
        try:
            self.wanted_no_more.clear()
            self.fetched.append((manifest.version, base.manifest.version if base is not None else None))
            assert base is None or len(base.chunks), "the base was released"
            if self.script:
                self.script.pop(0)(self, manifest)
            self.given.append(super().fetch(manifest, where, timeout_s=timeout_s))
            return self.given[-1]
        finally:
            self.busy.release()

    def interrupt(self) -> None:
        self.wanted_no_more.set()

    @property
    def versions(self) -> list[int]:
        return [version for version, _ in self.fetched]

    @property
    def held(self) -> list[int]:
        """Versions that were fetched and not released."""
        return [fetched.manifest.version for fetched in self.given if len(fetched.chunks)]


class ScriptedTransport(MemoryTransport):
    def __init__(self) -> None:
        self.end = ScriptedReceiver()

    def receiver(self, host: Host) -> ScriptedReceiver:
        return self.end


def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedReceiver:
    """From now on every transport is one of these, whatever its name."""
    transport = ScriptedTransport()
    for module in ("publisher", "prefetch"):
        monkeypatch.setattr(f"asyncflow_sdk.weights.{module}.transport_named", lambda name, **options: transport)
    return transport.end


def fails(error: Exception) -> Callable[[ScriptedReceiver, Manifest], None]:
    def step(receiver: ScriptedReceiver, manifest: Manifest) -> None:
        raise error

    return step


def until_interrupted(receiver: ScriptedReceiver, manifest: Manifest) -> None:
    assert receiver.wanted_no_more.wait(LIMIT_S), "was not interrupted"
    raise WireError(f"interrupted while fetching version {manifest.version}")


def and_then(action: Callable[[], Any]) -> Callable[[ScriptedReceiver, Manifest], None]:
    """A fetch during which something else happens."""

    def step(receiver: ScriptedReceiver, manifest: Manifest) -> None:
        action()

    return step
