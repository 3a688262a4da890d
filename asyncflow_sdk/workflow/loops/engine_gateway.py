"""EngineGateway: the requests inside one rollout engine, across loads of new weights. EngineColumns: the further
columns of its responses, checked, cut and joined like log-probs.

async with contextlib.aclosing(gateway.generate(request)) as responses:
    async for generated in responses: ...               # each response once, as it finishes
async with gateway.stopped(interrupt=True):             # no request is in the engine
    await load(...)                                     # interrupted responses continue afterwards
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, DeadlineExceeded, EngineError, SchemaError
from ...interfaces import SAMPLING_MASK, Completion, Completions, Request, RolloutEngine
from ...interfaces.rollout import COUNTS
from ...queue.coroutines import wait_for_event
from ...types import ColumnSpec, Ragged, Sampling, VersionSpan, check_column_name
from ...types.dtypes import carrier
from .tokenizer import Tokenizer

RESPONSE_S = 3600.0  # the longest time a response may take (seconds)


def gives_of(engine: RolloutEngine, sampling: Sampling) -> dict[str, ColumnSpec]:
    """Return the further columns of an engine's responses under a sampling."""
    return {**engine.gives, **(SAMPLING_MASK if sampling.sampling_mask else {})}


class EngineColumns:
    """The further columns of an engine's responses. ``engine``: the name used in error messages. ``gives``: see
    ``RolloutEngine.gives``. Raises ConfigError for a column that no engine can give.

    columns = EngineColumns("MyEngine", {"entropy": ColumnSpec("ragged", "float32")})
    completion = columns.checked(completion)          # arrays of the declared dtypes
    columns.cut(completion, end)                      # its first ``end`` tokens
    columns.join([part, rest])                        # one response
    """

    def __init__(self, engine: str, gives: Mapping[str, ColumnSpec]) -> None:
        self.specs, self._engine = dict(sorted(gives.items(), key=lambda each: each[0] + COUNTS in gives)), engine
        self._dtypes = {name: carrier(spec.dtype) for name, spec in gives.items()}
        self._ragged = [name for name, spec in gives.items() if spec.kind == "ragged"]
        self._counts = {name: name + COUNTS for name in self._ragged if name + COUNTS in gives}
        for name, spec in gives.items():
            counts = name in self._counts.values()
            try:
                check_column_name(name)
            except SchemaError as error:
                raise ConfigError(f"{engine} gives: {error}") from None
            if spec.kind not in ("fixed", "ragged"):
                raise ConfigError(f"{engine} gives column {name!r} of kind {spec.kind}; it is fixed or ragged")
            if counts and (
                name in self._counts or spec.kind != "ragged" or spec.shape or self._dtypes[name].kind not in "iu"
            ):
                text = f"{engine} gives column {name!r} as {spec}; counts are ragged integers, one a token"
                raise ConfigError(text)

    def checked(self, got: Completion) -> Completion:
        """Return a response with its columns as arrays. Raises EngineError for other columns than the declared
        ones, for dtypes that do not fit, and for lengths other than the tokens' or their counts'."""
        if not self.specs and not got.columns:
            return got
        row = f"for response {got.index}"
        if odd := got.columns.keys() ^ self.specs.keys():
            names = f"columns {sorted(got.columns)} {row}, and declares {sorted(self.specs)} in gives"
            text = f"{names}: {', '.join(map(repr, sorted(odd)))} is in one of them only"
            raise EngineError(f"{self._engine} gave {text}")
        columns = {name: self._array(name, value, row) for name, value in got.columns.items()}
        for name, spec in self.specs.items():
            length, why = self._length(columns, name, len(got.token_ids))
            shape, has = (length, *spec.shape) if spec.kind == "ragged" else spec.shape, columns[name].shape
            if has != shape:
                text = f"{self._engine} gave column {name!r} of shape {list(has)} {row}, not {list(shape)}: {why}"
                raise EngineError(text)
            if name in self._counts.values() and (columns[name] < 0).any():
                raise EngineError(f"{self._engine} gave column {name!r} with counts below 0 {row}")
        return replace(got, columns=columns)

    def are_sound(self, got: Completions) -> bool:
        """True if the columns of packed responses need no change, and have the right lengths."""
        if got.columns.keys() != self.specs.keys():
            return False
        for name, spec in self.specs.items():
            column, counts = got.columns[name], self._counts.get(name)
            values = column.values if isinstance(column, Ragged) else column
            if not isinstance(values, np.ndarray) or not values.ndim or values.dtype != self._dtypes[name]:
                return False
            if isinstance(column, Ragged) != (spec.kind == "ragged"):
                return False
            if name in self._counts.values() and (values < 0).any():
                return False
            lengths = got.token_ids.lengths
            if counts is not None:
                ends = np.concatenate([[0], np.cumsum(got.columns[counts].values, dtype=np.int64)])
                lengths = np.diff(ends[got.token_ids.offsets])
            if isinstance(column, Ragged) and not np.array_equal(column.lengths, lengths):
                return False
            if values.shape[1:] != spec.shape or (spec.kind == "fixed" and len(values) != len(got.index)):
                return False
        return True

    def cut(self, got: Completion, end: int) -> Completion:
        """Return the first ``end`` tokens of a response."""
        spans = [VersionSpan(version, start, min(stop, end)) for version, start, stop in got.spans if start < end]
        columns = dict(got.columns)
        for name in self._ragged:
            columns[name] = columns[name][: self._length(got.columns, name, end)[0]]
        return Completion(got.index, got.token_ids[:end], got.logprobs[:end], "stop", spans, columns)

    def join(self, parts: Sequence[Completion]) -> Completion:
        """Return the whole of consecutive parts with version spans. Parts without columns are observed."""
        columns = {
            name: np.concatenate([each.columns[name] for each in map(self._with_blanks, parts)])
            for name in self._ragged
        }
        for name in self.specs.keys() - columns.keys():
            columns[name] = next(each.columns[name] for each in reversed(parts) if each.columns)
        return Completion(
            parts[0].index,
            np.concatenate([np.asarray(each.token_ids, np.int32) for each in parts]),
            np.concatenate([np.asarray(each.logprobs, np.float32) for each in parts]),
            parts[-1].finish_reason,
            joined_spans([each.spans for each in parts]),
            columns,
        )

    def _with_blanks(self, part: Completion) -> Completion:
        """Return a part with zeros for the tokens of an observed one."""
        if part.columns:
            return part
        lengths = {name: 0 if name in self._counts else len(part.token_ids) for name in self._ragged}
        blanks = {name: np.zeros((n, *self.specs[name].shape), self._dtypes[name]) for name, n in lengths.items()}
        return replace(part, columns=blanks)

    def _array(self, name: str, value: Any, row: str) -> np.ndarray[Any, Any]:
        dtype, spec, array = self._dtypes[name], self.specs[name], None
        try:
            array = np.asarray(value)
            if array.ndim and not len(array):  # an empty list has no dtype
                return np.empty((0, *spec.shape), dtype)
            whole = array.dtype.kind in "iub" and dtype.kind in "iub"
            with np.errstate(over="ignore", invalid="ignore"):
                found = array.astype(dtype, casting="unsafe" if whole else "same_kind", copy=False)
            if whole and found.dtype != array.dtype:
                fits = np.array_equal(found, array)
            else:
                fits = found is array or np.array_equal(np.isfinite(found), np.isfinite(array))
        except Exception as error:  # whatever the engine gave
            has = f"{type(value).__name__} ({error})" if array is None else str(array.dtype)
            text = f"{self._engine} gave column {name!r} as {has} {row}, and declares {spec.dtype}"
            raise EngineError(text) from None
        if not fits or np.ma.is_masked(value):
            raise EngineError(f"{self._engine} gave column {name!r} {row} with values that {spec.dtype} cannot hold")
        return found

    def _length(self, columns: Mapping[str, Any], name: str, tokens: int) -> tuple[int, str]:
        """Return the number of values of the first ``tokens`` tokens, and the reason for it."""
        counts = self._counts.get(name)
        if counts is None:
            return tokens, f"the response has {tokens} tokens"
        return int(columns[counts][:tokens].sum()), f"the sum of its column {counts!r}"


def joined_spans(parts: Sequence[Sequence[VersionSpan]]) -> tuple[VersionSpan, ...]:
    """Concatenate the spans of consecutive parts; each part's spans begin at 0."""
    whole: list[VersionSpan] = []
    for part in parts:
        behind = whole[-1].end if whole else 0
        for version, start, end in part:
            if whole and whole[-1].version == version:
                start = whole.pop().start - behind
            whole.append(VersionSpan(version, start + behind, end + behind))
    return tuple(whole)


class Generated(NamedTuple):
    """One response or several. ``version``: of tokens without spans. ``mask``: bool (length,), False for observed
    tokens; None if all were generated. ``columns``: further ones, of an agent."""

    completion: Completion | Completions
    version: int
    mask: npt.NDArray[np.bool_] | None = None
    columns: Mapping[str, Any] = {}

    @property
    def indices(self) -> list[int]:
        """Indices of the responses in their request."""
        index: list[int] = np.atleast_1d(self.completion.index).tolist()
        return index

    @property
    def tokens(self) -> int:
        """The number of their tokens."""
        ids = self.completion.token_ids
        return len(ids.values if isinstance(ids, Ragged) else ids)


class EngineGateway:
    """Passes requests to one engine, on one event loop. ``loaded``: the engine's version, None
    before its first. ``newest``: the newest version given to the engine, loaded or not. Sets
    ``wake`` whenever the engine becomes idle. ``tokenizer``: finds stop texts. ``sampling``: the sampling of
    all requests, for the columns of their responses."""

    def __init__(
        self,
        engine: RolloutEngine,
        loaded: int | None,
        wake: asyncio.Event,
        tokenizer: Tokenizer | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        self.loaded, self.newest, self._tokenizer = loaded, loaded or 0, tokenizer
        self._engine, self._name, self._wake = engine, type(engine).__name__, wake
        self.columns = EngineColumns(self._name, gives_of(engine, sampling or Sampling()))
        self._requests = 0
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()

    @property
    def idle(self) -> bool:
        """True if no request is in the engine."""
        return not self._requests

    def take(self, version: int) -> None:
        """Begin later requests under ``version``, which the engine has loaded."""
        self.loaded = self.newest = version

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Start no request inside this block; they wait for its end."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    @contextlib.asynccontextmanager
    async def stopped(self, *, interrupt: bool) -> AsyncIterator[None]:
        """Keep the engine without requests inside this block. Running ones finish before; with
        ``interrupt`` they continue after the block. Raises DeadlineExceeded for a busy engine."""
        with self.held():
            self._empty.clear()
            if self._requests:
                if interrupt:
                    await self._engine.interrupt()
                await wait_for_event(self._empty, RESPONSE_S)
            if self._requests:
                raise DeadlineExceeded(f"{self._requests} requests have not ended in {RESPONSE_S:g} s")
            yield

    async def generate(self, request: Request) -> AsyncGenerator[Generated, None]:
        """Yield every response of ``request`` once, as it finishes. Close the generator.

        A response ends with the token that completes a stop text, also if the engine went on. Raises
        EngineError, possibly after some responses, for a rejected request or a broken contract.
        """
        if self._tokenizer is not None:
            request = replace(request, decode=self._tokenizer.text_of)
        stops = request.stops
        if stops is None or not self._engine.capabilities.stop_texts:
            request = replace(request, sampling=replace(request.sampling, stop=()))
        async with contextlib.aclosing(self._generate(request)) as responses:
            async for generated in responses:
                if stops is None:
                    yield generated
                    continue
                for completion in generated.completion.each():
                    end = stops.end(np.asarray(completion.token_ids).tolist())
                    yield Generated(
                        completion if end is None else self.columns.cut(completion, end), generated.version
                    )

    async def _generate(self, request: Request) -> AsyncGenerator[Generated, None]:
        while not self._open.is_set():  # it may close again before this task runs
            await self._open.wait()
        assert self.loaded is not None
        version, waiting = self.loaded, set(range(request.n))
        interrupted: list[Completion] = []
        self._requests += 1
        try:
            async with contextlib.aclosing(self._engine.generate(request)) as completions:  # type: ignore[type-var]
                async for completed in completions:
                    if isinstance(completed, Completions) and self._is_sound(completed, version, waiting):
                        waiting.difference_update(completed.index.tolist())
                        yield Generated(completed, version)
                        continue
                    for completion in self._each(completed):
                        self._check(completion, request, version, waiting)
                        completion = self.columns.checked(completion)
                        waiting.discard(completion.index)
                        if completion.finish_reason == "aborted":
                            interrupted.append(completion)
                        else:
                            yield Generated(completion, version)
        finally:
            self._requests -= 1
            if not self._requests:
                self._empty.set()
                self._wake.set()
        if waiting:
            raise EngineError(f"the engine ended a request with {len(waiting)} of {request.n} responses missing")
        rests = [asyncio.ensure_future(self._continue(request, part, version)) for part in interrupted]
        try:
            for rest in asyncio.as_completed(rests):
                yield await rest
        finally:
            for rest in rests:
                rest.cancel()
            await asyncio.gather(*rests, return_exceptions=True)

    async def _continue(self, request: Request, part: Completion, version: int) -> Generated:
        part, length, sampling = with_spans(part, version), len(part.token_ids), request.sampling
        if length == sampling.max_tokens:
            return Generated(replace(part, finish_reason="length"), version)
        rest = replace(
            request,
            prompt_ids=np.concatenate([request.prompt_ids, np.asarray(part.token_ids, np.int32)]),
            sampling=replace(sampling, max_tokens=sampling.max_tokens - length),
            n=1,
            drawn=request.drawn + length,
            first=request.first + part.index,
        )
        async with contextlib.aclosing(self._generate(rest)) as responses:
            ends = [with_spans(end, each.version) async for each in responses for end in each.completion.each()]
        return Generated(self.columns.join([part, ends[0]]), version)

    def _each(self, completed: Completion | Completions) -> Iterable[Completion]:
        """Return completions one by one. Raises EngineError for packed ones with different numbers of rows."""
        try:
            return list(completed.each())
        except (TypeError, AttributeError) as error:
            raise EngineError(f"{self._name} gave packed responses that cannot be taken apart: {error}") from None
        except ValueError:
            given = {**vars(completed), **completed.columns}
            names = ("index", "token_ids", "logprobs", "finish_reason", *completed.columns)
            rows = ", ".join(f"{len(given[name])} of {name}" for name in names)
            raise EngineError(f"{self._name} gave packed responses with different numbers of rows: {rows}") from None

    def _is_sound(self, completed: Completions, version: int, waiting: set[int]) -> bool:
        """True if packed responses are whole, expected, and of the loaded version."""
        index, offsets = set(completed.index.tolist()), completed.token_ids.offsets
        return (
            len(index) == len(completed.index) == len(completed.token_ids) == len(completed.finish_reason)
            and index <= waiting
            and completed.version in (None, version)
            and "aborted" not in completed.finish_reason
            and (completed.logprobs.offsets is offsets or np.array_equal(completed.logprobs.offsets, offsets))
            and bool((offsets[1:] > offsets[:-1]).all())
            and self.columns.are_sound(completed)
        )

    def _check(self, completion: Completion, request: Request, version: int, waiting: set[int]) -> None:
        """Raise EngineError for a response against the contract: another row might get it."""
        tokens = len(completion.token_ids)
        if completion.index not in waiting:
            raise EngineError(f"{self._name} gave response {completion.index} twice, or more than were asked for")
        aborted = completion.finish_reason == "aborted"
        if len(completion.logprobs) != tokens or not (tokens or aborted):
            raise EngineError(f"{self._name} gave {tokens} tokens with {len(completion.logprobs)} log-probs")
        if aborted and (tokens > request.sampling.max_tokens or self._open.is_set()):
            raise EngineError(f"{self._name} gave up response {completion.index} after {tokens} tokens, unasked")
        if completion.spans == ((version, 0, tokens),):
            return  # the usual case
        if self._engine.capabilities.token_versions:
            ends = [0, *(span.end for span in completion.spans)]
            if [span.start for span in completion.spans] != ends[:-1] or ends[-1] != tokens:
                raise EngineError(f"{self._name} gave version spans {list(completion.spans)} for {tokens} tokens")
            versions = [span.version for span in completion.spans]
            if versions != sorted(versions) or (
                versions and not version <= versions[0] <= versions[-1] <= self.newest
            ):
                raise EngineError(
                    f"{self._name} reported tokens of versions {versions}, in this order; version {version} was"
                    f" loaded when the request began, and {self.newest} is the newest now"
                )


def spans_of(completion: Completion, version: int) -> Sequence[VersionSpan]:
    """Return the version spans of a response; one of ``version`` if it has none."""
    if completion.spans or not len(completion.token_ids):
        return completion.spans
    return (VersionSpan(version, 0, len(completion.token_ids)),)


def with_spans(completion: Completion, version: int) -> Completion:
    """Return a response with the spans of ``spans_of``, as a part to be joined with others."""
    return replace(completion, spans=spans_of(completion, version))


def derived_seed(seed: int | None, number: int) -> int | None:
    """Return another seed for each ``number``; None without a seed."""
    return None if seed is None else hash((seed, number)) & 0x7FFFFFFF
