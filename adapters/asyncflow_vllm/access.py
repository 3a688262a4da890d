"""Access to vLLM: in this process (`in_process`) or by HTTP (`http`)."""

from __future__ import annotations

import abc
import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncflow_sdk.interfaces import StopWatch

Watch = Callable[[], StopWatch | None] | None
"""Makes the search for stop texts in one response; None without texts."""


@dataclass(frozen=True)
class VllmAnswer:
    """One response. ``index``: among those of its request. ``reason``: stop, length, abort, or another of vLLM's.
    ``versions``: (label, first token, end). ``prompt_logprobs``: of each prompt token but the first, if requested."""

    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    reason: str
    versions: Sequence[tuple[str, int, int]]
    prompt_logprobs: Sequence[float] = ()


class Access(abc.ABC):
    """Used on one event loop. All methods raise EngineGone if vLLM is dead, EngineError if it refuses the call."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}
        """Unfinished requests of vLLM, by the name of the engine's request."""

    @abc.abstractmethod
    async def prepare(self) -> bool:
        """Prepare the other methods; called once. Return True if log-probs are under the whole
        vocabulary with top-k or top-p."""

    async def answers(
        self, name: str, prompt: list[int], parameters: Mapping[str, Any], n: int, watch: Watch = None
    ) -> AsyncGenerator[Sequence[VllmAnswer], None]:
        """Run one request for ``n`` responses and yield them as they finish. Response i uses
        seed + i. Closing the generator aborts the others. n is 1 at temperature 0."""
        left = self._names[name] = [f"{name}-{index}" for index in range(n)]
        seed = parameters.get("seed")
        tasks = []
        for index, each in enumerate(list(left)):
            own = parameters if seed is None else {**parameters, "seed": seed + index}
            tasks.append(asyncio.create_task(self.answer(index, each, prompt, own, watch() if watch else None)))
            tasks[-1].add_done_callback(functools.partial(_ended, left, each))
        try:
            for ended in asyncio.as_completed(tasks):
                yield [await ended]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            del self._names[name]

    @abc.abstractmethod
    async def answer(
        self, index: int, name: str, prompt: list[int], parameters: Mapping[str, Any], watch: StopWatch | None
    ) -> VllmAnswer:
        """Run one request of vLLM for one response, until it ends or ``watch`` finds a stop text."""

    def unanswered(self, names: Sequence[str]) -> list[str]:
        """Return those of these requests of vLLM that are not answered yet."""
        running = {each for left in self._names.values() for each in left}
        return [each for each in names if each in running]

    async def abort(self, names: Sequence[str]) -> None:
        """End requests with the tokens drawn so far; does not wait for their answers."""
        await self.abort_named([each for name in names for each in self._names.get(name, ())])

    @abc.abstractmethod
    async def abort_named(self, names: Sequence[str]) -> None:
        """Abort requests of vLLM."""

    @abc.abstractmethod
    async def pause(self) -> None:
        """Stop between two tokens, keep running requests, empty the caches."""

    @abc.abstractmethod
    async def load(self, handed: str) -> list[tuple[str, list[str]]]:
        """Load the version described by `asyncflow_vllm.handover.Handover`. Return for each worker
        its failure, "" for none, and the loaded names."""

    @abc.abstractmethod
    async def name_version(self, version: int) -> None:
        """Label further tokens with ``version``."""

    @abc.abstractmethod
    async def resume(self) -> None:
        """Continue after ``pause``."""

    @abc.abstractmethod
    def check_alive(self) -> None:
        """Raise EngineGone if vLLM is known to be dead."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Release vLLM, and end it if it was started for this engine."""


def _ended(left: list[str], name: str, _: object) -> None:
    left.remove(name)
