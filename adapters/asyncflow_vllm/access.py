"""Access: how an engine reaches a vLLM, in this process (`inside`) or by HTTP (`served`)."""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """One response. ``index``: among those of its request. ``reason``: stop, length, abort, or another word of vLLM's.
    ``versions``: (label, first token, end). ``prompt_logprobs``: of each token of the prompt but the first, where they were
    asked for."""

    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    reason: str
    versions: Sequence[tuple[str, int, int]]
    prompt_logprobs: Sequence[float] = ()


class Access(abc.ABC):
    """All on one event loop. Each raises EngineGone when vLLM is dead, and EngineError for what it refuses."""

    @abc.abstractmethod
    async def prepare(self) -> bool:
        """Called once, before the others. Whether log-probs are under the whole vocabulary also where a draw is cut."""

    @abc.abstractmethod
    def answers(
        self, name: str, prompt: list[int], parameters: Mapping[str, Any], n: int
    ) -> AsyncGenerator[Sequence[Answer], None]:
        """See a request for ``n`` responses through: each as it ends, together with those that ended with it. The seed is that
        of the first; each of the others has the next. Closed or cancelled, what is left is aborted. n is 1 at temperature 0."""

    @abc.abstractmethod
    async def abort(self, names: Sequence[str]) -> None:
        """These end with what they have; does not wait for that."""

    @abc.abstractmethod
    async def pause(self) -> None:
        """Stop between two tokens, keep what runs, empty the caches."""

    @abc.abstractmethod
    async def take(self, told: str) -> list[tuple[str, list[str]]]:
        """Have the workers load what `asyncflow_sdk.weights.Handover` told of. Of each: why it could not, or "", and the names that it took."""

    @abc.abstractmethod
    async def name_version(self, version: int) -> None:
        """What the weights are called from now on."""

    @abc.abstractmethod
    async def resume(self) -> None:
        """Go on."""

    @abc.abstractmethod
    def check_alive(self) -> None:
        """Raises EngineGone if it is known to be dead."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Let go of it; one that was started for this engine ends."""
