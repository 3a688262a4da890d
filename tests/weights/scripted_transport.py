"""The transport "scripted" for a plugin: a MemoryTransport whose fetches follow a script.

``Scripted.end`` is the receiver of every replica; a test tells it what each fetch does before it fetches. ``Scripted.send``
is called with each manifest before it is sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import asyncflow_sdk as af
from asyncflow_sdk.errors import WireError
from asyncflow_sdk.interfaces import Fetched, Host, WeightReceiver, WeightSender
from asyncflow_sdk.plugins import AdapterSpec
from asyncflow_sdk.testing.memory import MemoryReceiver, MemorySender, MemoryTransport
from asyncflow_sdk.types import Manifest

LIMIT_S = 60.0
"""Only ends a test that would hang."""

Step = Callable[["ScriptedReceiver", Manifest], Any]


class ScriptedReceiver(MemoryReceiver):
    """``script``: what each fetch does before it fetches, one call after another; those after it just fetch."""

    keeps_base: ClassVar[bool] = True

    def __init__(self) -> None:
        self.script: list[Step] = []
        self.fetched: list[tuple[int, int | None]] = []  # version, base
        self.given: list[Fetched] = []
        self.interrupted, self.closed = threading.Event(), threading.Event()
        self._busy = threading.Lock()

    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        assert self._busy.acquire(blocking=False), "two fetches at once"
        try:
            self.interrupted.clear()
            self.fetched.append((manifest.version, base.manifest.version if base is not None else None))
            assert base is None or len(base.chunks), "the base was released"
            if self.script:
                self.script.pop(0)(self, manifest)
            self.given.append(super().fetch(manifest, where, timeout_s=timeout_s))
            return self.given[-1]
        finally:
            self._busy.release()

    def interrupt(self) -> None:
        self.interrupted.set()

    def close(self) -> None:
        self.closed.set()

    @property
    def held(self) -> list[int]:
        """Versions that were fetched and not released."""
        return [fetched.manifest.version for fetched in self.given if len(fetched.chunks)]


class ScriptedSender(MemorySender):
    outlives = True

    def send(self, manifest: Manifest) -> bytes:
        Scripted.send(manifest)
        return super().send(manifest)

    def keep(self, versions: Sequence[int]) -> None:
        Scripted.keep(versions)
        super().keep(versions)

    def close(self) -> None:
        pass


class Scripted(MemoryTransport):
    end: ClassVar[ScriptedReceiver]
    send: ClassVar[Callable[[Manifest], Any]]
    keep: ClassVar[Callable[[Sequence[int]], Any]]

    def sender(self, host: Host) -> WeightSender:
        return ScriptedSender()

    def receiver(self, host: Host) -> WeightReceiver:
        return Scripted.end

    @classmethod
    def reset(cls) -> None:
        cls.end, cls.send, cls.keep = ScriptedReceiver(), lambda manifest: None, lambda versions: None


def fails(error: Exception) -> Step:
    def step(receiver: ScriptedReceiver, manifest: Manifest) -> None:
        raise error

    return step


def until_interrupted(receiver: ScriptedReceiver, manifest: Manifest) -> None:
    assert receiver.interrupted.wait(LIMIT_S), "was not interrupted"
    raise WireError(f"interrupted while fetching version {manifest.version}")


@af.hookimpl
def asyncflow_adapters() -> list[AdapterSpec]:
    return [AdapterSpec(kind="transport", name="scripted", factory="scripted_transport:Scripted")]
