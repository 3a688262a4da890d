"""RolloutEngine: what an inference engine implements to generate for a run.

class Mine(af.RolloutEngine):
    capabilities = af.Capabilities(swap={"drain"}, token_versions=False)
    async def generate(self, request):
        async for c in self.llm.stream(request.prompt_ids, n=request.n):
            yield af.Completion(c.index, token_ids=c.ids, logprobs=c.lps, finish_reason=c.why)
    async def load_weights(self, update):
        return {name for name, tensor in update if self.llm.assign(name, tensor)}
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..types import Sampling, VersionSpan
from .weights import WeightUpdate

Swap = Literal["drain", "in_flight"]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a rollout engine can do; what does not fit a run is refused at start with the reason.

    ``swap``: how new weights may come in: ``drain`` (nothing is running), ``in_flight`` (running requests
    go on under the new version). ``token_versions``: completions carry their version spans themselves;
    else each response is of the one version loaded. ``max_rows``: responses generated at once.
    ``context``: the most tokens of prompt and response together; None if the engine does not know.
    """

    swap: Set[Swap] = frozenset({"drain"})
    token_versions: bool = False
    max_rows: int = 256
    context: int | None = None


@dataclass(frozen=True)
class Request:
    """One prompt, ``n`` responses to it. ``seed`` differs for every request of a run that has a seed."""

    prompt_ids: npt.NDArray[np.int32]
    sampling: Sampling
    n: int = 1
    seed: int | None = None


@dataclass(frozen=True)
class Completion:
    """One finished response.

    ``index``: 0 to n - 1. ``token_ids``: int32 (length,), the end token included when one was drawn.
    ``logprobs``: float32 (length,), natural log under the distribution the tokens were drawn from
    (temperature applied). ``finish_reason``: stop, length or abort. ``spans``: only of engines with
    ``token_versions``.
    """

    index: int
    token_ids: Sequence[int] | npt.NDArray[np.int32]
    logprobs: Sequence[float] | npt.NDArray[np.float32]
    finish_reason: str = "stop"
    spans: Sequence[VersionSpan] = field(default=())


class RolloutEngine(abc.ABC):
    """Generates responses under a version of the policy and takes new versions.

    Made by its plugin's factory as ``factory(model=PATH, **options)`` in the worker's process, with its
    weights loaded from the Hugging Face folder at PATH. All methods run on the worker's event loop and
    must not block it: blocking work belongs in a thread. One engine serves one worker.
    """

    capabilities: Capabilities = Capabilities()

    @abc.abstractmethod
    def generate(self, request: Request) -> AsyncIterator[Completion]:
        """Yield each of the ``request.n`` responses once, as it finishes, in any order.

        Many generations run at the same time. Cancelling one aborts its requests in the engine; the
        others are not touched. Raises EngineError for a request the engine cannot take (too long, empty,
        an unknown option): only that request fails.
        """

    @abc.abstractmethod
    async def load_weights(self, update: WeightUpdate) -> Set[str]:
        """Take every tensor of ``update`` and return the names taken.

        Called when nothing is running (``drain``). Either all tensors are taken, or the engine must not
        generate again: the caller compares the names with the manifest and, where they differ or this
        raises, the worker ends and says why. After it no token may come from an old cache.
        """

    @property
    def cpu_s(self) -> float:
        """CPU seconds the engine's own threads have spent so far; 0.0 where nobody counts them."""
        return 0.0

    async def close(self) -> None:
        """Free what the engine holds. Called once; nothing is called after it."""
