"""Agents: conversations of a policy with tools and environments, one a row.

async def solve(turns: af.Turns, answer: str) -> float:                  # Rollout(..., agent=solve, gives=["reward"])
    turn = await turns.generate(stop="=")                                # the model, until it asks for the tool
    turn = await turns.generate(calculate(turn.text))                    # what the tool says, and the model once more
    return float(turn.text == answer)
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import AsyncFlowError, ConfigError, EngineError, SchemaError
from ..interfaces import Completion, Request
from ..plugins import import_path
from ..queue.error_text import error_text, plain_text
from ..types import Ragged, Sampling, VersionSpan, pack
from ..types.validation import check_above, check_fields
from .completing import Answer, Ids
from .drawing import Deliver, joined_spans, spans_of
from .text import Text
from .user_code import user_error_text
from .work import is_coroutine, parameters_of

END_S = 1.0
"""How long an agent may take to end when it is told to (seconds)."""

Observed = str | Sequence[int] | npt.NDArray[np.int32]
Draw = Callable[[Request, Deliver], Awaitable[None]]


class AgentFailed(AsyncFlowError):
    """Raised when a user's agent raised, took too long, or gave what it should not."""


class Turn(NamedTuple):
    """What the model said. ``text``: "" without a tokenizer. ``token_ids``: int32 (length,), the end token or stop id included;
    ``logprobs``: float32 (length,). ``finish_reason``: "stop", or "length": it drew all it may, or nothing more fits into
    the context, and then the conversation is over."""

    text: str
    token_ids: Ids
    logprobs: npt.NDArray[np.float32]
    finish_reason: str


class _Part(NamedTuple):
    ids: Ids
    logprobs: npt.NDArray[np.float32]
    spans: Sequence[VersionSpan] | None  # None: observed


class Turns:
    """One conversation. What was drawn and observed is kept token by token, and never tokenised again.

    Belongs to the event loop of its agent. Between two turns nothing of it is in the engine: new weights may be loaded then,
    and the turns after are drawn by the new version.
    """

    def __init__(
        self, draw: Draw, prompt_ids: Ids, sampling: Sampling, *, seed: int | None = None, text: Text | None = None,
        context: int | None = None,
    ) -> None:  # fmt: skip
        self.prompt_ids = prompt_ids
        """int32 (length,)."""
        self.over = False
        """Whether the context is full: nothing more is drawn or observed."""
        self._draw, self._sampling, self._seed, self._text, self._context = draw, sampling, seed, text, context
        self._parts: list[_Part] = []
        self._drawing = self._closed = False
        self._count = 0
        self.failure: EngineError | None = None

    @property
    def response_ids(self) -> Ids:
        """All tokens after the prompt so far, drawn and observed: int32 (length,)."""
        ids: Ids = _flat([part.ids for part in self._parts], np.int32)
        return ids

    async def generate(
        self, observed: Observed | None = None, *, max_tokens: int | None = None, stop: str | Sequence[str | int] = ()
    ) -> Turn:
        """The model's next turn, after ``observed`` where that is given.

        ``max_tokens``: of this turn; by default the sampling's. ``stop``: tokens (or text that is one token each) that end
        it beside the model's own. With no room left in the context the turn is empty and ends by "length". Raises
        EngineError for what the engine refuses; the row then fails, whatever the agent does.
        """
        self._check_open()
        if observed is not None:
            self.observe(observed)
        ids = np.concatenate([self.prompt_ids, self.response_ids])
        most = max_tokens or self._sampling.max_tokens
        if self._context is not None:
            most = min(most, self._context - len(ids))
        if most < 1:
            self.over = True
        if self.over:
            await asyncio.sleep(0)  # an agent that goes on and on must not keep the loop from its deadline
            return Turn("", np.empty(0, np.int32), np.empty(0, np.float32), "length")
        stops = (*self._sampling.stop_ids, *self._stop_ids(stop))
        seed = None if self._seed is None else hash((self._seed, self._count)) & 0x7FFFFFFF
        got: list[tuple[Completion, int]] = []
        self._drawing, self._count = True, self._count + 1
        try:
            request = Request(ids, replace(self._sampling, max_tokens=most, stop_ids=stops), 1, seed)
            await self._draw(request, lambda ended, version: got.extend((each, version) for each in ended.each()))
        except EngineError as error:
            self.failure, self._closed = error, True
            raise
        finally:
            self._drawing = False
        completion, version = got[0]
        part = _Part(
            np.asarray(completion.token_ids, np.int32), np.asarray(completion.logprobs, np.float32),
            spans_of(completion, version),
        )  # fmt: skip
        self._parts.append(part)
        self.over = self._context is not None and len(ids) + len(part.ids) >= self._context
        return Turn(self._said(part.ids), part.ids, part.logprobs, completion.finish_reason)

    def observe(self, observed: Observed) -> None:
        """Append what the policy did not draw: what a tool or an environment says. It is not trained.

        What does not fit into the context is left out, and then the conversation is over.
        """
        self._check_open()
        ids = self._encoded(observed)
        if self._context is not None:
            room = self._context - len(self.prompt_ids) - sum(len(part.ids) for part in self._parts)
            self.over, ids = self.over or len(ids) >= room, ids[:room]
        if len(ids):
            self._parts.append(_Part(ids, np.zeros(len(ids), np.float32), None))

    def close(self) -> None:
        """Nothing can be drawn or observed any more."""
        self._closed = True

    def answer(self, columns: Mapping[str, Any]) -> Answer:
        """The row: all tokens in order. Those observed have log-prob 0, and the version that drew the token before them (where
        there is none, the one after). Raises AgentFailed when nothing was drawn."""
        drawn = [part.spans for part in self._parts if part.spans is not None]
        if not any(drawn):
            raise AgentFailed("its model never said anything: a row needs a token that was drawn")
        version, spans = next(each for each in drawn if each)[0].version, []
        for part in self._parts:
            each = part.spans if part.spans is not None else (VersionSpan(version, 0, len(part.ids)),)
            version = each[-1].version if each else version
            spans.append(each)
        mask = np.repeat([part.spans is not None for part in self._parts], [len(part.ids) for part in self._parts])
        logprobs = _flat([part.logprobs for part in self._parts], np.float32)
        reason = "length" if self.over else "stop"
        return Answer(Completion(0, self.response_ids, logprobs, reason, joined_spans(spans)), version, mask, columns)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this conversation has ended")
        if self._drawing:
            raise RuntimeError("a conversation has one turn after another: await the one that is being generated")

    def _encoded(self, observed: Observed) -> Ids:
        if isinstance(observed, str):
            return self._tokenizer("what is observed").encode([observed], special=False)[0]
        ids: Any = np.asarray(observed)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise SchemaError(f"what is observed is text or a row of token ids, not {ids.dtype} of shape {ids.shape}")
        return ids.astype(np.int32)  # type: ignore[no-any-return]

    def _stop_ids(self, stop: str | Sequence[str | int]) -> list[int]:
        return [self._stop_id(each) for each in ([stop] if isinstance(stop, str) else stop)]

    def _stop_id(self, stop: str | int) -> int:
        if not isinstance(stop, str):
            return int(stop)
        return self._tokenizer("a stop").stop_id(stop)

    def _tokenizer(self, what: str) -> Text:
        if self._text is None:
            raise ConfigError(f"{what} is text, and there is no tokenizer to encode it; give token ids")
        return self._text

    def _said(self, ids: Ids) -> str:
        return self._text.decode(Ragged.of([ids]))[0] if self._text is not None else ""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A user's agent, called once a row: ``await function(turns, **columns)``. ``needs``: those columns; by default its
    parameters after the first. ``gives``: columns that it returns, a dict of one value each (or the value, of one).
    ``timeout_s``: how long a conversation may take, pauses for new weights included. Raises ConfigError for what is none."""

    function: Callable[..., Awaitable[Any]]
    needs: tuple[str, ...] | None = None
    gives: tuple[str, ...] = ()
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not callable(self.function) or not is_coroutine(self.function):
            raise ConfigError(f"an agent is a coroutine function: async def agent(turns, ...); {self.name} is none")
        check_fields(self)
        check_above(0, agent_timeout_s=self.timeout_s)
        if self.needs is None:
            object.__setattr__(self, "needs", parameters_of(self.function)[1:])

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__qualname__", repr(self.function)))

    def check_importable(self) -> None:
        """Raise ConfigError if a worker cannot import the function."""
        if import_path(self.function) is None:
            raise ConfigError(f"agent {self.name} cannot be imported by its worker: {_why(self.function)}")

    async def converse(self, turns: Turns, columns: Mapping[str, Any]) -> Answer:
        """What one row comes to. Raises AgentFailed with what the agent did wrong, EngineError for what the engine did."""
        task = asyncio.ensure_future(self._called(turns, columns))
        try:
            await asyncio.wait([task], timeout=self.timeout_s)
            ended = task.done()
        finally:
            turns.close()
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=END_S)  # one that will not end is left to itself
        if not ended:
            raise AgentFailed(f"agent {self.name}() did not end in {self.timeout_s:g} s")
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if turns.failure is not None:
            raise turns.failure
        if error is not None:
            raise AgentFailed(
                user_error_text(f"agent {self.name}() raised {plain_text(error_text(error), 1000)}", error)
            )
        try:
            return turns.answer(self._checked(task.result()))
        except AgentFailed as failed:
            raise AgentFailed(f"agent {self.name}(): {failed}") from None

    async def _called(self, turns: Turns, columns: Mapping[str, Any]) -> Any:
        return await self.function(turns, **columns)

    def _checked(self, returned: Any) -> dict[str, Any]:
        columns = (
            dict(returned)
            if isinstance(returned, Mapping)
            else {self.gives[0]: returned}
            if len(self.gives) == 1
            else {}
        )
        if set(columns) != set(self.gives):
            raise AgentFailed(f"it returned columns {sorted(columns)}, and gives {sorted(self.gives)}")
        for name, value in columns.items():
            if name == "reward":
                if (
                    np.ndim(value)
                    or not isinstance(value, (int, float, np.number, np.bool_))
                    or not math.isfinite(value)
                ):
                    raise AgentFailed(f"it returned the reward {value!r}; that is one finite number")
                columns[name] = np.float32(value)
            try:
                pack(name, [value])
            except SchemaError as error:
                raise AgentFailed(f"it returned no value of a column: {error}") from None
        return columns


def _flat(parts: Sequence[Any], dtype: Any) -> Any:
    return np.concatenate([np.empty(0, dtype), *parts])


def _why(function: Callable[..., Any]) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if "<" in name:
        return "it is defined within another function; put it at the top of a module"
    if module == "__main__":
        return (
            "it is in the script that was started, which no other process can import; put it into a module of its own"
        )
    if inspect.ismethod(function) or not name:
        return "it is bound to an object, which does not travel; name a function of a module"
    return f"module {module!r} does not have it under the name {name!r}, or cannot be found from there"
