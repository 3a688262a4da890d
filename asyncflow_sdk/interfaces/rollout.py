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
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..types import Ragged, Sampling, VersionSpan
from .weights import WeightUpdate

Swap = Literal["drain", "partial", "in_flight"]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a rollout engine can do; what does not fit a run is refused at start with the reason.

    ``swap``: how new weights may come in: ``drain`` (nothing is running), ``partial`` (what runs is interrupted, and goes on
    after the load as requests of its own), ``in_flight`` (running requests go on under the new version). ``token_versions``: completions carry their version spans themselves;
    else each response is of the one version loaded. ``max_rows``: responses generated at once.
    ``context``: the most tokens of prompt and response together; None if the engine does not know.
    ``logprobs``, ``held_weights``: it has the methods of these names, which prove what it loaded.
    ``transports``: the only ones that it can take weights by; None: any.
    """

    swap: Set[Swap] = frozenset({"drain"})
    token_versions: bool = False
    max_rows: int = 256
    context: int | None = None
    logprobs: bool = False
    held_weights: bool = False
    transports: Set[str] | None = None


@dataclass(frozen=True)
class Request:
    """One prompt, ``n`` responses to it. ``seed`` differs for every request of a run that has a seed.

    ``drawn``: so many tokens at the end of the prompt are of the response already, which was interrupted and goes on;
    ``sampling.max_tokens`` is what is left. ``first``: the number of the first response among those of its seed. An engine
    whose random numbers are counted by response and token goes on where they were; others need not look at the two. Raises ConfigError
    for a sampling with ``stop``: that is encoded, as ``stop_ids``, before a request is made.
    """

    prompt_ids: npt.NDArray[np.int32]
    sampling: Sampling
    n: int = 1
    seed: int | None = None
    drawn: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        if self.sampling.stop:
            raise ConfigError(f"a request has token ids to stop at, stop_ids, and no text: {self.sampling.stop!r}")


@dataclass(frozen=True)
class Completion:
    """One finished response, or what an interrupted one had drawn.

    ``index``: 0 to n - 1. ``token_ids``: int32 (length,), the end token included when one was drawn.
    ``logprobs``: float32 (length,), natural log of each token's softmax(logits / temperature) over the whole vocabulary: at the
    request's temperature, and at 1 for a greedy response (temperature 0). What top_k and top_p left out of the draw, or any other
    processor of logits, is not left out of the sum: a trainer computes the denominator of its ratio in the same way, without them.
    ``finish_reason``: stop, length, or aborted for one that was interrupted, with none or more
    tokens. ``spans``: only of engines with ``token_versions``.
    """

    index: int
    token_ids: Sequence[int] | npt.NDArray[np.int32]
    logprobs: Sequence[float] | npt.NDArray[np.float32]
    finish_reason: str = "stop"
    spans: Sequence[VersionSpan] = field(default=())

    def each(self) -> Iterable[Completion]:
        """This one: what an engine yields is one or several."""
        return (self,)


@dataclass(frozen=True)
class Completions:
    """Several responses of one request that ended together, packed: an engine that decodes a batch yields them in place of
    single ones, and nothing is done for each of them any more.

    ``index``: int64 (rows,). ``token_ids``: int32, ``logprobs``: float32, a row each as in ``Completion``. ``finish_reason``: one
    each. ``version``: drew every token of theirs; only of engines with ``token_versions``, which yield responses that
    several versions drew one by one.
    """

    index: npt.NDArray[np.int64]
    token_ids: Ragged
    logprobs: Ragged
    finish_reason: Sequence[str]
    version: int | None = None

    def each(self) -> Iterator[Completion]:
        """One by one. Raises ValueError where there are not equally many of everything."""
        fields = (self.index.tolist(), self.token_ids, self.logprobs, self.finish_reason)
        for index, ids, logprobs, reason in zip(*fields, strict=True):
            spans = () if self.version is None or not len(ids) else (VersionSpan(self.version, 0, len(ids)),)
            yield Completion(index, ids, logprobs, reason, spans)


class RolloutEngine(abc.ABC):
    """Generates responses under a version of the policy and takes new versions.

    Made by its plugin's factory as ``factory(model=PATH, **options)`` in the worker's process, with its
    weights loaded from the Hugging Face folder at PATH. All methods run on the worker's event loop and
    must not block it: blocking work belongs in a thread. One engine serves one worker.
    """

    capabilities: Capabilities = Capabilities()

    @abc.abstractmethod
    def generate(self, request: Request) -> AsyncIterator[Completion | Completions]:
        """Yield each of the ``request.n`` responses once, as it finishes, in any order; those that finish together may come as
        ``Completions``.

        Many generations run at the same time. Cancelling one aborts its requests in the engine; the
        others are not touched. Raises EngineError for a request the engine cannot take (too long, empty,
        an unknown option): only that request fails. Raises EngineGone when nothing it is asked will be answered any more: then the
        worker ends, and its rows go to others.
        """

    @abc.abstractmethod
    async def load_weights(self, update: WeightUpdate) -> Set[str]:
        """Take every tensor of ``update`` and return the names taken.

        Swapped after draining, or between requests, nothing is running; with ``in_flight``, requests run: the
        engine stops between two tokens by itself, loads, and goes on, and every later token is of the new version, by its span
        and by its log-prob. After it no token may come from a cache of the old one. What begins during a load waits for
        its end, or is answered by the old version wholly; by an engine without ``in_flight`` it may be refused with EngineError.

        Either all tensors are taken, or this raises, whatever it is: then the caller loads the version before once more, and the
        worker ends where that cannot be had. Names that are not the update's are refused in the same way; an update that lacks a
        tensor of the model, or has one too many, this refuses.
        """

    async def interrupt(self) -> None:
        """End every request that was begun: each response that is not finished is yielded with the tokens it has so far and
        finish_reason "aborted", soon. Does not wait for that. Engines with "partial" in ``capabilities.swap`` have it: the
        caller loads weights when all is yielded, and then asks for the rest."""
        raise NotImplementedError(f"{type(self).__name__} cannot interrupt what runs")

    async def logprobs(
        self, prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[float]]:
        """Log-probs of each response's tokens after its prompt, at temperature 1 over the whole vocabulary, under the weights held now. Nothing is
        running. Engines with ``capabilities.logprobs`` have it: it proves after a swap what they hold."""
        raise NotImplementedError(f"{type(self).__name__} cannot score given responses")

    def held_weights(self) -> Iterator[tuple[str, Any]]:
        """(name, tensor) as they are held now, in the names, dtypes and shapes of the update that was loaded. Engines with
        ``capabilities.held_weights`` have it: they neither fuse nor repack, so that what they hold can be hashed again."""
        raise NotImplementedError(f"{type(self).__name__} does not hold weights as they were published")

    def weight_name(self, name: str) -> str:
        """What this engine calls a tensor that was published as ``name``. Optional; the default is the same."""
        return name

    @property
    def cpu_s(self) -> float:
        """CPU seconds the engine's own threads have spent so far; 0.0 where nobody counts them."""
        return 0.0

    async def close(self) -> None:
        """Free what the engine holds. Called once; nothing is called after it."""
