"""EngineColumns: the further columns of an engine's responses, checked, cut and joined like log-probs.

columns = EngineColumns("MyEngine", {"entropy": ColumnSpec("ragged", "float32")})
completion = columns.checked(completion)          # arrays of the declared dtypes
columns.cut(completion, end)                      # its first ``end`` tokens
columns.join([part, rest])                        # one response
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import ConfigError, EngineError, SchemaError
from ...interfaces import SAMPLING_MASK, Completion, Completions, RolloutEngine
from ...interfaces.rollout import COUNTS
from ...types import ColumnSpec, Ragged, Sampling, VersionSpan, check_column_name
from ...types.dtypes import carrier


def gives_of(engine: RolloutEngine, sampling: Sampling) -> dict[str, ColumnSpec]:
    """Return the further columns of an engine's responses under a sampling."""
    return {**engine.gives, **(SAMPLING_MASK if sampling.sampling_mask else {})}


class EngineColumns:
    """``engine``: the name used in error messages. ``gives``: see ``RolloutEngine.gives``. Raises ConfigError
    for a column that no engine can give."""

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
                raise ConfigError(
                    f"{engine} gives column {name!r} as {spec}; counts are ragged integers, one a token"
                )

    def checked(self, got: Completion) -> Completion:
        """Return a response with its columns as arrays. Raises EngineError for other columns than the declared
        ones, for dtypes that do not fit, and for lengths other than the tokens' or their counts'."""
        if not self.specs and not got.columns:
            return got
        row = f"for response {got.index}"
        if odd := got.columns.keys() ^ self.specs.keys():
            raise EngineError(
                f"{self._engine} gave columns {sorted(got.columns)} {row}, and declares {sorted(self.specs)} in gives:"
                f" {', '.join(map(repr, sorted(odd)))} is in one of them only"
            )
        columns = {name: self._array(name, value, row) for name, value in got.columns.items()}
        for name, spec in self.specs.items():
            length, why = self._length(columns, name, len(got.token_ids))
            shape, has = (length, *spec.shape) if spec.kind == "ragged" else spec.shape, columns[name].shape
            if has != shape:
                raise EngineError(
                    f"{self._engine} gave column {name!r} of shape {list(has)} {row}, not {list(shape)}: {why}"
                )
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
            raise EngineError(
                f"{self._engine} gave column {name!r} as {has} {row}, and declares {spec.dtype}"
            ) from None
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
