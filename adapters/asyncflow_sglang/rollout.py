"""SGLangRollout: the common part of rollout engines over SGLang, in this process or behind HTTP.

A version reaches SGLang as a safetensors file in shared memory; SGLang then recomputes the keys and
values of running requests and continues them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

from asyncflow_http.cancellation import finish
from asyncflow_http.limits import RequestLimits
from asyncflow_sdk.errors import AsyncFlowError, EngineError, EngineGone, WeightError
from asyncflow_sdk.interfaces import Capabilities, Completion, Request, RolloutEngine, WeightUpdate

from .handoff import SafetensorsHandoff
from .info import ServerInfo
from .replies import NOTHING, SGLangReply, completion, scores
from .request_tracker import Link, RequestTracker, TrackedRequest
from .requests import answer_bytes, generate_body, load_calls, most_kept, read_body, response_seed
from .served_folder import ServedFolder

SAVED_TOKENS = 64
"""A prompt is read once, before the responses of its group, if that saves this number of tokens."""
_log = logging.getLogger(__name__)


class SGLangRollout(RolloutEngine):
    """``link``: to an SGLang with the weights of ``folder``. ``info``: its description.

    ``directory``: versions are written there; None: shared memory of this host. ``max_rows``: concurrent responses.
    ``request_s``, ``update_s``: time limits of a response and of each call of a load; a slower SGLang counts as lost.

    Log-probs are under the whole vocabulary at the request's temperature (at 1 for greedy), also with top-k or top-p,
    unless a sampling mask is asked for. Seeds take effect if SGLang was started with
    ``enable_deterministic_inference``. Calls raise EngineGone once SGLang is lost: the worker ends, and other workers
    get its rows.
    """

    def __init__(
        self,
        link: Link,
        folder: ServedFolder,
        info: ServerInfo,
        *,
        directory: str | None,
        max_rows: int,
        request_s: float,
        update_s: float,
    ) -> None:
        self._link, self._folder = link, folder
        self._has_seeds, self._update_s = info.enable_deterministic_inference, update_s
        context = folder.context_of(info.max_req_input_len)
        self._limits = RequestLimits(vocabulary=folder.vocabulary, context=context, rows=max_rows)
        self._refusal, self._lost, self._closed, self._warned, self._interruptions = "", False, False, False, 0
        self._resuming: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        """Held by a load."""
        self._tracker = RequestTracker(link, max_rows, request_s)
        self._handoff = SafetensorsHandoff(directory)
        self.capabilities = Capabilities(
            swap=frozenset({"drain", "partial", "in_flight"}), token_versions=True, max_rows=max_rows,
            context=context, logprobs=True, stop_texts=True, sampling_mask=True,
            most_kept=info.sampling_mask_max_tokens if folder.vocabulary > info.sampling_mask_max_tokens else None,
        )  # fmt: skip

    # ---- generation

    async def generate(self, request: Request) -> AsyncIterator[Completion]:
        """Yield responses as they finish. Closing the generator aborts the others."""
        prompt = self._limits.check(request)
        self._check_usable()
        interruptions = self._interruptions
        if (request.n - 1) * len(prompt) >= SAVED_TOKENS:
            await self._reply(self._tracker.send(read_body(prompt), answer_bytes(0)))
        if interruptions != self._interruptions:
            for index in range(request.n):
                yield Completion(index, [], [], "aborted")
            return
        sampling, kept = request.sampling, most_kept(request.sampling, self._folder.vocabulary)
        masked = kept > 0 if sampling.sampling_mask else None
        most = answer_bytes(sampling.max_tokens, kept)
        sent = []
        for index in range(request.n):
            seed, watch = self._seed(request, index), request.watch()
            body = generate_body(prompt, sampling, kept, seed=seed, stream=watch is not None)
            sent.append(self._tracker.send(body, most, watch))
        ends = {*self._folder.ends, *sampling.stop_ids}
        answers = {each.answer: (index, each) for index, each in enumerate(sent)}
        try:
            while answers:
                done, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index, each = answers.pop(task)
                    reply = await self._reply(each)
                    yield completion(reply, index, ends, masked, interrupted=each.interrupted, watch=each.watch)
        finally:
            for _, each in answers.values():
                self._tracker.abort(each)

    async def interrupt(self) -> None:
        """End running requests with the tokens drawn so far."""
        self._interruptions += 1
        self._tracker.interrupt()

    async def logprobs(
        self, prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[float]]:
        """Return log-probs of each response after its prompt, at temperature 1, under the
        current weights. Raises EngineError for sequences that SGLang cannot score."""
        self._check_usable()
        sent = []
        pairs = self._limits.pairs(prompt_ids, response_ids)
        if not all(prompt for prompt, _ in pairs):
            raise EngineError("the first token of a response has no log-prob without a prompt")
        for prompt, response in pairs:
            whole = prompt + response
            sent.append(self._tracker.send(read_body(whole, scored=True), answer_bytes(len(whole))))
        return [
            scores(await self._reply(each), response, self._folder.vocabulary)
            for each, (_, response) in zip(sent, pairs, strict=True)
        ]

    async def _reply(self, request: TrackedRequest) -> SGLangReply:
        """Return the answer. Raises EngineError and EngineGone. If cancelled, aborts the request."""
        try:
            await asyncio.wait([request.answer])
        except asyncio.CancelledError:
            self._tracker.abort(request)
            raise
        self._check_usable()
        if request.spoiled:
            raise EngineError(request.spoiled)
        return NOTHING if request.answer.cancelled() else request.answer.result()  # cancelled before it was sent

    def _seed(self, request: Request, index: int) -> int | None:
        seed = request.sampling.seed if request.seed is None else request.seed
        if self._has_seeds:
            return response_seed(seed, request.first + index)
        if seed is not None and not self._warned:
            self._warned = True
            _log.warning(
                "%s draws without seeds, so a run with a seed does not repeat its tokens; start it with"
                " enable_deterministic_inference for seeds", self._link.name,
            )  # fmt: skip
        return None

    def _check_usable(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed")
        if self._refusal:
            raise (EngineGone if self._lost else EngineError)(self._refusal)

    # ---- new weights

    async def load_weights(self, update: WeightUpdate) -> set[str]:
        """Have SGLang load the version, between two tokens of running requests.

        Raises WeightMismatch, and continues with the old weights, for a version that does not fit the model; the same
        for errors while the update is read. After a load that failed in SGLang its weights are unknown: running and
        waiting requests raise EngineError until a version is loaded whole.
        """
        async with self._lock:
            if self._closed:
                raise EngineError("the engine was closed")
            self._folder.check(update)
            await finish(asyncio.to_thread(self._handoff.write, update))
            await self._tracker.wait_aborted()
            try:
                for path, body in load_calls(str(self._handoff.folder), update.version):
                    await self._link.post(path, body, object, timeout_s=self._update_s)
            except BaseException as error:
                self._abandon_load(f"version {update.version} did not come whole into {self._link.name}", error)
                if isinstance(error, EngineError) and not isinstance(error, EngineGone):
                    raise WeightError(f"version {update.version} could not be loaded: {error}") from error
                raise
            self._refusal, self._lost = "", False
        return set(update.tensors)

    def _abandon_load(self, failure: str, error: BaseException) -> None:
        """Refuse and abort all requests, and have SGLang end them."""
        self._lost = isinstance(error, EngineGone)
        self._refusal = f"{failure}: {error!r}. It must be loaded anew before it generates"
        if self._lost:
            self._refusal = f"{failure}: {error}"
        self._tracker.spoil(self._refusal)
        self._handoff.forget()
        self._resuming = asyncio.create_task(self._resume())

    async def _resume(self) -> None:
        with contextlib.suppress(AsyncFlowError):  # the next load or request raises it
            await self._link.post("/continue_generation", {}, object)

    async def close(self) -> None:
        """Release SGLang. Running requests raise EngineError."""
        self._closed = True
        await self._tracker.close()
        if self._resuming is not None:
            self._resuming.cancel()
            await asyncio.gather(self._resuming, return_exceptions=True)
        await self._link.close()
        await asyncio.to_thread(self._handoff.close)
