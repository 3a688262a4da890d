"""Served: a vLLM behind its HTTP server: token ids go to its route for them, weights and pauses to those for RL."""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from asyncflow_http.calls import CALL_S, Calls, Dropped, Refused
from asyncflow_http.finding import Claim
from asyncflow_sdk.errors import AsyncFlowError, EngineError, EngineGone

from .access import Access, Answer

FIRST_S, MOST_S, DEAD_S = 0.05, 1.0, 5.0
_NAMED = "generate-tokens-"
"""What the server puts before the name of a request."""
_ANSWER_BYTES, _TOKEN_BYTES = 64 << 10, 400
"""An answer takes no more than this, and this for each token of prompt and response."""
_NONE = -9999.0
"""What the server says where vLLM gave no log-prob."""

Call = tuple[str, dict[str, Any]]
"""Path and body."""
PAUSE: Call = ("/pause?mode=keep&clear_cache=true", {})
RESUME: Call = ("/resume", {})
OUTCOME: Call = ("/collective_rpc", {"method": "asyncflow_outcome"})
WHOLE: Call = ("/collective_rpc", {"method": "asyncflow_whole_logprobs"})


def takes(told: str) -> list[Call]:
    """Calls by which the workers load what a `Handover` told of; `OUTCOME` follows."""
    update = {"update_info": {"told": told}}
    return [("/start_weight_update", {}), ("/update_weights", update), ("/finish_weight_update", {})]


def naming(version: int) -> Call:
    return "/update_weight_version", {"new_version": str(version)}


class Outcome(msgspec.Struct):
    """Of a worker, as its ``asyncflow_outcome``."""

    failure: str
    taken: list[str]


class Outcomes(msgspec.Struct):
    results: list[Outcome]


class Said(msgspec.Struct):
    """Of workers that say yes or no."""

    results: list[str]

    @property
    def all_true(self) -> bool:
        return bool(self.results) and all(each == "True" for each in self.results)


class _Span(msgspec.Struct):
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
    finish_reason: str
    logprobs: _Tokens | None = None
    weight_versions: list[_Span] | None = None


class Reply(msgspec.Struct):
    """Of /inference/v1/generate."""

    choices: list[_Choice]
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None

    def answer(self, index: int, prompt: Sequence[int]) -> Answer:
        """Raises EngineError for what is no answer: tokens without log-probs, or with those of others."""
        if len(self.choices) != 1:
            raise EngineError(f"vLLM gave {len(self.choices)} responses where one was asked for")
        (choice,) = self.choices
        scored = choice.logprobs.content if choice.logprobs is not None else []
        if scored and [each.token_id for each in scored] != choice.token_ids:
            raise EngineError("vLLM gave log-probs that are not those of the tokens it gave")
        logprobs = [each.logprob for each in scored]
        of_prompt = []
        for token, said in zip(prompt[1:], (self.prompt_logprobs or [])[1:], strict=False):
            found = (said or {}).get(str(token))
            of_prompt.append(_NONE if found is None else found.logprob)
        if _NONE in logprobs or _NONE in of_prompt:
            raise EngineError("vLLM gave a token without its log-prob")
        versions = [(span.version, span.start, span.end) for span in choice.weight_versions or ()]
        return Answer(index, choice.token_ids, logprobs, choice.finish_reason, versions, of_prompt)


class Served(Access):
    """``calls``: to the server. ``claim``: that it is this engine's. ``cuts``: what its workers said to `WHOLE`. ``request_s``,
    ``update_s``: how long a response and each call of a load may take; a server that takes longer counts as lost."""

    def __init__(self, calls: Calls, claim: Claim, *, cuts: bool, request_s: float, update_s: float) -> None:
        self._calls, self._claim, self._cuts = calls, claim, cuts
        self._request_s, self._update_s = request_s, update_s
        self._mine = secrets.token_hex(8)
        """Before the names of this engine's requests: whoever had the server before may have used the same."""
        self._asked: dict[str, list[str]] = {}
        """Of each request its responses that are to come: the server is asked for one by one, since of several each waits for the others."""
        self._ending: set[str] = set()
        self._ends: asyncio.Task[None] | None = None
        self._lost = ""

    async def prepare(self) -> bool:
        return self._cuts

    async def answers(
        self, name: str, prompt: list[int], parameters: Mapping[str, Any], n: int
    ) -> AsyncGenerator[Sequence[Answer], None]:
        asked = self._asked[name] = [f"{self._mine}-{name}-{index}" for index in range(n)]
        seed = parameters.get("seed")
        tasks = []
        for index, each in enumerate(list(asked)):
            own = parameters if seed is None else {**parameters, "seed": seed + index}
            tasks.append(asyncio.create_task(self._answer(index, each, prompt, own)))
            tasks[-1].add_done_callback(functools.partial(self._ended, asked, each))
        try:
            for ended in asyncio.as_completed(tasks):
                yield [await ended]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            del self._asked[name]

    async def _answer(self, index: int, name: str, prompt: list[int], parameters: Mapping[str, Any]) -> Answer:
        body = {"request_id": name, "token_ids": prompt, "sampling_params": parameters}
        most = _ANSWER_BYTES + _TOKEN_BYTES * (len(prompt) + parameters["max_tokens"])
        reply: Reply = await self._post("/inference/v1/generate", body, Reply, self._request_s, most)
        return reply.answer(index, prompt)

    def _ended(self, asked: list[str], name: str, _: object) -> None:
        asked.remove(name)
        self._ending.discard(name)

    async def abort(self, names: Sequence[str]) -> None:
        self._ending.update(each for name in names for each in self._asked.get(name, ()))
        if self._ending and (self._ends is None or self._ends.done()):
            self._ends = asyncio.create_task(self._end())

    async def _end(self) -> None:
        """Until their answers are there: the server forgets to abort what it has not heard of yet."""
        wait_s = FIRST_S
        while self._ending:  # the server would abort all, were it told of none
            names = [_NAMED + name for name in self._ending]
            try:
                await self._calls.post("/abort_requests", {"request_ids": names}, object)
            except AsyncFlowError:
                return  # so do the requests, or they end by themselves
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MOST_S)

    async def pause(self) -> None:
        await self._call(PAUSE)

    async def take(self, told: str) -> list[tuple[str, list[str]]]:
        for call in takes(told):
            await self._call(call)
        path, body = OUTCOME
        outcomes = await self._post(path, body, Outcomes, self._update_s)
        return [(each.failure, each.taken) for each in outcomes.results]

    async def name_version(self, version: int) -> None:
        await self._call(naming(version))

    async def resume(self) -> None:
        await self._call(RESUME)

    def check_alive(self) -> None:
        if self._lost:
            raise EngineGone(self._lost)

    async def close(self) -> None:
        if self._ends is not None:
            self._ends.cancel()
            await asyncio.gather(self._ends, return_exceptions=True)
        await self._calls.close()
        self._claim.close()

    async def _call(self, call: Call) -> None:
        path, body = call
        await self._post(path, body, object, self._update_s)

    async def _post(
        self, path: str, body: Mapping[str, Any], answer: Any, timeout_s: float, most_bytes: int = 16 << 20
    ) -> Any:
        try:
            return await self._calls.post(path, body, answer, timeout_s=timeout_s, most_bytes=most_bytes)
        except Refused as error:
            if error.status < 500:
                raise
            raise await self._meaning(error) from None
        except Dropped as error:
            raise await self._meaning(error) from None
        except EngineGone as error:
            self._lost = str(error)
            raise

    async def _meaning(self, error: AsyncFlowError) -> AsyncFlowError:
        """Of a failure that may be the server's end: one that is in good health has failed this, and no more."""
        try:
            await self._calls.get("/health", object, timeout_s=min(DEAD_S, CALL_S))
        except AsyncFlowError:
            self._lost = str(error)
            return EngineGone(self._lost)
        return EngineError(str(error))
