"""HttpServer: an inference server of one engine: a running one that it has claimed, or a process
that it started.

server = HttpServer.running(url, key_env, "vLLM", health="/health")
info = server.wait_for(server.describe("/server_info", Info, "vLLM"))    # in a constructor
server.claim()                                                           # refuses other engines until close()
await server.post("/generate", body, Reply)
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import fcntl
import hashlib
import ipaddress
import os
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from asyncflow_sdk.errors import AsyncFlowError, ConfigError, EngineError, EngineGone

from .client import ANSWER_BYTES, HTTP_CALL_S, AnswerType, ConnectionDropped, HttpClient, RequestRefused

HEALTH_S = 5.0
INFO_BYTES, INFO_S = 16 << 20, 120.0


class ServerProcess(Protocol):
    """Process of a server."""

    def ended(self, within_s: float) -> bool:
        """Return True if the process ends within this time."""

    def last_words(self) -> str:
        """Return how the process ended, with the end of its log."""

    def close(self) -> None:
        """End the process. Idempotent."""


class HttpServer:
    """``url``: without a path. ``key``: API key, "" for none. ``name``: in errors. ``health``:
    path answered by a live server. ``process``: of the server if the engine started it; it ends
    with ``close``."""

    def __init__(self, url: str, key: str, name: str, *, health: str, process: ServerProcess | None = None) -> None:
        self.url, self.key, self.name, self._health, self._process = url, key, name, health, process
        self.client = HttpClient(url, key, name)
        self._lock = -1

    @classmethod
    def running(cls, url: str, key_env: str | None, product: str, *, health: str) -> HttpServer:
        """Return a running server of ``product`` at a user's ``url``. ``key_env``: environment
        variable of the worker with the API key. Raises ConfigError for an invalid URL or an
        unset variable."""
        key = os.environ.get(key_env, "") if key_env is not None else ""
        if key_env is not None and not key:
            raise ConfigError(f"key_env={key_env!r}: this environment variable of the worker is not set")
        base = base_url(url)
        return cls(base, key, f"the {product} server at {base}", health=health)

    @property
    def is_local(self) -> bool:
        """True if only this host can reach the server."""
        host = urllib.parse.urlsplit(self.url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def claim(self) -> None:
        """Claim the server for this engine until ``release`` or the end of the process. Raises
        ConfigError if another engine of this host has it: weights of two engines would be mixed."""
        name = f"asyncflow-server-{os.getuid()}-{hashlib.sha256(self.url.encode()).hexdigest()[:16]}.lock"
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        self._lock = os.open(Path(tempfile.gettempdir()) / name, flags, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.release()
            raise ConfigError(
                f"another engine of this host has the server at {self.url}; each replica needs a server of its own"
            ) from None

    def release(self) -> None:
        """Give up the claim. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    async def describe(self, path: str, kind: type[AnswerType], product: str) -> AnswerType:
        """Return the server's description of itself. Raises ConfigError if it is not a known
        ``product``."""
        raw = cast(bytes, await self.client.get(path, object, timeout_s=INFO_S, most_bytes=INFO_BYTES))
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"what answers at {self.url} is no {product} server that this adapter knows: {error}"
            ) from None

    def wait_for(self, work: Coroutine[Any, Any, AnswerType]) -> AnswerType:
        """Run ``work`` on an event loop in a thread of its own, close its connections, and
        return its result. For constructors, which may run on another event loop."""
        done: concurrent.futures.Future[AnswerType] = concurrent.futures.Future()

        async def connected() -> AnswerType:
            try:
                return await work
            finally:
                await self.client.close()

        def run() -> None:
            try:
                done.set_result(asyncio.run(connected()))
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, name="asyncflow-http", daemon=True).start()
        return done.result()

    async def post(
        self, path: str, body: Mapping[str, Any], answer: type[AnswerType], *, timeout_s: float = HTTP_CALL_S,
        most_bytes: int = ANSWER_BYTES, part: Callable[[AnswerType], None] | None = None,
    ) -> AnswerType:  # fmt: skip
        """Like `HttpClient.post`. A dropped connection or a status of 500 or more raises
        EngineError if the server still answers others, EngineGone if not."""
        try:
            return await self.client.post(path, body, answer, timeout_s=timeout_s, most_bytes=most_bytes, part=part)
        except RequestRefused as error:
            if error.status < 500:
                raise
            raise await self._diagnose(error) from None
        except ConnectionDropped as error:
            raise await self._diagnose(error) from None

    async def _diagnose(self, error: AsyncFlowError) -> AsyncFlowError:
        try:
            await self.client.get(self._health, object, timeout_s=HEALTH_S)
        except AsyncFlowError:
            if self._process is not None and await asyncio.to_thread(self._process.ended, HEALTH_S):
                return EngineGone(f"{error}; {self._process.last_words()}")
            return EngineGone(str(error))
        return EngineError(str(error))

    async def close(self) -> None:
        """Close connections, end the process, give up the claim. Idempotent."""
        await self.client.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.close)
        self.release()


def base_url(url: str) -> str:
    """Return scheme, host and port of a URL. Raises ConfigError for anything else in it."""
    parts = urllib.parse.urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"url={url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not host or parts.path.strip("/") or parts.query or parts.username:
        raise ConfigError(f"url={url!r} is not like http://127.0.0.1:30000")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}" + (f":{port}" if port else "")
