"""VllmRollout: the common part of rollout engines over vLLM, in this process or behind HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from asyncflow_http.cancellation import finish
from asyncflow_http.model_folder import first_equal
from asyncflow_sdk.errors import EngineError, EngineGone, WeightError, WeightMismatch
from asyncflow_sdk.interfaces import Capabilities, Completion, Completions, Request, RolloutEngine, WeightUpdate
from asyncflow_sdk.workflow.loops.tokenizer import end_tokens
from asyncflow_sdk.workflow.model_folder import ModelFolder

from .access import Access, VllmAnswer
from .folder import WholeLayers, check_update
from .handover import Handover
from .requests import Limits, completions, drawing, scoring

CLOSE_S = 10.0


class VllmRollout(RolloutEngine):
    """``folder``: the model's. ``dtype``: of vLLM. ``version``: of vLLM's current weights."""

    def __init__(self, access: Access, folder: ModelFolder, dtype: str, limits: Limits, *, version: int) -> None:
        self._access, self._folder, self._dtype = access, folder, dtype
        self._limits, self._ends = limits, end_tokens(folder.folder)
        self.capabilities = Capabilities(
            swap=frozenset({"drain", "partial", "in_flight"}), token_versions=True, max_rows=limits.rows,
            context=limits.context, logprobs=True, stop_texts=True,
        )  # fmt: skip
        self._first_version, self._ids = version, itertools.count()
        self._handover = Handover()
        self._running: set[str] = set()
        self._idle = asyncio.Event()
        self._interrupted: set[str] = set()
        self._refusal = ""
        self._prepared = False
        self._lock = asyncio.Lock()
        """Held by a load, and by the preparation of the first request."""

    # ---- generation

    async def generate(self, request: Request) -> AsyncIterator[Completion | Completions]:
        """Yield responses as they finish. Closing the generator aborts the others. A greedy
        response is drawn once and returned ``n`` times."""
        await self._prepare()
        prompt = self._limits.check(request)
        self._check_usable()
        name = f"asyncflow-{next(self._ids)}"
        parameters, greedy = drawing(request, self._ends), request.sampling.temperature == 0
        watch = None if request.stops is None else request.watch
        answered = self._access.answers(name, prompt, parameters, 1 if greedy else request.n, watch)
        self._running.add(name)
        self._idle.clear()
        try:
            async with contextlib.aclosing(answered):
                async for answers in answered:
                    for answer in answers:
                        self._check_end(name, answer)
                    if greedy:
                        answers = [replace(answers[0], index=index) for index in range(request.n)]
                    for each in completions(answers, self._first_version):
                        yield each
        finally:
            self._running.discard(name)
            self._interrupted.discard(name)
            if not self._running:
                self._idle.set()

    def _check_end(self, name: str, answer: VllmAnswer) -> None:
        """Raise EngineError for a response that ended without a reason of this engine."""
        if answer.reason in ("stop", "length") or (answer.reason == "abort" and name in self._interrupted):
            return
        self._check_usable()
        raise EngineError(f"vLLM ended a request with {answer.reason!r} after {len(answer.token_ids)} tokens")

    async def interrupt(self) -> None:
        """End running requests with the tokens drawn so far."""
        self._interrupted |= self._running
        await self._access.abort(list(self._running))

    async def logprobs(
        self, prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[float]]:
        """Return log-probs of each response after its prompt, at temperature 1. Prompt and
        response must be shorter than the context. Raises EngineError."""
        await self._prepare()
        self._check_usable()
        pairs = self._limits.pairs(prompt_ids, response_ids)
        return await asyncio.gather(*(self._score(*pair) for pair in pairs))

    async def _score(self, prompt: list[int], response: list[int]) -> list[float]:
        if not prompt or len(prompt) + len(response) >= self._limits.context:
            raise EngineError(
                f"a prompt of {len(prompt)} and a response of {len(response)} tokens cannot be scored: the prompt"
                f" needs 1, and both together can be {self._limits.context - 1}"
            )
        if not response:
            return []
        answered = self._access.answers(f"asyncflow-{next(self._ids)}", prompt + response, scoring(), 1)
        async with contextlib.aclosing(answered):
            (answer,) = [each async for answers in answered for each in answers]
        return [float(each) for each in answer.prompt_logprobs[-len(response) :]]

    # ---- new weights

    async def load_weights(self, update: WeightUpdate) -> set[str]:
        """Have all workers of vLLM load the update, between two tokens of running requests.

        Raises WeightMismatch, and continues with the old weights, if the version does not fit the
        model. After a load that failed in the workers they hold a mixture: running and waiting
        requests raise EngineError until a version is loaded whole.
        """
        return await finish(self._load(update))

    async def _load(self, update: WeightUpdate) -> set[str]:
        await self._prepare()
        async with self._lock:
            second = await asyncio.to_thread(check_update, update, self._folder, self._dtype)
            given = self._handover.give(WholeLayers(update, self._folder))
            handed = await asyncio.to_thread(given.__enter__)
            try:
                await self._access.pause()
                loaded = await self._swap(update, handed, second)
                self._refusal = ""
                return loaded
            finally:
                given.__exit__(None, None, None)

    async def _swap(self, update: WeightUpdate, handed: str, second: dict[str, str]) -> set[str]:
        """Load and resume. Return the loaded names. Nothing is generated meanwhile."""
        try:
            failures, names = zip(*await self._access.load(handed), strict=True)
            if any(failures):
                raise WeightError("; ".join(f"rank {rank}: {why}" for rank, why in enumerate(failures) if why))
            await asyncio.to_thread(self._check_loaded, update, update.tensors.keys() & set().union(*names), second)
            await self._access.name_version(update.version)
            await self._access.resume()
            return set(update.tensors)
        except BaseException as error:
            await self._refuse(f"vLLM holds a mixture of versions and must be loaded anew: {error}")
            if isinstance(error, (EngineGone, WeightMismatch)) or not isinstance(error, Exception):
                raise
            raise WeightError(f"version {update.version} could not be loaded whole: {error}") from error

    def _check_loaded(self, update: WeightUpdate, loaded: set[str], second: dict[str, str]) -> None:
        """Raise WeightMismatch for tensors that vLLM did not load and that equal no loaded one."""
        left = sorted(update.tensors.keys() - loaded - second.keys())
        lost = [name for name in left if first_equal(update, name, sorted(loaded)) is None]
        if lost:
            raise WeightMismatch(
                f"version {update.version}: vLLM has no place for {', '.join(lost[:10])}, and they are not equal"
                " to tensors tied to them in this model"
            )

    async def _refuse(self, why: str) -> None:
        """Refuse and abort all requests. vLLM stays paused."""
        self._refusal = why
        with contextlib.suppress(Exception):
            await self._access.abort(list(self._running))

    async def close(self) -> None:
        """Release vLLM. Running requests raise EngineError."""
        await self._refuse(self._refusal or "the engine was closed")
        if self._running:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), CLOSE_S)
        await self._access.close()
        self._handover.close()

    async def _prepare(self) -> None:
        """Prepare vLLM on the engine's event loop. Idempotent."""
        if self._prepared:
            return
        async with self._lock:
            if not self._prepared:
                self._limits.cuts = await self._access.prepare()
                self._prepared = True

    def _check_usable(self) -> None:
        if not self._refusal:
            self._access.check_alive()
        if self._refusal:
            raise EngineError(self._refusal)
