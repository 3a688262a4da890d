"""Calls: requests to one inference server, each with a deadline and a bound on its answer."""

from __future__ import annotations

import asyncio
import ipaddress
import urllib.parse
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import aiohttp
import msgspec

from asyncflow_sdk.errors import ConfigError, EngineError, EngineGone

CALL_S = 60.0
KEEPALIVE_S = 2.0  # below the server's own, which is 5: what it is about to close is not used again
ANSWER_BYTES = 1 << 20
_SAID = 2000
Answer = TypeVar("Answer")


class Dropped(EngineGone):
    """Raised when a connection ended. The server may be there for others."""


class Refused(EngineError):
    """Raised for an answer with another status than 200, which is ``status``."""

    status: int

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _Failure(msgspec.Struct):
    """What an answer that is none may say: an object or a text for ``error``; ``message``; ``detail``."""

    error: Any = None
    message: Any = None
    detail: Any = None


class Calls:
    """``url``: without a path. ``key``: the server's. ``name``: of the server, in errors. Made anywhere, used on one event loop."""

    def __init__(self, url: str, key: str | None, name: str) -> None:
        self.name, self._url = name, url
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._session: aiohttp.ClientSession | None = None

    async def post(
        self, path: str, body: Mapping[str, Any], answer: type[Answer], *, timeout_s: float = CALL_S,
        most_bytes: int = ANSWER_BYTES,
    ) -> Answer:  # fmt: skip
        """What it says, as an ``answer``; ``object``: whatever it says. Raises Refused for what the server refuses, EngineError for an answer that cannot be read; EngineGone, naming the server,
        when it does not answer in time, and Dropped when the connection ends."""
        return await self._call("POST", path, msgspec.json.encode(body), answer, timeout_s, most_bytes)

    async def get(self, path: str, answer: type[Answer], *, timeout_s: float = CALL_S) -> Answer:
        """As ``post``."""
        return await self._call("GET", path, None, answer, timeout_s, ANSWER_BYTES)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _call(
        self, method: str, path: str, body: bytes | None, answer: type[Answer], timeout_s: float, most_bytes: int
    ) -> Answer:
        if self._session is None:
            # No environment: a proxy of this host has no business between a worker and its engine.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, trust_env=False)
        what = f"{self.name} ({method} {path})"
        try:
            async with self._session.request(
                method, self._url + path, data=body, timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as response:  # fmt: skip
                raw = bytearray()
                async for piece in response.content.iter_any():
                    raw += piece
                    if len(raw) > most_bytes:
                        raise EngineError(f"{what} answered with more than {most_bytes} bytes")
                status = response.status
        except asyncio.TimeoutError:
            raise EngineGone(f"{what} has not answered in {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Dropped(f"{what} cannot be reached: {type(error).__name__}: {error}") from error
        if status != 200:
            raise Refused(f"{what} answered with status {status}: {said(raw)}", status)
        if answer is object:
            return cast(Answer, bytes(raw))
        try:
            return msgspec.json.decode(raw, type=answer)
        except msgspec.DecodeError as error:
            raise EngineError(f"{what} answered what cannot be read: {error}") from None


def base_url(url: str) -> str:
    """The URL of a server, without what is behind its port. Raises ConfigError for what is none."""
    parts = urllib.parse.urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"url={url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not host or parts.path.strip("/") or parts.query or parts.username:
        raise ConfigError(f"url={url!r} is not like http://127.0.0.1:30000")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}" + (f":{port}" if port else "")


def is_loopback(url: str) -> bool:
    """Whether only this host reaches a server there."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def said(raw: bytes | bytearray) -> str:
    """What an answer that is none says, in words."""
    try:
        failure = msgspec.json.decode(raw, type=_Failure)
        said = next((each for each in (failure.error, failure.message, failure.detail) if each), None)
        if isinstance(said, dict):
            said = said.get("message", said)
        if said is not None:
            return str(said)[:_SAID]
    except msgspec.DecodeError:
        pass
    return bytes(raw[:_SAID]).decode(errors="replace")
