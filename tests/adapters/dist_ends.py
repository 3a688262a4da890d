"""Ends of the transport ``dist`` for tests: receivers in processes of their own, and both ends in this one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from children import Child
from dist_children import content, receive, write
from waiting import in_thread

from asyncflow_sdk.interfaces import Host
from asyncflow_sdk.types import Manifest
from asyncflow_torch import dist_receiver
from asyncflow_torch.transport_dist import DistSender, DistTransport

HERE = Host(directory=None, name="trainer")
MB = 1 << 20


class Receiver:
    """A receiver in a process of its own."""

    def __init__(self, name: str, *place: str, within: Sequence[str] = ()) -> None:
        self.name = name
        self.child = Child(receive, name, *place, within=within)
        self._ready = False
        self.owes = 0

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.child.__exit__()

    def wait_ready(self) -> None:
        if not self._ready:
            assert self.child.hear() == "ready"
            self._ready = True

    def told(self, sent: Sent, *, at: int = 0, number: int = 0, timeout_s: float = 30.0) -> None:
        self.wait_ready()
        self.owes += 1
        self.child.say(
            {
                "manifest": msgspec.json.encode(sent.manifest).decode(), "where": sent.where.hex(),
                "at": at, "signal": number, "timeout_s": timeout_s,
            }
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.child.hear()
        self.owes -= 1
        return answer

    def got(self, sent: Sent) -> dict[str, Any]:
        """It has every byte of it."""
        answer = self.answer()
        assert answer.get("content") == sent.content, (self.name, answer)
        return answer

    def failed(self, *words: str) -> str:
        answer = self.answer()
        assert "error" in answer, (self.name, answer)
        for word in words:
            assert word in answer["says"], answer
        return str(answer["error"])


class Sent:
    def __init__(self, manifest: Any, where: bytes, said: str) -> None:
        self.manifest, self.where, self.content = manifest, where, said


def received_of(publisher: Child) -> Sent:
    """What a publisher in another process says it has sent."""
    manifest, where, said = publisher.hear()
    return Sent(msgspec.json.decode(manifest, type=Manifest), bytes.fromhex(where), said)


def sent_by(sender: DistSender, version: int, nbytes: int = 2 * MB, **options: Any) -> Sent:
    manifest, memory = write(sender, version, nbytes, **options)
    return Sent(manifest, sender.send(manifest), content(memory))


Crew = Callable[[int], list[Receiver]]


@contextlib.contextmanager
def a_sender(**options: Any) -> Iterator[DistSender]:
    sender = DistTransport(**{"stall_s": 2.0, "gather_s": 30.0} | options).sender(HERE)
    assert isinstance(sender, DistSender)
    try:
        yield sender
    finally:
        sender.close()
        sender.close()


def until(sender: DistSender, condition: Callable[[], object]) -> None:
    with sender._rounds._changed:
        assert sender._rounds._changed.wait_for(condition, 30)


def together(sender: DistSender, receivers: list[Receiver], sent: Sent, **damage: Any) -> None:
    """They ask for it, and are served together. ``damage``: what the second of them does."""
    for place, each in enumerate(receivers):
        each.told(sent, **damage if place == 1 else {})
    rounds = sender._rounds
    if not rounds._rounds:  # the first one does not know yet for whom to wait
        until(sender, lambda: len(rounds._asking) == len(receivers))
        with rounds._changed:
            rounds._gather_s, before = 0.0, rounds._gather_s
            rounds._changed.notify_all()
        until(sender, lambda: rounds._rounds)
        rounds._gather_s = before


@contextlib.contextmanager
def a_receiver(name: str = "r") -> Iterator[dist_receiver.DistReceiver]:
    receiver = DistTransport().receiver(Host(directory=None, name=name))
    assert isinstance(receiver, dist_receiver.DistReceiver)
    try:
        yield receiver
    finally:
        receiver.close()
        receiver.close()


class Gate:
    """Whoever calls it, as ``name`` of ``owner``, stands still until the gate is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self._reached, self._open = threading.Event(), threading.Event()
        real = getattr(owner, name)

        def held(*arguments: Any) -> Any:
            self._reached.set()
            assert self._open.wait(30)
            return real(*arguments)

        monkeypatch.setattr(owner, name, held)

    def wait(self) -> None:
        """Until somebody stands there."""
        assert self._reached.wait(30)

    def open(self) -> None:
        self._open.set()


def fetching(receiver: dist_receiver.DistReceiver, sent: Sent, timeout_s: float = 60.0) -> Callable[[], Any]:
    """It fetches in a thread; the returned call gives what came, or the error."""
    return in_thread(receiver.fetch, sent.manifest, sent.where, timeout_s=timeout_s)
