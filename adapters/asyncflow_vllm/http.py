"""HttpAccess: a running vLLM server: its route for token ids, and its routes for pauses and weights."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from asyncflow_http.limits import interval
from asyncflow_http.server import HttpServer
from asyncflow_sdk.errors import AsyncFlowError, EngineError, EngineGone, WeightError
from asyncflow_sdk.interfaces import StopWatch, WeightUpdate

from .access import Access, VllmAnswer
from .handover import Handover

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 1.0
GENERATE = "/inference/v1/generate"
_NAME_PREFIX = "generate-tokens-"
"""The server puts it before the name of a request."""
_ANSWER_BYTES, _TOKEN_BYTES = 64 << 10, 400
"""Upper bounds of an answer's size: without tokens, and for each token of prompt and response."""
_NO_LOGPROB = -9999.0
"""The server returns it if vLLM returned no log-prob."""


class _WorkerOutcome(msgspec.Struct):
    """Result of ``asyncflow_outcome`` in one worker."""

    failure: str
    taken: list[str]


class _Outcomes(msgspec.Struct):
    results: list[_WorkerOutcome]


class _Flags(msgspec.Struct):
    """Booleans of all workers, as text."""

    results: list[str]


class _VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _Logprob(msgspec.Struct):
    logprob: float


class _Token(msgspec.Struct):
    token_id: int
    logprob: float


class _Tokens(msgspec.Struct):
    content: list[_Token]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str | None
    logprobs: _Tokens | None = None
    weight_versions: list[_VersionSpan] | None = None


class _Reply(msgspec.Struct):
    """VllmAnswer of `GENERATE`."""

    choices: list[_Choice]
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None

    def answer(self, index: int, prompt: Sequence[int]) -> VllmAnswer:
        """Return the response. Raises EngineError for tokens without log-probs, and for log-probs of other tokens."""
        if len(self.choices) != 1:
            raise EngineError(f"vLLM returned {len(self.choices)} responses to a request for one")
        (choice,) = self.choices
        scored = choice.logprobs.content if choice.logprobs is not None else []
        if scored and [each.token_id for each in scored] != choice.token_ids:
            raise EngineError("vLLM returned log-probs of other tokens than the returned ones")
        logprobs = [each.logprob for each in scored]
        of_prompt = []
        for token, given in zip(prompt[1:], (self.prompt_logprobs or [])[1:], strict=False):
            found = (given or {}).get(str(token))
            of_prompt.append(_NO_LOGPROB if found is None else found.logprob)
        if _NO_LOGPROB in logprobs or _NO_LOGPROB in of_prompt:
            raise EngineError("vLLM returned a token without its log-prob")
        versions = [(span.version, span.start, span.end) for span in choice.weight_versions or ()]
        return VllmAnswer(index, choice.token_ids, logprobs, choice.finish_reason or "", versions, of_prompt)

    def add(self, part: _Reply) -> None:
        """Append a part of the response."""
        (whole,) = self.choices
        for more in part.choices:
            whole.token_ids += more.token_ids
            if whole.logprobs is not None and more.logprobs is not None:
                whole.logprobs.content += more.logprobs.content
            whole.finish_reason, whole.weight_versions = more.finish_reason, more.weight_versions


class HttpAccess(Access):
    """``server``: claimed by this engine. ``request_s``, ``update_s``: time limits of a response
    and of each call of a load; a slower server counts as lost."""

    def __init__(self, server: HttpServer, *, request_s: float, update_s: float) -> None:
        super().__init__()
        self._server, self._request_s, self._update_s = server, request_s, update_s
        self._prefix = secrets.token_hex(8)
        """Of this engine's request names: earlier users of the server may have used the same numbers."""
        self._aborts: set[asyncio.Task[None]] = set()
        self._cuts = False
        self._lost = ""

    async def load_folder(self, weights: WeightUpdate) -> None:
        """Load the model folder's weights. The last user may have left the server paused, or
        with other weights. Raises WeightError or EngineError."""
        handover = Handover()
        try:
            with handover.give(weights) as handed:
                await self.pause()
                failures = [failure for failure, _ in await self.load(handed) if failure]
            if failures:
                raise WeightError(f"the weights in the model folder could not be loaded: {'; '.join(failures)}")
            whole: _Flags = await self._update("/collective_rpc", _Flags, method="asyncflow_whole_logprobs")
            self._cuts = bool(whole.results) and all(each == "True" for each in whole.results)
            await self.name_version(weights.version)
            await self.resume()
        finally:
            handover.close()

    async def prepare(self) -> bool:
        """Return the answer of the server's workers, known since ``load_folder``."""
        return self._cuts

    async def answer(
        self, index: int, name: str, prompt: list[int], parameters: Mapping[str, Any], watch: StopWatch | None
    ) -> VllmAnswer:
        """Run one request of the server for one response, and abort it at a stop text."""
        body: dict[str, Any] = {
            "request_id": f"{self._prefix}-{name}",
            "token_ids": prompt,
            "sampling_params": parameters,
        }
        most = _ANSWER_BYTES + _TOKEN_BYTES * (len(prompt) + parameters["max_tokens"])
        if watch is None:
            reply: _Reply = await self._post(GENERATE, body, _Reply, self._request_s, most)
            return reply.answer(index, prompt)
        body["sampling_params"] = {**parameters, "stream_interval": interval(parameters["max_tokens"])}
        whole, stopped = _Reply([_Choice([], None, _Tokens([]))]), False

        def add(part: _Reply) -> None:
            nonlocal stopped
            whole.add(part)
            if not stopped and watch.found(whole.choices[0].token_ids):
                stopped = True
                self._abort([name])

        await self._post(GENERATE, body | {"stream": True}, _Reply, self._request_s, most, add)
        answer = whole.answer(index, prompt)
        return replace(answer, reason="stop") if watch.found(answer.token_ids) else answer

    async def abort_named(self, names: Sequence[str]) -> None:
        """Abort requests until they are answered: the server ignores an abort of a request that
        it has not received yet."""
        self._abort(names)

    def _abort(self, names: Sequence[str]) -> None:
        task = asyncio.create_task(self._abort_until_answered(names))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort_until_answered(self, names: Sequence[str]) -> None:
        wait_s = FIRST_WAIT_S
        while left := self.unanswered(names):  # an empty list would abort all requests
            ids = [f"{_NAME_PREFIX}{self._prefix}-{name}" for name in left]
            with contextlib.suppress(AsyncFlowError):  # of a server that is lost, the requests fail as well
                await self._server.client.post("/abort_requests", {"request_ids": ids}, object)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def pause(self) -> None:
        """Pause generation and clear the caches."""
        await self._update("/pause?mode=keep&clear_cache=true")

    async def load(self, handed: str) -> list[tuple[str, list[str]]]:
        """Update the weights, and ask the workers for the outcome."""
        await self._update("/start_weight_update")
        await self._update("/update_weights", update_info={"handed": handed})
        await self._update("/finish_weight_update")
        outcomes: _Outcomes = await self._update("/collective_rpc", _Outcomes, method="asyncflow_outcome")
        return [(each.failure, each.taken) for each in outcomes.results]

    async def name_version(self, version: int) -> None:
        """Set vLLM's weight version."""
        await self._update("/update_weight_version", new_version=str(version))

    async def resume(self) -> None:
        """Resume generation."""
        await self._update("/resume")

    def check_alive(self) -> None:
        """Raise EngineGone if the server was lost."""
        if self._lost:
            raise EngineGone(self._lost)

    async def close(self) -> None:
        """Give up the server."""
        aborts = list(self._aborts)
        for task in aborts:
            task.cancel()
        await asyncio.gather(*aborts, return_exceptions=True)
        await self._server.close()

    async def _update(self, path: str, answer: Any = object, **body: Any) -> Any:
        return await self._post(path, body, answer, self._update_s)

    async def _post(
        self,
        path: str,
        body: Mapping[str, Any],
        answer: Any,
        timeout_s: float,
        most_bytes: int = 16 << 20,
        part: Callable[[Any], None] | None = None,
    ) -> Any:
        try:
            return await self._server.post(path, body, answer, timeout_s=timeout_s, most_bytes=most_bytes, part=part)
        except EngineGone as error:
            self._lost = str(error)
            raise
