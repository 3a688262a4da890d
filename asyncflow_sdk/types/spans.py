"""Version spans: which version of the weights made which tokens of a response.

Stored as the ragged int64 column ``version_spans`` of shape (spans of the row, 3): version, start, end
(token positions in the response, end exclusive), in order and without gaps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from .ragged import Ragged

if TYPE_CHECKING:
    from .batch import Batch

VERSION_SPANS = "version_spans"
LOSS_MASK = "loss_mask"
"""Ragged bool column, one value a response token: False for those that the policy did not draw. Optional; without it
all were drawn."""


class VersionSpan(NamedTuple):
    """Tokens start to end of a response were sampled from ``version``."""

    version: int
    start: int
    end: int


def one_version(version: int | npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Ragged:
    """The spans column of rows that were each made by one version, the same or int64 (n,)."""
    n = len(lengths)
    spans = np.stack([np.full(n, version, np.int64), np.zeros(n, np.int64), lengths.astype(np.int64)], axis=1)
    return Ragged(spans, np.arange(n + 1, dtype=np.int64))


def token_versions(spans: Ragged) -> Ragged:
    """The version of each token: int64, one row a response."""
    per_span = spans.values[:, 2] - spans.values[:, 1]
    tokens = np.concatenate([[0], np.cumsum(per_span)])[spans.offsets]
    return Ragged(np.repeat(spans.values[:, 0], per_span), tokens)


def token_staleness(spans: Ragged, trained_version: int) -> npt.NDArray[np.int64]:
    """Staleness of every token when ``trained_version`` is being trained: int64, (tokens,)."""
    return trained_version - token_versions(spans).values


def loss_mask(batch: Batch) -> Ragged | None:
    """Which response tokens are trained; None where all are."""
    return batch.ragged(LOSS_MASK) if LOSS_MASK in batch.columns else None


def token_steps(spans: Ragged, stretches: tuple[tuple[int, int], ...] = ()) -> npt.NDArray[np.int64]:
    """The step that trains the version which drew each token: int64, (tokens,). The step being trained minus that is the token's
    staleness, also where rollbacks or resumes took version numbers: ``stretches`` are pairs of a first version and by how
    much the numbers from there on are ahead of their steps."""
    return steps_of(token_versions(spans).values, stretches)


def steps_of(versions: npt.NDArray[np.int64], stretches: tuple[tuple[int, int], ...]) -> npt.NDArray[np.int64]:
    """The step that trains each version; see ``token_steps``."""
    if not stretches:
        return versions
    first, shift = np.array(stretches, np.int64).T
    steps: npt.NDArray[np.int64] = versions - shift[np.searchsorted(first, versions, "right") - 1]
    return steps
