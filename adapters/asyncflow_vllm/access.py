"""Access to vLLM: in this process (`in_process`) or by HTTP (`http`)."""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VllmAnswer:
    """One response. ``index``: among those of its request. ``reason``: stop, length, abort, or
    another of vLLM's. ``versions``: (label, first token, end). ``prompt_logprobs``: of each
    prompt token but the first, if requested."""

    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    reason: str
    versions: Sequence[tuple[str, int, int]]
    prompt_logprobs: Sequence[float] = ()


class Access(abc.ABC):
    """Used on one event loop. All methods raise EngineGone if vLLM is dead, EngineError if it
    refuses the call."""

    @abc.abstractmethod
    async def prepare(self) -> bool:
        """Prepare the other methods; called once. Return True if log-probs are under the whole
        vocabulary with top-k or top-p."""

    @abc.abstractmethod
    def answers(
        self, name: str, prompt: list[int], parameters: Mapping[str, Any], n: int
    ) -> AsyncGenerator[Sequence[VllmAnswer], None]:
        """Run one request for ``n`` responses and yield them as they finish. Response i uses
        seed + i. Closing the generator aborts the others. n is 1 at temperature 0."""

    @abc.abstractmethod
    async def abort(self, names: Sequence[str]) -> None:
        """End requests with the tokens drawn so far; does not wait for their answers."""

    @abc.abstractmethod
    async def pause(self) -> None:
        """Stop between two tokens, keep running requests, empty the caches."""

    @abc.abstractmethod
    async def load(self, handed: str) -> list[tuple[str, list[str]]]:
        """Load the version described by `asyncflow_sdk.weights.Handover`. Return for each worker
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
