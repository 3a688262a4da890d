"""RolloutLab: a rollout engine under check, and the version loaded into it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence, Set
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ....errors import EngineError
from ....interfaces import Completion, Completions, Request, RolloutEngine, WeightUpdate
from ....types import Ragged, Sampling, VersionSpan
from ....workflow.loops.engine_gateway import EngineColumns, gives_of
from ..check import CheckFailed, DoesNotApply, expect
from ..diagnosis import CACHE, CACHE_HINT, Diagnosis, diagnose_form, diagnose_logprobs, diagnose_tokens
from ..lab import Lab, LoopThread
from ..policy import Logprobs, Policy
from ..precision import SHARE, follows, too_far
from ..updates import HeldUpdate

LIMIT_S, MAKING_S = 60.0, 600.0
_CALLS = 4
"""The limit of a plain function between two waits for the engine, as a multiple of ``limit_s``."""
_SHOWN = 12
Ids = npt.NDArray[np.int32]
T = TypeVar("T")


class RolloutLab(Lab):
    """Makes the engine, keeps it for later checks, and tracks its version. Closed by ``close``.

    ``make``: the factory, called with ``model=`` the policy's folder and ``options``. ``tolerance``: the largest
    distance of a log-prob from the policy's. ``version``: the loaded version; after a failed load the one before.
    ``doing``: the progress of a check, for the message of a timeout: "waiting for ...".
    """

    def __init__(
        self,
        make: Callable[..., Any],
        policy: Policy,
        options: Mapping[str, Any],
        *,
        tolerance: float = 1e-4,
        limit_s: float = LIMIT_S,
    ) -> None:
        super().__init__(make, options, limit_s)
        self.policy, self.tolerance = policy, tolerance
        self.version = 0
        self.making_s = 0.0
        self.doing = ""
        self._engine: RolloutEngine | None = None
        self._closed = False
        self._loop: LoopThread | None = None

    # ---- for the runner

    def ask(self, body: Callable[[RolloutLab], Any], what: str) -> str | None:
        """Run a check. A coroutine function runs on the engine's loop, with an engine; others make their own."""
        self.doing = ""
        if not inspect.iscoroutinefunction(inspect.unwrap(body)):
            self.waits(MAKING_S + _CALLS * self.limit_s)
            return body(self)  # type: ignore[no-any-return]
        if self._engine is None:
            self.start()
        return self.call(self._body(body), what)

    async def _body(self, body: Callable[[RolloutLab], Any]) -> str | None:
        return await body(self)  # type: ignore[no-any-return]

    def call(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Run a coroutine on the engine's loop; for plain functions as checks."""
        assert self._loop is not None
        self.waits(self.limit_s)
        return self._loop.call(work, self.limit_s, lambda: f"{what}{self.doing and f' ({self.doing})'}")

    def start(self) -> None:
        """Make the engine, on its loop. Raises the factory's error."""
        self._loop = LoopThread()
        limit_s, began = max(self.limit_s, MAKING_S), time.monotonic()
        self.waits(limit_s)
        engine = self._loop.call(self._made(), limit_s, "making the engine")
        known = isinstance(engine, RolloutEngine)
        expect(known, f"the factory made {engine!r}, which is no asyncflow_sdk.RolloutEngine")
        self._engine, self.version, self._closed, self.ever_made = engine, 0, False, True
        self.making_s = time.monotonic() - began

    async def _made(self) -> Any:
        return self.make(model=self.policy.folder, **self.options)

    def close(self) -> None:
        """Close the engine and its loop. Raises the error of the engine's close. A blocked loop is left behind."""
        engine, self._engine = self._engine, None
        loop, self._loop = self._loop, None
        try:
            if engine is not None and loop is not None and not self._closed and not loop.stuck:
                self.waits(self.limit_s)
                loop.call(engine.close(), self.limit_s, "close()")
        finally:
            if loop is not None:
                loop.close()

    # ---- for checks

    async def close_engine(self) -> None:
        """Close the engine but not its loop, for requests still ending there. Call ``close`` and ``start`` next."""
        self._closed = True
        await self.engine.close()

    @property
    def made(self) -> bool:
        """True if there is an engine."""
        return self._engine is not None

    def had(self) -> RolloutLab:
        """Return self, with an engine; for plain functions as checks."""
        if not self.made:
            self.start()
        return self

    @property
    def engine(self) -> RolloutEngine:
        """The engine."""
        assert self._engine is not None
        return self._engine

    @property
    def rows(self) -> int:
        """The most concurrent responses of a check."""
        return min(self.engine.capabilities.max_rows, 16)

    @property
    def context(self) -> int:
        """The most tokens of prompt and response."""
        return min(self.policy.context, self.engine.capabilities.context or self.policy.context)

    def request(
        self, prompt: Ids, n: int = 1, *, temperature: float = 0.0, max_tokens: int = 8, **more: Any
    ) -> Request:
        """Return a request, greedy by default. ``more``: fields of it, and further ones of its sampling."""
        seed = more.pop("seed", None)
        drawing = {name: more.pop(name) for name in list(more) if name in Sampling.__dataclass_fields__}
        sampling = Sampling(temperature=temperature, max_tokens=max_tokens, **drawing)
        return Request(np.asarray(prompt, np.int32), sampling, n, seed, decode=self._text, **more)

    def _text(self, ids: Sequence[int]) -> str:
        return self.policy.text(np.asarray(ids, np.int32)) or ""

    async def answer(self, request: Request, *, aborted: bool = False) -> list[Completion]:
        """Return all responses by index, with verified form. ``aborted``: permit aborted ones."""
        got: dict[int, Completion] = {}
        try:
            async with contextlib.aclosing(self.engine.generate(request)) as completions:  # type: ignore[type-var]
                async for completed in completions:
                    for completion in _each(completed):
                        check_form(self, request, completion, aborted=aborted)
                        expect(completion.index not in got, f"response {completion.index} of {request.n} came twice")
                        got[completion.index] = completion
        except (EngineError, CheckFailed):
            raise
        except Exception as error:
            said = f"generate() raised {type(error).__name__} ({error}), not EngineError: the worker ends for it."
            hint = "Where the engine cannot answer a request, write `raise EngineError(str(error)) from error`, and no assert"
            raise CheckFailed(f"{said} {hint}") from error
        missing = sorted(set(range(request.n)) - set(got))
        expect(not missing, f"of n={request.n} responses, {missing} never came")
        return [got[index] for index in range(request.n)]

    async def timed(self, requests: Sequence[Request]) -> float:
        """Return the seconds of concurrent requests: a time to act meanwhile, no measure of an engine."""
        began = time.monotonic()
        await self.answers(requests)
        return time.monotonic() - began

    async def answers(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Run requests concurrently within the engine's capacity, the rest afterwards."""
        got: list[list[Completion]] = []
        while len(got) < len(requests):
            left = requests[len(got) :]
            ends = itertools.accumulate(request.n for request in left)
            count = max(sum(end <= self.engine.capabilities.max_rows for end in ends), 1)
            got += await asyncio.gather(*(self.answer(request) for request in left[:count]))
        return got

    async def draw(self, prompt: Ids, count: int, *, seed: int, **more: Any) -> list[list[Completion]]:
        """Return ``count`` responses of one token or more, in groups with seeds from ``seed`` on."""
        seeds = range(seed, seed - (-count // self.rows))
        return [await self.answer(self.request(prompt, self.rows, max_tokens=1, seed=each, **more)) for each in seeds]

    def next_logprobs(self, prompt: Ids, temperature: float = 1.0) -> Logprobs:
        """Return the log-prob of each possible next token. Raises DoesNotApply if answers are not drawn."""
        found = self.policy.next_logprobs(self.version, prompt, temperature)
        if found is None:
            raise DoesNotApply("this policy's answers are not drawn")
        return found

    async def update(self, version: int | None = None) -> int:
        """Load a version, by default a new one. Return its number."""
        version = self.version + 1 if version is None else version
        update = self.make_update(version)
        taken, names = await self.load(update), set(update.tensors)
        expect(taken == names, f"load_weights returned {_names(taken)}; the version has {_names(names)}")
        return version

    def make_update(self, version: int, tensors: Mapping[str, Any] | None = None, **options: Any) -> HeldUpdate:
        """Return an update of a version, by default with its own tensors."""
        return HeldUpdate(version, tensors or self.policy.tensors(version), self.engine.weight_name, **options)

    async def load(self, update: WeightUpdate) -> Set[str]:
        """Load and release an update, and set ``version``. Raises the engine's error."""
        try:
            taken = await self.engine.load_weights(update)
        finally:
            update.release()
        self.version = update.version
        return set(taken)

    async def check_greedy(self, prompts: Sequence[Ids], *, when: str = "", cause: str = "") -> None:
        """Compare greedy responses to concurrent requests, and their log-probs, with the policy's.
        ``cause``: the one suspected by the check."""
        answers = await self.answers([self.request(prompt) for prompt in prompts])
        for prompt, (got,) in zip(prompts, answers, strict=True):
            wanted = self.policy.greedy(self.version, prompt, 8)
            self.check_response(prompt, got, wanted, when=when, cause=cause)

    async def blame_cache(self, failed: CheckFailed) -> CheckFailed:
        """Blame a cache if prompts never used before are answered correctly; else return the failure as it is."""
        try:
            await self.check_greedy(self.policy.prompts(2, seed=1009))
        except Exception:
            return failed
        return CheckFailed(f"{failed}; prompts that were not asked before are answered right", CACHE, CACHE_HINT)

    def check_response(self, prompt: Ids, got: Completion, wanted: Ids, *, when: str = "", cause: str = "") -> None:
        """Compare tokens with the wanted or equally likely ones, and log-probs with the policy's."""
        ids = np.asarray(got.token_ids)
        alike = min(len(ids), len(wanted))
        at = int(np.argmin(np.append(ids[:alike] == wanted[:alike], False)))
        rounded = at < alike and self.is_greedy(prompt, ids)  # where two are as likely, and then on from there
        if not np.array_equal(ids, wanted) and not rounded:
            found = diagnose_tokens(self.policy, self.version, prompt, ids)
            raise CheckFailed(
                f"greedy tokens{when} are {_some(ids, at)}, and version {self.version} gives {_some(wanted, at)} from"
                f" token {at} on, for the prompt {_some(prompt, 0)}{found.text}",
                found.or_else(cause),
                found.hint,
            )
        self.check_logprobs(prompt, got, when=when, cause=cause)

    def is_greedy(self, prompt: Ids, ids: Ids, version: int | None = None) -> bool:
        """Return True if each token is the most likely one after its predecessors, within the tolerance."""
        return follows(self.policy, self.version if version is None else version, prompt, ids, self.tolerance)

    def check_logprobs(
        self, prompt: Ids, got: Completion, *, temperature: float = 1.0, when: str = "", cause: str = ""
    ) -> None:
        """Compare the log-probs of a response with the policy's for the loaded version."""
        ids, have = np.asarray(got.token_ids, np.int32), np.asarray(got.logprobs, np.float64)
        wanted = self.policy.logprobs(self.version, prompt, ids, temperature)
        if far := too_far(np.abs(have - wanted), self.tolerance):
            at = int(np.abs(have - wanted).argmax())
            found = diagnose_logprobs(self.policy, self.version, prompt, ids, have, temperature, self.tolerance)
            raise CheckFailed(
                f"log-probs{when} are {far} from those of version {self.version} at temperature {temperature:g} (token"
                f" {at}: {have[at]:.6g}, not {wanted[at]:.6g}; {self.tolerance:g} is allowed,"
                f" {self.tolerance / SHARE:g} on average){found.text}",
                found.or_else(cause),
                found.hint,
            )

    def off(self, prompt: Ids, got: Completion, span: VersionSpan) -> str:
        """Describe the distance of a span's log-probs from those of its version; "" within the tolerance."""
        before, ids, have = _of_span(prompt, got, span)
        return too_far(np.abs(have - self.policy.logprobs(span.version, before, ids)), self.tolerance)

    def why(self, prompt: Ids, got: Completion, span: VersionSpan) -> Diagnosis:
        """Explain log-probs of a span other than those of its version, at temperature 1."""
        before, ids, have = _of_span(prompt, got, span)
        return diagnose_logprobs(self.policy, span.version, before, ids, have, 1.0, self.tolerance)


def _of_span(prompt: Ids, got: Completion, span: VersionSpan) -> tuple[Ids, Ids, Logprobs]:
    ids, start, end = np.asarray(got.token_ids, np.int32), span.start, span.end
    return np.concatenate([prompt, ids[:start]]), ids[start:end], np.asarray(got.logprobs, np.float64)[start:end]


def _each(completed: Any) -> Iterable[Any]:
    if not isinstance(completed, Completions):
        return (completed,)
    index, ids, logprobs = completed.index, completed.token_ids, completed.logprobs
    right = isinstance(index, np.ndarray) and index.ndim == 1 and index.dtype.kind in "iu"
    right = right and isinstance(ids, Ragged) and isinstance(logprobs, Ragged)
    expect(
        right and len(index) == len(ids) == len(logprobs) == len(completed.finish_reason),
        f"generate yielded {completed!r}: that is not one index, one row of tokens, one of log-probs and one reason each",
    )
    return completed.each()


def first_tokens(groups: Sequence[Sequence[Completion]]) -> Ids:
    """Return the first token of each response: (groups, responses of a group)."""
    return np.array([[np.asarray(got.token_ids)[0] for got in group] for group in groups], np.int32)


def check_form(lab: RolloutLab, request: Request, got: Completion, *, aborted: bool = False) -> None:
    """Verify the form the queue needs, for any content."""
    expect(isinstance(got, Completion), f"generate yielded {got!r}, which is no asyncflow_sdk.Completion")
    said, most = f"response {got.index} of n={request.n}", request.sampling.max_tokens
    known = isinstance(got.index, int) and 0 <= got.index < request.n
    expect(known, f"{said}: its index is none of 0 to {request.n - 1}")
    ids, logprobs, reason = np.asarray(got.token_ids), np.asarray(got.logprobs), got.finish_reason
    whole = ids.ndim == 1 and (ids.dtype.kind in "iu" or not ids.size)
    expect(whole, f"{said}: token_ids are {ids.dtype}{list(ids.shape)}, not one row of integers")
    expect(logprobs.shape == ids.shape, f"{said}: {ids.size} tokens have log-probs of shape {list(logprobs.shape)}")
    expect(ids.size <= most, f"{said}: {ids.size} tokens, and max_tokens is {most}")
    reasons = ("stop", "length", *(["aborted"] if aborted else []))
    expect(reason in reasons, f"{said}: finish_reason is {reason!r}, not one of {', '.join(reasons)}")
    expect(ids.size or aborted, f"{said}: it has no tokens, and none was asked to end early")
    outside = ids[(ids < 0) | (ids >= lab.policy.vocabulary)] if ids.size else ids
    strange = f"{said}: token {outside[:1].tolist()} is not in the vocabulary of {lab.policy.vocabulary}"
    expect(not outside.size, strange)
    wrong = logprobs[~(logprobs <= 1e-4)] if logprobs.size else logprobs
    if wrong.size:
        found = diagnose_form(logprobs)
        text = f"{said}: a log-prob is {wrong[:1].tolist()}; they are natural logs of probabilities, 0 or less"
        raise CheckFailed(text, found.cause, found.hint)
    try:
        EngineColumns(type(lab.engine).__name__, gives_of(lab.engine, request.sampling)).checked(got)
    except EngineError as error:
        raise CheckFailed(str(error)) from None
    _check_spans(lab, said, got)
    _check_end(said, request, got, lab.policy.ends)


def _check_end(said: str, request: Request, got: Completion, model_ends: Sequence[int] | None) -> None:
    """Verify the finish reason, and the absence of tokens after a stop or end token."""
    ids, most, reason = np.asarray(got.token_ids), request.sampling.max_tokens, got.finish_reason
    ends = [*(model_ends or ()), *request.sampling.stop_ids]
    at = np.flatnonzero(np.isin(ids, ends))
    token, place = ids[at[:1]].tolist(), at[:1].tolist()
    over = f"{said}: it goes on after stop token {token}, its token {place}, to {len(ids)} tokens"
    expect(not len(at) or at[0] == len(ids) - 1, over)
    expect(
        reason == "stop" or not len(at),
        f"{said}: it ends at stop token {token}, as token {len(ids)} of {most}, and says {reason!r}, not stop: the"
        " token decides, also at max_tokens",
        "stops: a stop token at max_tokens is not told as stop",
    )
    expect(
        model_ends is None or reason != "stop" or len(at) or request.sampling.stop,
        f"{said}: it says that it ended at a stop token, and its last one is {ids[-1:].tolist()}; {ends} end"
        " a response, and belong to it",
    )
    full = reason != "length" or len(ids) == most
    expect(full, f"{said}: it says that it ended for its length, at {len(ids)} of {most} tokens")


def _check_spans(lab: RolloutLab, said: str, got: Completion) -> None:
    """Verify of engines with ``token_versions``: spans cover the tokens in order, without gaps."""
    if not lab.engine.capabilities.token_versions:
        expect(not got.spans, f"{said}: it has version spans, and the engine's capabilities say it has none")
        return
    at = 0
    for span in got.spans:
        expect(span.start == at < span.end, f"{said}: spans {list(got.spans)} do not follow each other from token 0")
        at = span.end
    expect(at == len(got.token_ids), f"{said}: spans cover {at} of {len(got.token_ids)} tokens")


def _some(ids: Ids, start: int) -> str:
    shown = ", ".join(map(str, ids[start : start + _SHOWN].tolist()))
    return f"[{shown}{', ...' if len(ids) > start + _SHOWN else ''}]"


def _names(names: Set[str]) -> str:
    shown = ", ".join(sorted(map(str, names))[:4])
    return f"{len(names)} names ({shown}{', ...' if len(names) > 4 else ''})"
