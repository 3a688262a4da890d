"""HttpClient: calls to one inference server, each with a deadline and a bound on its answer.

client = HttpClient("http://127.0.0.1:8000", "", "the server")
reply = await client.post("/generate", body, Reply)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import aiohttp
import msgspec

from asyncflow_sdk.errors import EngineError, EngineGone

HTTP_CALL_S = 60.0
KEEPALIVE_S = 2.0  # less than the servers' 5 s, so no connection is reused as its server closes it
ANSWER_BYTES = 1 << 20
_SHOWN_CHARACTERS = 2000
_END, _DONE = b"\n\n", b"data: [DONE]"
"""End of a server-sent event; the last event."""
AnswerType = TypeVar("AnswerType")


class ConnectionDropped(EngineGone):
    """Raised when a connection failed. The server may still answer others."""


class RequestRefused(EngineError):
    """Raised for a status other than 200. ``status``: the answer's."""

    status: int

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _Failure(msgspec.Struct):
    """Body of a failed request: an object or text in ``error``, or ``message``, or ``detail``."""

    error: Any = None
    message: Any = None
    detail: Any = None


class HttpClient:
    """``url``: without a path. ``key``: API key, "" for none. ``name``: of the server in errors.
    Used on one event loop until ``close``, then possibly on another."""

    def __init__(self, url: str, key: str, name: str) -> None:
        self.name, self._url = name, url
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._session: aiohttp.ClientSession | None = None

    async def post(
        self, path: str, body: Mapping[str, Any], answer: type[AnswerType], *, timeout_s: float = HTTP_CALL_S,
        most_bytes: int = ANSWER_BYTES, part: Callable[[AnswerType], None] | None = None,
    ) -> AnswerType:  # fmt: skip
        """Return the JSON answer as an ``answer``; for ``object``, the raw bytes. ``part``: called
        with each part of an answer in server-sent events; the last part is returned.
        Raises RequestRefused for another status than 200, EngineError for an unreadable or too long
        answer, EngineGone after ``timeout_s``, ConnectionDropped if the connection fails; each
        names the server."""
        return await self._call("POST", path, msgspec.json.encode(body), answer, timeout_s, most_bytes, part)

    async def get(
        self, path: str, answer: type[AnswerType], *, timeout_s: float = HTTP_CALL_S, most_bytes: int = ANSWER_BYTES
    ) -> AnswerType:
        """Like ``post``."""
        return await self._call("GET", path, None, answer, timeout_s, most_bytes)

    async def close(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _call(
        self,
        method: str,
        path: str,
        body: bytes | None,
        answer: type[AnswerType],
        timeout_s: float,
        most_bytes: int,
        part: Callable[[AnswerType], None] | None = None,
    ) -> AnswerType:
        if self._session is None:
            # No proxy from the environment between a worker and its engine.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, trust_env=False)
        call = f"{self.name} ({method} {path})"
        try:
            async with self._session.request(
                method, self._url + path, data=body, timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as response:  # fmt: skip
                raw, status, last = bytearray(), response.status, None
                async for piece in response.content.iter_any():
                    raw += piece
                    while part is not None and status == 200 and (end := raw.find(_END)) >= 0:
                        event, raw = raw[:end], raw[end + len(_END) :]
                        if event != _DONE:
                            part(last := self._read(event.removeprefix(b"data: "), answer, call))
                    if len(raw) > most_bytes:
                        raise EngineError(f"{call} answered with more than {most_bytes} bytes")
        except asyncio.TimeoutError:
            raise EngineGone(f"{call} has not answered in {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionDropped(f"{call} cannot be reached: {type(error).__name__}: {error}") from error
        if status != 200:
            raise RequestRefused(f"{call} answered with status {status}: {_failure_text(raw)}", status)
        return last if last is not None else self._read(raw, answer, call)

    def _read(self, raw: bytes | bytearray, answer: type[AnswerType], call: str) -> AnswerType:
        if answer is object:
            return cast(AnswerType, bytes(raw))
        try:
            return msgspec.json.decode(raw, type=answer)
        except msgspec.DecodeError as error:
            raise EngineError(f"{call} answered what cannot be read: {error}: {_failure_text(raw)}") from None


def _failure_text(raw: bytes | bytearray) -> str:
    """Return the message in the body of a failed request, or its beginning."""
    try:
        failure = msgspec.json.decode(raw, type=_Failure)
        found = next((each for each in (failure.error, failure.message, failure.detail) if each), None)
        if isinstance(found, dict):
            found = found.get("message", found)
        if found is not None:
            return str(found)[:_SHOWN_CHARACTERS]
    except msgspec.DecodeError:
        pass
    return bytes(raw[:_SHOWN_CHARACTERS]).decode(errors="replace")
