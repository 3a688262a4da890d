"""TransformersEngine: generates with a Hugging Face model in this process, rows batched continuously.

    engine = TransformersEngine("runs/demo/model")
    async for completion in engine.generate(af.Request(prompt_ids, af.Sampling(max_tokens=7), n=8)):
        ...
    await engine.load_weights(update)

For small models and for CPUs; a GPU server's throughput is what vLLM and SGLang are for.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import torch

from asyncflow_sdk.errors import ConfigError, EngineError
from asyncflow_sdk.interfaces import Capabilities, Completion, Request, RolloutEngine, WeightUpdate

from .decode import Decoder
from .decode_thread import DecodeThread, Job
from .lanes import Work
from .policy import Torn, assign, context_of, load_policy, vocabulary_of


class TransformersEngine(RolloutEngine):
    """Decodes in one background thread; a late request joins the rows that are running.

    ``model``: a Hugging Face folder. ``max_rows``: rows decoded at once, further requests wait in order.
    ``threads``: of torch, for the whole process; None leaves them. ``dtype`` must be the trainer's for its
    weights to be taken.

    Log-probs are under the whole vocabulary at the request's temperature (at 1 for greedy), also where
    top-k or top-p cut the draw: what a trainer recomputes. A request with a seed draws the same random
    numbers in whatever company it runs, so it repeats its tokens but for rounding; see `sampling`.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        max_rows: int = 256,
        threads: int | None = None,
        attn_implementation: str | None = None,
    ) -> None:
        if max_rows < 1 or (threads is not None and threads < 1):
            raise ConfigError(f"max_rows and threads must be 1 or more, not {max_rows} and {threads}")
        if threads is not None:
            torch.set_num_threads(threads)
        self._model = load_policy(model, dtype=dtype, device=device, attn_implementation=attn_implementation)
        self._model.requires_grad_(False)
        self._vocabulary = vocabulary_of(self._model)
        self.capabilities = Capabilities(
            swap=frozenset({"drain"}),
            token_versions=False,
            max_rows=max_rows,
            context=context_of(self._model),
        )
        self._ids = itertools.count()
        self._running = 0
        self._torn = ""
        self._thread = DecodeThread(Decoder(self._model), max_rows=max_rows, threads=threads)

    async def generate(self, request: Request) -> AsyncIterator[Completion]:
        """Yield each response as it finishes. Closing the generator aborts what is left."""
        job = Job(self._work(request), asyncio.get_running_loop())
        self._thread.submit(job)
        self._running += 1
        left = request.n
        try:
            while left:
                parcel = await job.inbox.get()
                if isinstance(parcel, EngineError):
                    left = 0
                    raise parcel
                finished, rows = parcel
                for row in rows:
                    left -= 1
                    yield Completion(
                        int(finished.index[row]),
                        token_ids=finished.token_ids[row],
                        logprobs=finished.logprobs[row],
                        finish_reason="stop" if finished.stopped[row] else "length",
                    )
        finally:
            self._running -= 1
            if left:
                self._thread.abort(job)

    async def load_weights(self, update: WeightUpdate) -> set[str]:
        """Write the update into the model in place. Raises WeightMismatch, with the old weights untouched,
        for a version that does not fit the model; EngineError when something is running."""
        if self._running:
            raise EngineError(
                f"version {update.version} cannot be loaded while {self._running} requests are running; drain first"
            )
        future = asyncio.wrap_future(self._thread.call(functools.partial(self._assign, update)))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # Hazard: the caller releases the update now, and the thread may be reading from it.
            await asyncio.wait([future])
            raise

    @property
    def cpu_s(self) -> float:
        return self._thread.cpu_s

    async def close(self) -> None:
        """Stop the thread; requests still running get an EngineError."""
        await asyncio.to_thread(self._thread.close)

    def _assign(self, update: WeightUpdate) -> set[str]:
        try:
            taken = assign(self._model, update)
        except Torn as error:
            self._torn = str(error)
            raise
        self._torn = ""
        return taken

    def _work(self, request: Request) -> Work:
        """The request as decoding takes it. Raises EngineError for one that cannot be run."""
        if self._torn:
            raise EngineError(f"the model holds a mixture of versions and must be loaded anew: {self._torn}")
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
        seed = request.sampling.seed if request.seed is None else request.seed
        return Work(next(self._ids), prompt.astype(np.int32), request.n, request.sampling, seed)
