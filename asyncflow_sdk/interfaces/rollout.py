"""RolloutEngine: the interface of inference engines.

A plugin implements it, and a worker of the run calls it:

    class Mine(af.RolloutEngine):                                   # in a plugin
        async def generate(self, request):
            async for c in self.llm.stream(request.prompt_ids, n=request.n):
                yield af.Completion(c.index, token_ids=c.ids, logprobs=c.lps, finish_reason=c.why)
        async def load_weights(self, update):
            return {name for name, tensor in update if self.llm.assign(name, tensor)}

    async for response in engine.generate(af.Request(ids, af.Sampling(), n=8)): ...  # in a worker
    assert await engine.load_weights(update) == set(update.tensors)

StopTexts: the stop texts of a request, searched in the tokens of its responses:

    watch = request.watch()                               # in an engine, for each response
    async for ids in stream:                              # all tokens of the response so far
        if watch is not None and watch.found(ids):
            abort(...)                                    # and yield it, with the reason "stop"
"""

from __future__ import annotations

import abc
import bisect
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..types import ColumnSpec, Ragged, Sampling, VersionSpan
from .weights import WeightUpdate

Swap = Literal["drain", "partial", "in_flight"]
COUNTS = "_counts"  # end of the name of the column with the number of values of each token in another column
SAMPLING_MASK = dict.fromkeys(("kept_ids", "kept_ids" + COUNTS), ColumnSpec("ragged", "int32"))
"""Columns of responses with ``Sampling.sampling_mask``: all possible ids of each draw, 0 if it was not cut."""
TOKENS_OF_A_LETTER, MARGIN = 4, 4
"""A token has at least one byte of a letter. Decoders change the text of the first token."""
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Capabilities of a rollout engine. A run with other requirements is refused at start, with the reason.

    ``swap``: supported ways to load weights: ``drain`` (no request is running), ``partial`` (running requests are
    interrupted, and continued by new requests after the load), ``in_flight`` (running requests continue under the new
    version). ``token_versions``: completions carry version spans; otherwise each response has the one loaded version.
    ``max_rows``: responses generated at once. ``context``: limit of prompt and response tokens together; None:
    unknown. ``logprobs``, ``held_weights``: the engine implements these methods, which verify loaded weights.
    ``transports``: the only weight transports it accepts; None: any. ``restrictions``: the parameters that it draws
    by with log-probs of the contract, of top_p, top_k, min_p and repetition_penalty. ``stop_texts``: it ends a
    response soon after a text of ``sampling.stop``; otherwise the worker cuts the response after its end, and
    requests have no texts. ``extra``: the keys of ``sampling.extra`` that it takes. ``sampling_mask``: it gives the
    columns of SAMPLING_MASK if asked for; with ``most_kept`` only for a ``top_k`` up to this.
    """

    swap: Set[Swap] = frozenset({"drain"})
    token_versions: bool = False
    max_rows: int = 256
    context: int | None = None
    logprobs: bool = False
    held_weights: bool = False
    transports: Set[str] | None = None
    restrictions: Collection[str] = ("top_p", "top_k")
    stop_texts: bool = False
    extra: Collection[str] = ()
    sampling_mask: bool = False
    most_kept: int | None = None

    def check(self, engine: str, sampling: Sampling) -> None:
        """Raise ConfigError for a sampling impossible for ``engine``."""
        for name, value in sampling.restrictions.items():
            if name not in self.restrictions:
                raise ConfigError(
                    f"{engine} cannot draw with {name}={value:g}: its log-probs would not be over the whole vocabulary, as"
                    f" training computes them. It can with: {', '.join(sorted(self.restrictions)) or 'none of these'}"
                )
        if sampling.sampling_mask and not self.sampling_mask:
            raise ConfigError(f"{engine} gives no sampling mask: leave sampling_mask=True out, or use 'transformers'")
        most = self.most_kept if sampling.sampling_mask and sampling.restrictions else None
        if most and not 0 < sampling.top_k <= most:
            raise ConfigError(f"{engine} gives sampling masks only with a top_k of 1 to {most}: set it")
        known = ", ".join(sorted(self.extra)) or "none"
        for name in sampling.extra.keys() - set(self.extra):
            raise ConfigError(f"{engine} takes no parameter {name!r} of Sampling(extra=...). It takes: {known}")


@dataclass(frozen=True)
class StopTexts:
    """``texts``: one or more. ``decode``: returns the text of token ids, without special tokens."""

    texts: tuple[str, ...]
    decode: Decode

    @property
    def window(self) -> int:
        """Number of tokens at the end of a response that are decoded in search of a text."""
        return MARGIN + TOKENS_OF_A_LETTER * max(map(len, self.texts))

    def inside(self, ids: Sequence[int]) -> bool:
        """True if the text of ``ids`` contains one of the texts."""
        text = self.decode(ids)
        return any(each in text for each in self.texts)

    def end(self, ids: Sequence[int]) -> int | None:
        """Return the number of tokens up to the completion of the first text; None without one."""
        if not self.inside(ids):
            return None
        return bisect.bisect_left(range(len(ids)), True, key=lambda count: self.inside(ids[:count]))


class StopWatch:
    """Follows one response. ``past``: its tokens in the prompt, of a continued response."""

    def __init__(self, stops: StopTexts, past: Sequence[int] = ()) -> None:
        self._stops, self._past = stops, list(past)
        self._seen, self._found = 0, False

    def found(self, ids: Sequence[int]) -> bool:
        """True if the response contains a text. ``ids``: all its tokens behind the prompt, so far. Decodes the new
        tokens and the window before them; the whole response only if a text is in those. False again once the engine
        has removed the tokens of the text."""
        whole = [*self._past, *ids]
        if len(whole) < self._seen:
            self._seen, self._found = 0, False
        if not self._found:
            near = whole[max(self._seen - self._stops.window, 0) :]
            self._found = self._stops.inside(near) and (len(near) == len(whole) or self._stops.inside(whole))
        self._seen = len(whole)
        return self._found


@dataclass(frozen=True)
class Request:
    """A request for ``n`` responses to one prompt. ``seed`` is different for every request of a run with a seed.

    ``drawn``: number of tokens of an interrupted response at the end of the prompt; ``sampling.max_tokens`` is the
    rest. ``first``: index of the first response under this seed. A continued response draws by random numbers other
    than its first ones, and than other responses': an engine with seeds uses both. ``sampling.stop``: only for
    engines with ``stop_texts``, to end a response at or soon after a text found by ``watch``. ``decode``: returns the
    text of token ids.
    """

    prompt_ids: npt.NDArray[np.int32]
    sampling: Sampling
    n: int = 1
    seed: int | None = None
    drawn: int = 0
    first: int = 0
    decode: Decode | None = None

    @property
    def stops(self) -> StopTexts | None:
        """The stop texts; None without any."""
        texts = self.sampling.stop
        return StopTexts(tuple(texts), self.decode) if texts and self.decode is not None else None

    def watch(self) -> StopWatch | None:
        """Return a search for the stop texts in one response; None without any."""
        past = self.prompt_ids[len(self.prompt_ids) - self.drawn :].tolist()
        return None if self.stops is None else StopWatch(self.stops, past)


@dataclass(frozen=True)
class Completion:
    """One finished response, or the tokens of an interrupted one. ``index``: 0 to n - 1. ``token_ids``: int32
    (length,), with the end token if one was generated. ``finish_reason``: stop (also of a stop token at max_tokens),
    length, or aborted (interrupted, 0 or more tokens). ``spans``: only from engines with ``token_versions``.
    ``columns``: exactly those of ``RolloutEngine.gives``, and of SAMPLING_MASK if asked for.

    ``logprobs``: float32 (length,), natural log of each token's softmax(logits / temperature) over the whole
    vocabulary (with ``sampling_mask`` over the kept ids), at the request's temperature, or at 1 for a greedy response
    (temperature 0). top_k, top_p, min_p and penalties must change neither the logits nor the denominator: the trainer
    computes its ratio without them.
    """

    index: int
    token_ids: Sequence[int] | npt.NDArray[np.int32]
    logprobs: Sequence[float] | npt.NDArray[np.float32]
    finish_reason: str = "stop"
    spans: Sequence[VersionSpan] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)

    def each(self) -> Iterable[Completion]:
        """Yield this completion; same interface as ``Completions.each``."""
        return (self,)


@dataclass(frozen=True)
class Completions:
    """Several responses of one request, finished together and packed: less work per response for a batching engine.
    ``index``: int64 (rows,). ``token_ids``: int32, ``logprobs``: float32, rows as in ``Completion``.
    ``finish_reason``: one a row. ``version``: of all tokens; only from engines with ``token_versions``. Responses of
    several versions are yielded as single completions. ``columns``: Ragged, or an array of the fixed kind."""

    index: npt.NDArray[np.int64]
    token_ids: Ragged
    logprobs: Ragged
    finish_reason: Sequence[str]
    version: int | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    def each(self) -> Iterator[Completion]:
        """Yield the completions one by one. Raises ValueError if the fields have different lengths."""
        fields = (self.index.tolist(), self.token_ids, self.logprobs, self.finish_reason, *self.columns.values())
        for index, ids, logprobs, reason, *values in zip(*fields, strict=True):
            spans = () if self.version is None or not len(ids) else (VersionSpan(self.version, 0, len(ids)),)
            yield Completion(index, ids, logprobs, reason, spans, dict(zip(self.columns, values, strict=True)))


class RolloutEngine(abc.ABC):
    """Generates responses under a version of the policy and loads new versions.

    The plugin's factory makes it in the worker's process as ``factory(model=PATH, **options)``, with weights from the
    Hugging Face folder at PATH. All methods run on the worker's event loop and must not block it: run blocking work
    in a thread. One engine serves one worker. ``gives``: further columns of each completion by name, also named by
    ``can={"gives": [...]}`` of its AdapterSpec. A ragged one has a value for each token, or as many as its count in
    NAME_counts. A fixed one is the response's, of a continued one its end's. Observed tokens of an agent have zeros,
    or a count of 0.
    """

    capabilities: Capabilities = Capabilities()
    gives: Mapping[str, ColumnSpec] = {}

    @abc.abstractmethod
    def generate(self, request: Request) -> AsyncIterator[Completion | Completions]:
        """Yield each of the ``request.n`` responses once, as it finishes, in any order; several at once as
        ``Completions``. Many generations run at the same time. Cancelling one aborts its requests in the engine and
        no others. Raises EngineError for an unacceptable request (too long, empty, an unknown option): it alone
        fails. Raises EngineGone if the engine can answer no more requests; the worker then ends and its rows go to
        other workers."""

    @abc.abstractmethod
    async def load_weights(self, update: WeightUpdate) -> Set[str]:
        """Load every tensor of ``update`` and return the names loaded.

        No request is running, except with ``in_flight``: the engine then pauses between two tokens, loads and
        continues, and every later token has the span and the log-prob of the new version. No token may be computed
        from a cache of the old weights. A request started during a load waits, or is answered entirely by the old
        version; an engine without ``in_flight`` may refuse it with EngineError.

        On an exception the caller loads the previous version again; if that is gone, the worker ends. The worker also
        ends on WeightMismatch: the engine must raise it for missing or extra tensors, and the caller raises it if the
        returned names are not the update's.
        """

    async def interrupt(self) -> None:
        """Abort all running requests. Each unfinished response is yielded soon, with its tokens so far and
        finish_reason "aborted"; this call does not wait for it. Required with "partial" in ``capabilities.swap``: the
        caller loads weights once all responses are yielded, and then requests the rest of them."""
        raise NotImplementedError(f"{type(self).__name__} cannot interrupt running requests")

    async def logprobs(
        self, prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[float]]:
        """Return log-probs of each response's tokens after its prompt, at temperature 1 over the whole vocabulary, under
        the loaded weights. No request is running. Required with ``capabilities.logprobs``: it verifies a load."""
        raise NotImplementedError(f"{type(self).__name__} cannot score given responses")

    def held_weights(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, tensor) of the loaded weights, with names, dtypes and shapes of the update. Required with
        ``capabilities.held_weights``: their bytes are hashed again, so fused or repacked weights do not fit."""
        raise NotImplementedError(f"{type(self).__name__} does not hold weights as they were published")

    def weight_name(self, name: str) -> str:
        """Return the engine's name of a published tensor. Optional; default: the same."""
        return name

    @property
    def cpu_s(self) -> float:
        """CPU seconds spent by the engine's own threads so far; 0.0 if not measured."""
        return 0.0

    async def close(self) -> None:
        """Free the engine's resources. Called once, as the last method."""
