"""The interfaces that a server calls: RequestHandler for replays, Handler for a running server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .uploads import PayloadSink


class RequestHandler(Protocol):
    """Executes requests. All calls come from one thread."""

    def request(self, session: str, ticket: int, body: bytes, payload: Any) -> None:
        """Execute a request. Call ``Server.answer`` now or later. ``payload``: the sink returned by
        ``sink``, filled unless it has an error; None for a request without payload."""

    def dropped(self, session: str, seq: int, ticket: int, answer: bytes | None) -> None:
        """The client cancelled a request, or will not read its answer. ``answer``: None if there
        is none yet. ``ticket`` 0 without an answer: the request has not arrived yet."""


class Handler(RequestHandler, Protocol):
    """Executes the requests of a running server. All calls come from the server's thread."""

    def sink(self, session: str, body: bytes, nbytes: int) -> PayloadSink:
        """Return a sink for the payload of a request, before the payload arrives. Must not raise."""

    def make(self, answer: bytes) -> tuple[bytes, Sequence[Any]]:
        """Render a stored answer for sending: return the body, and contiguous buffers to send
        beside it. The buffers must not change while anything refers to them."""

    def gone(self, session: str, reason: str) -> None:
        """The process of a session ended."""

    def idle(self) -> float | None:
        """Called after every round. Return the seconds until the next call is due, None for never."""

    def settle(self) -> bool:
        """Called before answers are sent: store everything that they depend on. Return False to
        hold the answers back until the next round."""
