"""TransformersEngine: generates with a Hugging Face model in this process, rows batched
continuously.

    engine = TransformersEngine("runs/demo/model")
    async for completed in engine.generate(af.Request(prompt_ids, af.Sampling(max_tokens=7), n=8)):
        for completion in completed.each():
            ...
    await engine.load_weights(update)

For small models and for CPUs; vLLM and SGLang have the throughput of a GPU server.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from asyncflow_http.cancellation import finish
from asyncflow_http.limits import RequestLimits
from asyncflow_sdk.errors import EngineError
from asyncflow_sdk.interfaces import Capabilities, Completion, Completions, Request, RolloutEngine, WeightUpdate
from asyncflow_sdk.types import check_least
from asyncflow_sdk.workflow.loops.tokenizer import end_tokens

from .assign import PartialLoad, assign
from .chunked_head import ChunkedHead, chunked_head
from .folder_map import FolderMap, runs_of
from .generation.decode import Decoder
from .generation.decode_thread import DecodeThread, Job
from .generation.sequence_slots import DecodeWork
from .policy import check_loading, context_of, load_policy, vocabulary_of
from .scores import score

_Result = TypeVar("_Result")


class TransformersEngine(RolloutEngine):
    """Decodes in one background thread; a late request joins the running rows.

    ``model``: a Hugging Face folder. ``max_rows``: concurrent rows; further requests wait in order.
    ``threads``: of torch, for the whole process; None leaves them. ``dtype``: default the folder's;
    it must be the dtype of published versions. ``device``: "auto" is a GPU if torch can use one,
    else the CPU. ``attn_implementation``: of transformers; None is its default. ``trust_remote_code``: run
    the folder's own Python. ``version``: of the folder's weights.

    Log-probs are under the whole vocabulary at the request's temperature (at 1 for greedy), also
    with penalties and cuts, as a trainer recomputes them; with a sampling mask under the tokens left by
    the cuts. A request with a seed repeats its tokens
    beside any other requests, up to rounding; see `sampler`.

    Weights can be loaded while requests run. Between two tokens the running rows, prompt and
    response so far, are recomputed with the new weights and continue: each token's log-prob is that
    of the version in its span, given all tokens before it.
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
        trust_remote_code: bool = False,
        version: int = 0,
    ) -> None:
        self.check_options(model, dtype=dtype, device=device, max_rows=max_rows, threads=threads)
        if threads is not None:
            torch.set_num_threads(threads)
        self._model = load_policy(
            model,
            dtype=dtype,
            device=device,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        self._model.requires_grad_(False)
        context, decoder = context_of(self._model), Decoder(self._model, end_tokens(model))
        self._limits = RequestLimits(vocabulary=vocabulary_of(self._model), context=context, rows=max_rows)
        self.capabilities = Capabilities(
            swap=frozenset({"drain", "partial", "in_flight"}),
            token_versions=True,
            max_rows=max_rows,
            context=context,
            logprobs=True,
            held_weights=True,
            restrictions=("top_p", "top_k", "min_p", "repetition_penalty"),
            stop_texts=True,
            sampling_mask=True,
        )
        self._ids = itertools.count()
        self._folder, runs = FolderMap.of(self._model, model, dtype=dtype), runs_of(self._model)
        self._held = {
            name: self._folder.read(name)
            if self._folder.is_rounded(name, kind, runs)
            else self._folder.whole(name, runs)
            for name, (kind, _) in self._folder.kinds.items()
        }
        self._thread = DecodeThread(decoder, max_rows=max_rows, threads=threads, version=version)

    @staticmethod
    def check_options(
        model: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_rows: int = 1,
        threads: int | None = None,
        attn_implementation: str | None = None,
        **others: Any,
    ) -> None:
        """Raise ConfigError for values wrong anywhere, before a worker starts."""
        check_least(1, max_rows=max_rows, threads=threads)
        check_loading(dtype, device, attn_implementation)

    async def generate(self, request: Request) -> AsyncIterator[Completion | Completions]:
        """Yield responses as they finish, packed if one version drew them. Closing the generator
        aborts the others."""
        job = Job(self._work(request), asyncio.get_running_loop())
        self._thread.submit(job)
        left = request.n
        try:
            while left:
                rows = await job.inbox.get()
                if isinstance(rows, EngineError):
                    left = 0
                    raise rows
                left -= rows.stop - rows.first
                for completed in rows.completed():
                    yield completed
        finally:
            if left:
                self._thread.abort(job)

    async def interrupt(self) -> None:
        """End running requests with the tokens drawn so far."""
        self._thread.interrupt()

    async def load_weights(self, update: WeightUpdate) -> set[str]:
        """Write the update into the model in place, between two tokens of running requests.

        Raises WeightMismatch, and continues with the old weights, for a version that does not fit
        the model. A load that fails half-way leaves a mixture: running and waiting requests raise
        EngineError until a version is loaded whole.
        """
        return await self._between_tokens(functools.partial(self._load, update))

    async def logprobs(
        self, prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[float]]:
        """Return log-probs of each response after its prompt, at temperature 1, under the current
        weights. Running requests wait meanwhile. Raises EngineError for sequences that the model
        cannot take."""
        return await self._between_tokens(functools.partial(self._score, prompt_ids, response_ids))

    def held_weights(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, tensor) of the model's own parameters, by the names of the last loaded
        version; a copy of those that the model has in less precision."""
        self._check_whole()
        return iter(self._held.items())

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the decode thread."""
        return self._thread.cpu_s

    async def close(self) -> None:
        """Stop the thread. Running requests raise EngineError."""
        await asyncio.to_thread(self._thread.close)

    async def _between_tokens(self, function: Callable[[], _Result]) -> _Result:
        """Run ``function`` in the decode thread."""
        return await finish(asyncio.wrap_future(self._thread.call(function)))

    def _load(self, update: WeightUpdate) -> set[str]:
        try:
            self._held = assign(self._model, self._folder, update)
        except PartialLoad as error:
            self._thread.refuse(f"the model holds a mixture of versions and must be loaded anew: {error}")
            raise
        self._thread.go_on(update.version)
        return set(self._held)

    def _score(self, prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        self._check_whole()
        return score(self._model, self._head, prompt_ids, response_ids)

    @functools.cached_property
    def _head(self) -> ChunkedHead | None:
        return chunked_head(self._model, self._model.device)

    def _check_whole(self) -> None:
        if self._thread.refusal:
            raise EngineError(self._thread.refusal)

    def _work(self, request: Request) -> DecodeWork:
        """Return the request as DecodeWork. Raises EngineError for a request that cannot be
        answered."""
        prompt = np.asarray(self._limits.check(request), np.int32)
        seed = request.sampling.seed if request.seed is None else request.seed
        return DecodeWork(
            next(self._ids), prompt, request.n, request.sampling, seed, request.drawn, request.first, request.stops
        )
