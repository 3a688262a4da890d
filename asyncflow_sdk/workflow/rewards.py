"""Rewards of several functions, and of a service behind HTTP.

reward=[accuracy, (format_reward, 0.2)]                          # of a Workflow: the sum, and a column of each
reward=af.HttpReward("http://judge:8000/score", needs=["prompt", "response"])
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ..errors import ConfigError
from ..plugins import import_path
from ..types import Batch
from ..types.validation import check_above, check_least
from .serialization import Serializable
from .work import is_coroutine, needs_of

PREFIX = "reward_"
"""Prefix of the columns of single rewards."""
ANSWER_BYTES = 64 << 20
"""Limit of a service's answer."""


class Rewards(Serializable):
    """Reward functions with weights, the work of one stage: it gives their weighted sum ``reward`` and
    a float32 column ``reward_NAME`` for each. A function may return None for a row: the row's
    sum leaves it out, and its column has NaN. Raises ConfigError for an invalid list."""

    def __init__(self, functions: Sequence[Callable[..., Any]], weights: Sequence[float]) -> None:
        self.functions, self.weights = tuple(functions), tuple(map(float, weights))
        self.names = [f"{PREFIX}{_name(function)}" for function in self.functions]
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice or not self.functions:
            raise ConfigError(f"rewards need one or more functions of different names; twice: {', '.join(twice)}")
        self.needs = tuple(dict.fromkeys(name for function in self.functions for name in needs_of(function)))
        self.gives = ("reward", *self.names)

    @classmethod
    def of(cls, rewards: Sequence[Any]) -> Rewards:
        """Return the rewards of a list of functions and of pairs (function, weight)."""
        pairs = [each if isinstance(each, (tuple, list)) else (each, 1.0) for each in rewards]
        for pair in pairs:
            if len(pair) != 2 or not callable(pair[0]) or not isinstance(pair[1], (int, float)):
                raise ConfigError(f"a reward is a function, or a pair (function, weight), not {pair!r:.100}")
        return cls([function for function, _ in pairs], [weight for _, weight in pairs])

    @property
    def awaited(self) -> bool:
        """True if a call of one of its functions is awaited."""
        return any(map(is_coroutine, self.functions))

    def total(self, scored: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        """Return the weighted sums, NaN for rows without any reward: float64 (rows,)."""
        each = np.stack([np.asarray(scored[name], np.float64) for name in self.names])
        total = np.nansum(each * np.array(self.weights)[:, None], axis=0)
        return np.where(np.isnan(each).all(axis=0), np.nan, total)


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "name", "") or getattr(function, "__name__", type(function).__name__.lower()))


def work_path(work: Any) -> str | None:
    """Return the import path of a stage's function or functions; None if another process cannot make
    them."""
    if isinstance(work, Rewards):
        paths = [work_path(function) for function in work.functions]
        return None if None in paths else ", ".join(map(str, paths))
    return work if isinstance(work, str) else import_path(type(work) if isinstance(work, Serializable) else work)


# ---- their means in a step

RewardSums = dict[str, tuple[float, int]]
"""Sum and number of scored rows of each reward."""


def reward_sums(batch: Batch) -> RewardSums:
    """Return the sums of the columns of single rewards in a batch."""
    found = {}
    for name in batch:
        if name.startswith(PREFIX) and batch.spec(name).kind == "fixed":
            values = batch.array(name)
            scored = values[np.isfinite(values)]
            found[name] = (float(scored.sum()), len(scored))
    return found


def reward_means(parts: Sequence[RewardSums]) -> dict[str, float]:
    """Return the mean of each reward over the parts of a step, without rewards that scored no row."""
    means = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        sums, counts = zip(*(part.get(name, (0.0, 0)) for part in parts), strict=True)
        if sum(counts):
            means[name] = sum(sums) / sum(counts)
    return means


# ---- a service


class HttpReward(Serializable):
    """A reward function behind HTTP. Each call posts {"column": [one value a row], ...} of the columns
    ``needs`` as JSON to ``url``, and is answered by a list of numbers, null for a row that it leaves
    out, or by {"rewards": [...]}.

    Connection errors, time-outs and the statuses 408, 429 and 5xx are retried, with growing pauses,
    until ``deadline_s``. ``timeout_s``: limit of one attempt. ``token_env``: the variable with a bearer
    token. ``name``: of its column among several rewards. ``concurrency`` of a Stage limits the calls at
    a time. Calling it raises ConfigError for another answer or status, and after the deadline.
    """

    def __init__(
        self, url: str, *, needs: Sequence[str] = ("response",), name: str = "http", timeout_s: float = 60.0,
        deadline_s: float = 600.0, token_env: str = "",
    ) -> None:  # fmt: skip
        check_above(0, timeout_s=timeout_s, deadline_s=deadline_s)
        check_least(1, needs=len(needs))
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"a reward service has a URL of http or https, not {url!r}")
        self.url, self.needs, self.name = url, tuple(needs), name
        self._timeout_s, self._deadline_s, self._token_env = timeout_s, deadline_s, token_env

    async def __call__(self, **columns: Any) -> list[float | None]:
        """Return one reward a row."""
        values = {name: column.tolist() if hasattr(column, "tolist") else column for name, column in columns.items()}
        body, until, attempts = msgspec.json.encode(values), time.monotonic() + self._deadline_s, 0
        while True:
            attempts += 1
            left_s = until - time.monotonic()
            try:
                answer = await asyncio.to_thread(self._post, body, max(min(self._timeout_s, left_s), 0.01))
                break
            except (OSError, TimeoutError) as error:  # an HTTPError is an OSError
                status = getattr(error, "code", None)
                if status is not None and status not in (408, 429) and status < 500:
                    raise ConfigError(f"{self.url} refused the rewards: {error}") from None
                pause_s = min(0.2 * 2 ** min(attempts, 8), 20.0) * random.uniform(0.5, 1.0)
                if time.monotonic() + pause_s > until:
                    raise ConfigError(
                        f"{self.url} gave no rewards in {self._deadline_s:g} s and {attempts} attempts: {error}"
                    ) from None
                await asyncio.sleep(pause_s)
        try:
            found = msgspec.json.decode(answer, type=dict[str, Any] | list[float | None])
            return msgspec.convert(found["rewards"] if isinstance(found, dict) else found, list[float | None])
        except (msgspec.MsgspecError, KeyError) as error:
            raise ConfigError(f"{self.url} answered with no list of rewards: {error}: {answer[:100]!r}") from None

    def _post(self, body: bytes, timeout_s: float) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._token_env:
            headers["Authorization"] = f"Bearer {os.environ.get(self._token_env, '')}"
        until, parts, size = time.monotonic() + timeout_s, [], 0
        asked = urllib.request.Request(self.url, body, headers)
        with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
            while part := answer.read1(1 << 16):  # the limit of urllib is that of one packet
                parts.append(part)
                size += len(part)
                if time.monotonic() > until:
                    raise TimeoutError(f"the answer was not complete in {timeout_s:g} s")
                if size > ANSWER_BYTES:
                    raise ConfigError(f"{self.url} answered with more than {ANSWER_BYTES >> 20} MiB")
        return b"".join(parts)
