"""SGLangRollout: what generates with SGLang, wherever it runs.

Token ids go in and come out. A version goes to SGLang as a safetensors file in shared memory; what runs then is read anew
by it and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import numpy as np

from asyncflow_http.calls import Dropped
from asyncflow_sdk.errors import AsyncFlowError, EngineError, EngineGone, WeightError
from asyncflow_sdk.interfaces import Capabilities, Completion, Request, RolloutEngine, WeightUpdate

from .asking import Asked, Asking
from .checkpoint import Checkpoint
from .handing import Handing
from .info import ServerInfo
from .link import Link
from .replies import NOTHING, Reply, completion, scores
from .requests import (
    answer_bytes,
    check_ids,
    generate_body,
    load_calls,
    read_body,
    response_seed,
    score_body,
    token_ids,
)

SAVED_TOKENS = 64
"""A prompt is read once for all responses of a group, before they are drawn, where that saves reading so many tokens."""
_log = logging.getLogger(__name__)


class SGLangRollout(RolloutEngine):
    """``link``: to SGLang, which holds the weights of the folder that ``checkpoint`` is of. ``info``: what it says of itself.

    ``context``: the most tokens of prompt and response. ``directory``: where versions are written; None: shared memory of
    this host. ``max_rows``: responses asked for at once. ``request_s``, ``update_s``: how long a response and a load may take;
    an SGLang that takes longer counts as lost.

    Log-probs are under the whole vocabulary at the request's temperature (at 1 for greedy), also where top-k or top-p cut the
    draw. Seeds count where SGLang draws by them (``enable_deterministic_inference``). An SGLang that is lost raises
    EngineGone in whatever waits for it: the worker ends, and its rows go to others.
    """

    def __init__(
        self,
        link: Link,
        checkpoint: Checkpoint,
        info: ServerInfo,
        *,
        context: int,
        directory: str | None,
        max_rows: int,
        request_s: float,
        update_s: float,
    ) -> None:
        self._calls, self._checkpoint, self._context = link, checkpoint, context
        self._by_seeds, self._update_s = info.enable_deterministic_inference, update_s
        self._torn, self._gone, self._closed, self._told, self._interruptions = "", False, False, False, 0
        self._going_on: asyncio.Task[None] | None = None
        self._load = asyncio.Lock()
        self._asking = Asking(link, max_rows, request_s)
        self._handing = Handing(directory)
        self.capabilities = Capabilities(
            swap=frozenset({"drain", "partial", "in_flight"}),
            token_versions=True,
            max_rows=max_rows,
            context=context,
            logprobs=True,
        )

    async def _what_is_lost(self, error: Dropped) -> AsyncFlowError:
        """What a broken connection means."""
        return EngineGone(str(error))

    # ---- generating

    async def generate(self, request: Request) -> AsyncIterator[Completion]:
        """Yield each response as it finishes. Closing the generator aborts what is left."""
        prompt = token_ids(
            request,
            vocabulary=self._checkpoint.vocabulary,
            context=self._context,
            max_rows=self.capabilities.max_rows,
        )
        self._check_usable()
        interruptions = self._interruptions
        if (request.n - 1) * len(prompt) >= SAVED_TOKENS:
            await self._reply(self._asking.ask(read_body(prompt), answer_bytes(0)))
        if interruptions != self._interruptions:
            for index in range(request.n):
                yield Completion(index, [], [], "aborted")
            return
        most = answer_bytes(request.sampling.max_tokens)
        asked = {
            self._asking.ask(generate_body(prompt, request.sampling, seed=self._seed(request, index)), most): index
            for index in range(request.n)
        }
        answers = {each.answer: each for each in asked}
        try:
            while answers:
                done, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    each = answers.pop(task)
                    yield completion(await self._reply(each), asked[each], interrupted=each.interrupted)
        finally:
            for each in answers.values():
                self._asking.end(each)

    async def interrupt(self) -> None:
        self._interruptions += 1
        self._asking.interrupt()

    async def logprobs(
        self, prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[float]]:
        """Log-probs of each response's tokens after its prompt, at temperature 1, under the weights held now. Raises EngineError for
        sequences the server cannot take."""
        self._check_usable()
        asked = []
        for prompt, response in zip(prompt_ids, response_ids, strict=True):
            whole = np.asarray([*prompt, *response], np.int64)
            check_ids(whole, self._checkpoint.vocabulary)
            if not len(prompt):
                raise EngineError("the first token of a response has no log-prob without a prompt")
            asked.append(self._asking.ask(score_body(whole.tolist()), answer_bytes(len(whole))))
        replies = [await self._reply(each) for each in asked]
        return [
            scores(reply, list(response), self._checkpoint.vocabulary)
            for reply, response in zip(replies, response_ids, strict=True)
        ]

    async def _reply(self, asked: Asked) -> Reply:
        """Its answer. Raises EngineError and EngineGone; cancelled, the request is ended."""
        try:
            await asyncio.wait([asked.answer])
        except asyncio.CancelledError:
            self._asking.end(asked)
            raise
        self._check_usable()
        if asked.spoiled:
            raise EngineError(asked.spoiled)
        if asked.answer.cancelled():  # it waited to be sent
            return NOTHING
        try:
            return asked.answer.result()
        except Dropped as error:
            raise await self._what_is_lost(error) from None

    def _seed(self, request: Request, index: int) -> int | None:
        seed = request.sampling.seed if request.seed is None else request.seed
        if self._by_seeds:
            return response_seed(seed, request.first + index)
        if seed is not None and not self._told:
            self._told = True
            _log.warning(
                "%s draws without seeds, so that a run with a seed does not repeat its tokens; it draws by them when it is started"
                " with enable_deterministic_inference", self._calls.name,
            )  # fmt: skip
        return None

    def _check_usable(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed")
        if self._torn:
            raise (EngineGone if self._gone else EngineError)(self._torn)

    # ---- new weights

    async def load_weights(self, update: WeightUpdate) -> set[str]:
        """Hand the version to the server. What runs is stopped between two tokens, read anew by it and goes on.

        Raises WeightMismatch, and goes on under the old weights, for a version that does not fit the model, and whatever reading
        the update raises. A load that breaks off in the server leaves nobody knows what: what runs or waits gets an EngineError,
        and nothing is generated before a version has been loaded whole.
        """
        async with self._load:
            if self._closed:
                raise EngineError("the engine was closed")
            self._checkpoint.check(update)
            await _seen_through(asyncio.to_thread(self._handing.write, update))
            await self._asking.ended()
            try:
                for path, body in load_calls(str(self._handing.folder), update.version):
                    await self._calls.post(path, body, object, timeout_s=self._update_s)
            except BaseException as error:
                broken = f"version {update.version} did not come whole into {self._calls.name}"
                self._tear(f"{broken}: {error!r}")
                lost = await self._what_is_lost(error) if isinstance(error, Dropped) else error
                if isinstance(lost, EngineGone):
                    self._torn, self._gone = f"{broken}: {lost}", True
                if lost is not error:
                    raise lost from None
                if isinstance(error, EngineError) and not isinstance(error, EngineGone):
                    raise WeightError(f"version {update.version} could not be loaded: {error}") from error
                raise
            self._torn, self._gone = "", False
        return set(update.tensors)

    def _tear(self, why: str) -> None:
        """Nobody knows what the server holds. What runs there ends, and its answers count no more."""
        self._torn = f"{why}. It must be loaded anew before it generates"
        self._asking.spoil(self._torn)
        self._handing.forget()  # the server may still be reading
        self._going_on = asyncio.create_task(self._go_on())

    async def _go_on(self) -> None:
        with contextlib.suppress(AsyncFlowError):  # the next load, or the next request, says so
            await self._calls.post("/continue_generation", {}, object)

    async def close(self) -> None:
        """End what is this engine's own, let go of what is not. Requests still running get an EngineError."""
        self._closed = True
        await self._asking.close()
        if self._going_on is not None:
            self._going_on.cancel()
            await asyncio.gather(self._going_on, return_exceptions=True)
        await self._calls.close()
        await self._closed_too()
        await asyncio.to_thread(self._handing.close)

    async def _closed_too(self) -> None:
        """When nothing is asked any more."""


async def _seen_through(work: Coroutine[Any, Any, None]) -> None:
    """Wait for it, also when cancelled: the caller releases then what it reads from."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
