"""A server that runs already, as an engine finds it: calls that are waited for, and a claim to it."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncflow_sdk.errors import ConfigError, EngineError

from .calls import ANSWER_BYTES, CALL_S, Refused, said


class Claim:
    """That an engine of this host has the server at ``url``: versions of two in one would be nobody's. It ends with its process.
    Raises ConfigError where another has it."""

    def __init__(self, url: str) -> None:
        name = f"asyncflow-server-{os.getuid()}-{hashlib.sha256(url.encode()).hexdigest()[:16]}.lock"
        self._fd = os.open(
            Path(tempfile.gettempdir()) / name, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise ConfigError(
                f"another engine of this host has the server at {url}; each replica needs a server of its own"
            ) from None

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def call_now(
    url: str,
    path: str,
    key: str | None,
    body: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = CALL_S,
    most_bytes: int = ANSWER_BYTES,
) -> bytes:
    """One call, waited for. Raises Refused for what is refused, and EngineError when there is no answer."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else msgspec.json.encode(body)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url + path, data, headers), timeout=timeout_s) as response:
            raw = bytes(response.read(most_bytes + 1))
        if len(raw) > most_bytes:
            raise EngineError(f"{url}{path} answered with more than {most_bytes} bytes")
        return raw
    except urllib.error.HTTPError as error:
        why = said(error.read(ANSWER_BYTES))
        raise Refused(f"{url}{path} answered with status {error.code}: {why}", error.code) from None
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(f"{url}{path} cannot be reached: {error}") from None
