"""Link: how SGLang is asked, be it a server or in this process. Its calls have the names of the routes of SGLang's server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from asyncflow_http.calls import ANSWER_BYTES, CALL_S, Answer


class Link(Protocol):
    """``name``: of who is asked, in errors."""

    name: str

    async def post(
        self, path: str, body: Mapping[str, Any], answer: type[Answer], *, timeout_s: float = CALL_S,
        most_bytes: int = ANSWER_BYTES,
    ) -> Answer:  # fmt: skip
        """What it says, as an ``answer``; ``object``: whatever it says. Raises EngineError for what is refused, and for an answer that
        cannot be read; EngineGone, naming who was asked, when it does not answer in time, and Dropped when a connection ends.
        """

    async def close(self) -> None:
        """Idempotent."""
