"""TransformersEngine: generates with a Hugging Face model in this process, rows batched continuously.

    engine = TransformersEngine("runs/demo/model")
    async for completed in engine.generate(af.Request(prompt_ids, af.Sampling(max_tokens=7), n=8)):
        for completion in completed.each():
            ...
    await engine.load_weights(update)

For small models and for CPUs; a GPU server's throughput is what vLLM and SGLang are for.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from asyncflow_sdk.errors import EngineError
from asyncflow_sdk.interfaces import Capabilities, Completion, Completions, Request, RolloutEngine, WeightUpdate
from asyncflow_sdk.types import check_least

from .decode import Decoder
from .decode_thread import DecodeThread, Job
from .lanes import Work
from .policy import Torn, assign, context_of, load_policy, named_weights, vocabulary_of
from .scoring import score

_Result = TypeVar("_Result")


class TransformersEngine(RolloutEngine):
    """Decodes in one background thread; a late request joins the rows that are running.

    ``model``: a Hugging Face folder. ``max_rows``: rows decoded at once, further requests wait in order.
    ``threads``: of torch, for the whole process; None leaves them. ``dtype``, by default the folder's,
    must be the one that versions are published in. ``device``: "auto" is a GPU if torch can use one, else the CPU.

    Log-probs are under the whole vocabulary at the request's temperature (at 1 for greedy), also where
    top-k or top-p cut the draw: what a trainer recomputes. A request with a seed draws the same random
    numbers in whatever company it runs, so it repeats its tokens but for rounding; see `sampling`.

    Weights may be loaded while requests run. Between two tokens the rows that run are read anew by the new
    weights, prompt and response so far, and go on: each token's log-prob is that of the version in its span,
    given everything before it. ``version``: what the folder's weights count as.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_rows: int = 256,
        threads: int | None = None,
        attn_implementation: str | None = None,
        version: int = 0,
    ) -> None:
        check_least(1, max_rows=max_rows, threads=threads)
        if threads is not None:
            torch.set_num_threads(threads)
        self._model = load_policy(model, dtype=dtype, device=device, attn_implementation=attn_implementation)
        self._model.requires_grad_(False)
        self._vocabulary = vocabulary_of(self._model)
        self.capabilities = Capabilities(
            swap=frozenset({"drain", "partial", "in_flight"}),
            token_versions=True,
            max_rows=max_rows,
            context=context_of(self._model),
            logprobs=True,
            held_weights=True,
        )
        self._ids = itertools.count()
        self._held = dict(named_weights(self._model))
        self._thread = DecodeThread(Decoder(self._model), max_rows=max_rows, threads=threads, version=version)

    async def generate(self, request: Request) -> AsyncIterator[Completion | Completions]:
        """Yield responses as they finish, packed where one version drew them. Closing the generator aborts what is left."""
        job = Job(self._work(request), asyncio.get_running_loop())
        self._thread.submit(job)
        left = request.n
        try:
            while left:
                parcel = await job.inbox.get()
                if isinstance(parcel, EngineError):
                    left = 0
                    raise parcel
                left -= parcel.stop - parcel.first
                for completed in parcel.completed():
                    yield completed
        finally:
            if left:
                self._thread.abort(job)

    async def interrupt(self) -> None:
        self._thread.interrupt()

    async def load_weights(self, update: WeightUpdate) -> set[str]:
        """Write the update into the model in place, between two tokens of what runs.

        Raises WeightMismatch, and goes on under the old weights, for a version that does not fit the model. A
        load that breaks off leaves a mixture: what runs or waits gets an EngineError, and nothing is generated
        before a version has been loaded whole.
        """
        return await self._between_tokens(functools.partial(self._load, update))

    async def logprobs(
        self, prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[float]]:
        """Log-probs of each response's tokens after its prompt, at temperature 1, under the weights held now.
        Raises EngineError for sequences the model cannot take. What runs waits meanwhile."""
        return await self._between_tokens(functools.partial(self._score, prompt_ids, response_ids))

    def held_weights(self) -> Iterator[tuple[str, Any]]:
        """(name, tensor) of the model's own parameters, under the names of the version loaded last."""
        self._check_whole()
        return iter(self._held.items())

    @property
    def cpu_s(self) -> float:
        return self._thread.cpu_s

    async def close(self) -> None:
        """Stop the thread; requests still running get an EngineError."""
        await asyncio.to_thread(self._thread.close)

    async def _between_tokens(self, function: Callable[[], _Result]) -> _Result:
        """Run ``function`` in the decode thread."""
        future = asyncio.wrap_future(self._thread.call(function))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # Hazard: the caller releases the update now, and the thread may be reading from it.
            await asyncio.wait([future])
            raise

    def _load(self, update: WeightUpdate) -> set[str]:
        try:
            self._held = assign(self._model, update)
        except Torn as error:
            self._thread.refuse(f"the model holds a mixture of versions and must be loaded anew: {error}")
            raise
        self._thread.go_on(update.version)
        return set(self._held)

    def _score(self, prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        self._check_whole()
        return score(self._model, prompt_ids, response_ids)

    def _check_whole(self) -> None:
        if self._thread.refusal:
            raise EngineError(self._thread.refusal)

    def _work(self, request: Request) -> Work:
        """The request as decoding takes it. Raises EngineError for one that cannot be run."""
        prompt: Any = np.asarray(request.prompt_ids)
        if prompt.ndim != 1 or not prompt.size:
            raise EngineError(f"a prompt is one row of one token or more, not of shape {prompt.shape}")
        if prompt.dtype.kind not in "iu":
            raise EngineError(f"a prompt is token ids, not {prompt.dtype}")
        outside = prompt[(prompt < 0) | (prompt >= self._vocabulary)]
        if outside.size:
            raise EngineError(f"token id {outside[0]} is not in the vocabulary of {self._vocabulary}")
        if not 1 <= request.n <= self.capabilities.max_rows:
            raise EngineError(f"n must be 1 to max_rows={self.capabilities.max_rows}, not {request.n}")
        longest, context = prompt.size + request.sampling.max_tokens, self.capabilities.context
        if context is not None and longest > context:
            raise EngineError(
                f"a prompt of {prompt.size} tokens and max_tokens={request.sampling.max_tokens} need {longest};"
                f" the model's context is {context}"
            )
        if not 0 <= request.drawn < prompt.size or request.first < 0:
            raise EngineError(
                f"no response has drawn {request.drawn} of {prompt.size} tokens, or number {request.first}"
            )
        seed = request.sampling.seed if request.seed is None else request.seed
        prompt = prompt.astype(np.int32)
        return Work(next(self._ids), prompt, request.n, request.sampling, seed, request.drawn, request.first)
