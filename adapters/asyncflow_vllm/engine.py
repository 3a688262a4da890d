"""VllmRollout: what all rollout engines over vLLM do, however they reach it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from asyncflow_sdk.errors import EngineError, EngineGone, WeightError, WeightMismatch
from asyncflow_sdk.interfaces import Capabilities, Completion, Completions, Request, RolloutEngine, WeightUpdate
from asyncflow_sdk.interfaces.rollout import Swap
from asyncflow_sdk.weights import Handover

from .access import Access, Answer
from .checkpoint import Checkpoint, first_equal
from .requests import Limits, completions, drawing, end_tokens, scoring

CLOSE_S = 10.0


class VllmRollout(RolloutEngine):
    """``model``: the folder, as ``checkpoint`` knows it. ``version``: what the weights count as that vLLM has now."""

    def __init__(
        self,
        access: Access,
        model: str,
        checkpoint: Checkpoint,
        limits: Limits,
        *,
        version: int,
        swap: frozenset[Swap] = frozenset({"drain", "partial", "in_flight"}),
    ) -> None:
        self._access, self._checkpoint, self._limits, self._ends = access, checkpoint, limits, end_tokens(model)
        self.capabilities = Capabilities(
            swap=swap, token_versions=True, max_rows=limits.rows, context=limits.context, logprobs=True
        )
        self._first_version, self._ids = version, itertools.count()
        self._handover = Handover()
        self._running: set[str] = set()
        self._idle = asyncio.Event()
        self._interrupted: set[str] = set()
        self._refusal = ""
        self._prepared = False
        self._one = asyncio.Lock()
        """Held by a load, and by what prepares the first request."""

    # ---- generating

    async def generate(self, request: Request) -> AsyncIterator[Completion | Completions]:
        """Yield each response as it finishes. Closing the generator aborts what is left. A greedy response is drawn once, and is
        all ``n`` of them."""
        await self._prepare()
        prompt = self._limits.check(request)
        self._check_usable()
        name = f"asyncflow-{next(self._ids)}"
        parameters, greedy = drawing(request, self._ends), request.sampling.temperature == 0
        answered = self._access.answers(name, prompt, parameters, 1 if greedy else request.n)
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

    def _check_end(self, name: str, answer: Answer) -> None:
        """Raises EngineError for one that nobody has ended."""
        if answer.reason in ("stop", "length") or (answer.reason == "abort" and name in self._interrupted):
            return
        self._check_usable()
        raise EngineError(f"vLLM ended a request with {answer.reason!r} after {len(answer.token_ids)} tokens")

    async def interrupt(self) -> None:
        self._interrupted |= self._running
        await self._access.abort(list(self._running))

    async def logprobs(
        self, prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[float]]:
        """Log-probs of each response's tokens after its prompt, at temperature 1. A prompt and its response are one token less than the
        context at most. Raises EngineError."""
        await self._prepare()
        self._check_usable()
        if len(prompt_ids) != len(response_ids):
            raise EngineError(f"{len(prompt_ids)} prompts and {len(response_ids)} responses are no pairs")
        pairs = [
            (self._limits.tokens(prompt), self._limits.tokens(response))
            for prompt, response in zip(prompt_ids, response_ids, strict=True)
        ]
        return await asyncio.gather(*(self._score(*pair) for pair in pairs))

    async def _score(self, prompt: list[int], response: list[int]) -> list[float]:
        if not prompt or len(prompt) + len(response) >= self._limits.context:
            raise EngineError(
                f"a prompt of {len(prompt)} and a response of {len(response)} tokens cannot be scored: the prompt needs 1, and both"
                f" together can be {self._limits.context - 1}"
            )
        if not response:
            return []
        answered = self._access.answers(f"asyncflow-{next(self._ids)}", prompt + response, scoring(), 1)
        async with contextlib.aclosing(answered):
            (answer,) = [each async for answers in answered for each in answers]
        return [float(each) for each in answer.prompt_logprobs[-len(response) :]]

    # ---- new weights

    async def load_weights(self, update: WeightUpdate) -> set[str]:
        """Have every worker of vLLM load the update, between two tokens of what runs.

        Raises WeightMismatch, and goes on under the old weights, for a version that does not fit the model. A load that breaks off in the
        workers leaves a mixture: what runs or waits gets an EngineError, and nothing is generated before a version has
        been loaded whole.
        """
        task = asyncio.ensure_future(self._load(update))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])  # the caller releases the update now, and workers may be reading from it
            raise

    async def _load(self, update: WeightUpdate) -> set[str]:
        await self._prepare()
        async with self._one:
            second = await asyncio.to_thread(self._checkpoint.check, update)
            given = self._handover.give(update)
            told = await asyncio.to_thread(given.__enter__)
            try:
                await self._access.pause()
                taken = await self._swapped(update, told, second)
                self._refusal = ""
                return taken
            finally:
                given.__exit__(None, None, None)

    async def _swapped(self, update: WeightUpdate, told: str, second: dict[str, str]) -> set[str]:
        """The names that were taken; nothing is generated meanwhile."""
        try:
            failures, names = zip(*await self._access.take(told), strict=True)
            if any(failures):
                raise WeightError("; ".join(f"rank {rank}: {why}" for rank, why in enumerate(failures) if why))
            taken = await asyncio.to_thread(self._all_taken, update, set().union(*names), second)
            await self._access.name_version(update.version)
            await self._access.resume()
            return taken
        except BaseException as error:
            await self._refuse(f"vLLM holds a mixture of versions and must be loaded anew: {error}")
            if isinstance(error, (EngineGone, WeightMismatch)) or not isinstance(error, Exception):
                raise
            raise WeightError(f"version {update.version} could not be loaded whole: {error}") from error

    def _all_taken(self, update: WeightUpdate, taken: set[str], second: dict[str, str]) -> set[str]:
        """The names whose bytes vLLM holds. Raises WeightMismatch for those that it does not."""
        left = sorted(update.tensors.keys() - taken - second.keys())
        lost = [name for name in left if first_equal(update, name, sorted(taken)) is None]
        if lost:
            raise WeightMismatch(
                f"version {update.version}: vLLM has no place for {', '.join(lost[:10])}, nor are they equal to what is"
                " tied to them in this model"
            )
        return set(update.tensors)

    async def _refuse(self, why: str) -> None:
        """Generate nothing from here on. vLLM stays paused."""
        self._refusal = why
        with contextlib.suppress(Exception):
            await self._access.abort(list(self._running))

    # ---- the whole of it

    async def close(self) -> None:
        """Let go of vLLM. Requests still running get an EngineError."""
        self._refusal = self._refusal or "the engine was closed"
        with contextlib.suppress(Exception):
            await self._access.abort(list(self._running))
        if self._running:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), CLOSE_S)
        await self._access.close()
        self._handover.close()

    async def _prepare(self) -> None:
        """Once, on the loop on which it works."""
        if self._prepared:
            return
        async with self._one:
            if not self._prepared:
                self._limits.cuts = await self._access.prepare()
                self._prepared = True

    def _check_usable(self) -> None:
        if not self._refusal:
            self._access.check_alive()
        if self._refusal:
            raise EngineError(self._refusal)
