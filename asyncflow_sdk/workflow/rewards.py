"""Rewards of several functions, and of a service behind HTTP.

reward=[accuracy, (format_reward, 0.2)]                          # of a Workflow: the sum, and a column of each
reward=af.HttpReward("http://judge:8000/score", needs=["prompt", "response"])
"""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import itertools
import os
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from ..errors import ConfigError, PluginError
from ..plugins import import_path
from ..queue.protocol import error_text
from ..types import Batch
from ..types.validation import check_above, check_least
from .loops.user_code import ServiceAway, ServiceWatch
from .serialization import Serializable
from .work import full_name, is_coroutine, needs_of, plain_function, short_name, takes_all

PREFIX = "reward_"
"""Prefix of the columns of single rewards."""
ANSWER_BYTES = 64 << 20
"""Limit of a service's answer."""


class Rewards(Serializable):
    """Reward functions with weights, the work of one stage: it gives their weighted sum ``reward`` and a float32
    column ``reward_NAME`` for each; further functions of one name are NAME_2 and so on. A function may return None
    for a row: the row's sum leaves it out, and its column has NaN. Raises ConfigError for an invalid list."""

    def __init__(self, functions: Sequence[Callable[..., Any]], weights: Sequence[float]) -> None:
        self.functions, self.weights = tuple(functions), tuple(map(float, weights))
        if len(set(map(id, self.functions))) < len(self.functions) or not self.functions:
            raise ConfigError(f"rewards need one or more functions, each once, not {self.functions!r:.300}")
        self.names: list[str] = []
        for function in self.functions:
            name = str(getattr(plain_function(function), "name", "") or short_name(function))
            several = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
            self.names.append(next(each for each in (f"{PREFIX}{one}" for one in several) if each not in self.names))
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
    def takes_all(self) -> bool:
        """True if one of its functions gets all columns of the data set."""
        return any(map(takes_all, self.functions))

    @property
    def awaited(self) -> bool:
        """True if a call of one of its functions is awaited."""
        return any(map(is_coroutine, self.functions))

    def total(self, scored: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        """Return the weighted sums, NaN for rows without any reward: float64 (rows,)."""
        each = np.stack([np.asarray(scored[name], np.float64) for name in self.names])
        total = np.nansum(each * np.array(self.weights)[:, None], axis=0)
        return np.where(np.isnan(each).all(axis=0), np.nan, total)


def work_path(work: Any) -> str | None:
    """Return the import path of a stage's function or functions; None if another process cannot make them."""
    if isinstance(work, Rewards):
        paths = [work_path(function) for function in work.functions]
        return None if None in paths else ", ".join(map(str, paths))
    return work if isinstance(work, str) else import_path(type(work) if isinstance(work, Serializable) else work)


def function_names(work: Any) -> str:
    """Return the names of a stage's function or functions, for people."""
    functions = work.functions if isinstance(work, Rewards) else [work]
    return ", ".join(import_path(plain_function(each)) or full_name(each) for each in functions)


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
    """A reward function behind HTTP. Each call posts {"column": [one value a row], ...} of the columns ``needs`` as
    JSON to ``url``, and is answered by a list with a number for each row, null for a row without a reward, or by
    {"rewards": [...]}. Needs aiohttp.

    Connection errors, incomplete answers, time-outs and the statuses 408, 425, 429 and 5xx are retried, with growing
    pauses and one warning, until ``deadline_s``: a service without an answer to any call then ends the run; if it has
    answered others meanwhile, these rows fail. ``timeout_s``: limit of one attempt with its whole answer.
    ``token_env``: the variable with a bearer token. ``name``: name of its column among several rewards. ``proxy``:
    URL of an HTTP proxy; default: the environment's for an address of the internet, none for a private one. Redirects
    are not followed. ``concurrency`` of a Stage limits the calls at a time. Calling it raises ConfigError for another
    answer or status, and after the deadline."""

    def __init__(
        self,
        url: str,
        *,
        needs: Sequence[str] = ("response",),
        name: str = "http",
        timeout_s: float = 60.0,
        deadline_s: float = 600.0,
        token_env: str = "",
        proxy: str | None = None,
    ) -> None:
        check_above(0, timeout_s=timeout_s, deadline_s=deadline_s)
        check_least(1, needs=len(needs))
        for each in (url,) if proxy is None else (url, proxy):
            if not each.startswith(("http://", "https://")) or not urlsplit(each).hostname:
                raise ConfigError(f"a reward service has a URL of http or https, not {each!r}")
        if importlib.util.find_spec("aiohttp") is None:
            raise PluginError("HttpReward needs aiohttp; install it with: pip install 'asyncflow-sdk[http]'")
        self.url, self.needs, self.name = url, tuple(needs), name
        self._timeout_s, self._deadline_s, self._token_env, self._proxy = timeout_s, deadline_s, token_env, proxy
        self.watch = ServiceWatch(url, deadline_s)
        """Its absences."""

    async def __call__(self, **columns: Any) -> list[float | None]:
        """Return one reward a row."""
        values = {name: column.tolist() if hasattr(column, "tolist") else column for name, column in columns.items()}
        rows, body = len(next(iter(values.values()))), msgspec.json.encode(values)
        began, failed, answer = time.monotonic(), list[float](), None
        while answer is None:
            left_s = max(began + self._deadline_s - time.monotonic(), 0.01)
            try:
                answer = await self._post(body, min(self._timeout_s, left_s))
            except (OSError, TimeoutError) as error:
                if not await self.watch.pause(hash(body), began, failed, error):
                    spent = f"{failed[-1] - began:.3g} s and {len(failed)} attempts"
                    raise ConfigError(f"{self.url} gave no rewards in {spent}: {error}") from None
        self.watch.succeed()
        try:
            found = msgspec.json.decode(answer, type=dict[str, Any] | list[float | None])
            rewards = msgspec.convert(found["rewards"] if isinstance(found, dict) else found, list[float | None])
        except (msgspec.MsgspecError, KeyError) as error:
            raise ConfigError(f"{self.url} answered with no list of rewards: {error}: {answer[:100]!r}") from None
        if len(rewards) != rows:
            raise ConfigError(f"{self.url} answered with {len(rewards)} rewards for {rows} rows")
        return rewards

    async def _post(self, body: bytes, timeout_s: float) -> bytes:
        """Return the whole answer. Raises OSError and TimeoutError for what may pass."""
        import aiohttp

        headers, answer = {"Content-Type": "application/json"}, bytearray()
        if self._token_env:
            if not (token := os.environ.get(self._token_env, "").strip()):
                raise ServiceAway(
                    f"{self.url} needs a token, and the variable {self._token_env} is not set in its worker"
                )
            headers["Authorization"] = f"Bearer {token}"
        try:
            limit, proxy = aiohttp.ClientTimeout(total=timeout_s), await self._find_proxy(timeout_s)
            options = {"headers": headers, "timeout": limit, "proxy": proxy, "allow_redirects": False}
            async with aiohttp.ClientSession() as session, session.post(self.url, data=body, **options) as response:
                async for part in response.content.iter_any():
                    answer += part
                    if len(answer) > ANSWER_BYTES:
                        raise ConfigError(f"{self.url} answered with more than {ANSWER_BYTES >> 20} MiB")
        except asyncio.TimeoutError:
            raise TimeoutError(f"the answer was not complete in {timeout_s:.3g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionError(error_text(error)) from None
        status, said = response.status, answer[:200].decode(errors="replace")
        text = f"{status} {response.reason}: {said}"
        if status in (408, 425, 429) or status >= 500:
            raise ConnectionError(text)
        if 300 <= status < 400:
            to = response.headers.get("Location")
            raise ConfigError(f"{self.url} redirects to {to}, which is not followed: name that place as the URL")
        if status >= 400:
            raise ConfigError(f"{self.url} refused the rewards: {text}")
        if not {"Content-Length", "Transfer-Encoding"} & response.headers.keys():  # it may have been cut off
            try:
                msgspec.json.decode(answer)
            except msgspec.DecodeError:
                raise ConnectionError(f"the answer ended after {len(answer)} bytes") from None
        return bytes(answer)

    async def _find_proxy(self, timeout_s: float) -> str | None:
        """Return the given proxy, or the environment's unless the service has a private address."""
        parts = urlsplit(self.url)
        host, found = parts.hostname or "", urllib.request.getproxies().get(parts.scheme)
        if self._proxy is not None or not found or urllib.request.proxy_bypass(host):
            return self._proxy
        if not {".", ":"} & set(host):  # a name of this network
            return None
        try:
            places = await asyncio.wait_for(asyncio.get_running_loop().getaddrinfo(host, None), timeout_s)
        except OSError:  # only the proxy knows it
            return found
        addresses = [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in places]
        return found if any(each.is_global for each in addresses) else None
