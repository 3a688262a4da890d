"""Numbers of response tokens, packed row after row, for an algorithm's loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncflow_sdk.errors import EngineError, SchemaError
from asyncflow_sdk.interfaces import TRAIN_COLUMNS, Algorithm
from asyncflow_sdk.types import Batch, Ragged

from .collate import any_in_row


@dataclass(frozen=True)
class PerToken:
    """One number per token; the rows have ``lengths`` tokens. ``values``: of each token, packed, or
    with ``by_row`` one for all tokens of a row."""

    values: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    by_row: bool

    @classmethod
    def of(cls, column: Ragged) -> PerToken:
        """Return the values of a ragged column."""
        return cls(column.values, column.lengths, by_row=False)

    @property
    def nonzero(self) -> npt.NDArray[np.bool_]:
        """True for rows with a token of another value than 0: bool (rows,)."""
        return self.values != 0 if self.by_row else any_in_row(self.values != 0, self._ragged)

    def take(self, rows: npt.NDArray[np.int64]) -> PerToken:
        """Return these rows."""
        values = self.values[rows] if self.by_row else self._ragged.take(rows).values
        return PerToken(values, self.lengths[rows], self.by_row)

    def of_rows(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return the values of the tokens of these rows, packed."""
        part = self.take(rows)
        return np.repeat(part.values, part.lengths) if self.by_row else part.values

    def masked(self, mask: Ragged | None) -> PerToken:
        """Return the tokens of the mask; all for None."""
        if mask is None:
            return self
        chosen = mask.values.astype(np.bool_)
        lengths = np.diff(np.concatenate([[0], np.cumsum(chosen)])[mask.offsets])
        return PerToken(self.values if self.by_row else self.values[chosen], lengths, self.by_row)

    @property
    def _ragged(self) -> Ragged:
        return Ragged.from_lengths(self.values, self.lengths)


def checked_advantages(given: Any, batch: Batch, algorithm: Algorithm) -> tuple[PerToken, dict[str, PerToken]]:
    """Return an algorithm's advantages, and its further numbers by name. Raises EngineError, with
    the algorithm's name, for invalid ones."""
    name = f"{type(algorithm).__name__}.advantages"
    each = dict(given) if isinstance(given, Mapping) else {"advantages": given}
    if "advantages" not in each:
        raise EngineError(f"{name} gave {', '.join(each) or 'nothing'}, and no advantages")
    found = {
        key: _checked(values, batch, name if key == "advantages" else f"{name}: {key}")
        for key, values in each.items()
    }
    return found.pop("advantages"), found


def _checked(given: Any, batch: Batch, name: str) -> PerToken:
    lengths = batch.ragged("response_ids").lengths
    if isinstance(given, Ragged):
        if not np.array_equal(given.lengths, lengths):
            raise EngineError(f"{name} gave other lengths than the responses'")
        found = PerToken(np.asarray(given.values), lengths, by_row=False)
    else:
        values = np.asarray(given)
        if values.shape != (batch.rows,):
            raise EngineError(f"{name} gave an array {values.shape} for {batch.rows} rows")
        found = PerToken(values, lengths, by_row=True)
    if not np.isfinite(found.values.astype(np.float32)).all():
        raise EngineError(f"{name} gave numbers that are not finite; the weights are as before")
    return found


def extra_columns(needs: Iterable[str], batch: Batch) -> dict[str, PerToken]:
    """Return the columns of ``needs`` for the loss, none with text. Raises SchemaError for missing ones, and for
    columns without one number per row or response token."""
    lengths = batch.ragged("response_ids").lengths
    found = {}
    for name in needs:
        if name in TRAIN_COLUMNS or (name in batch and batch.spec(name).kind == "text"):
            continue  # of the advantages only
        if name not in batch.columns:
            raise SchemaError(
                f"the algorithm needs column {name!r}, which the batch lacks; say needs=[{name!r}] of the"
                " trainer's task"
            )
        column = batch[name]
        if isinstance(column, Ragged) and np.array_equal(column.lengths, lengths):
            found[name] = PerToken.of(column)
        elif isinstance(column, np.ndarray) and column.ndim == 1:
            found[name] = PerToken(column, lengths, by_row=True)
        else:
            raise SchemaError(
                f"column {name!r} is {batch.spec(name)}; an algorithm is given columns with a number a row or a"
                " response token"
            )
    return found
