"""Link: calls to SGLang in this process (`InProcessLink`) or by HTTP
(`asyncflow_http.server.HttpServer`), by the routes of its server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from asyncflow_http.client import ANSWER_BYTES, HTTP_CALL_S, AnswerType


class Link(Protocol):
    """``name``: of this SGLang in errors."""

    name: str

    async def post(
        self, path: str, body: Mapping[str, Any], answer: type[AnswerType], *, timeout_s: float = HTTP_CALL_S,
        most_bytes: int = ANSWER_BYTES, part: Callable[[AnswerType], None] | None = None,
    ) -> AnswerType:  # fmt: skip
        """Return the answer as an ``answer``; for ``object``, unread. ``part``: called on this event
        loop with each part of a streamed answer; the last part is returned. Raises EngineError
        for a refused call and an unreadable answer, EngineGone after ``timeout_s`` and if SGLang is
        lost; both contain the name."""

    async def close(self) -> None:
        """Release SGLang, and end it if it was started for this engine. Idempotent."""
