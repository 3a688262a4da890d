"""Shares: rows trained by one rank in a step, and totals of all ranks.

    share = share_of(batch, algorithm, vocabulary=43, context=None, tokens=16384)
    whole = Whole.of(ranks.gather(share.counts))          # losses are divided by the whole step's tokens and rows

A rank may have no rows, or no used ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncflow_sdk.algorithms import Moments, standardise
from asyncflow_sdk.errors import SchemaError
from asyncflow_sdk.interfaces import Algorithm
from asyncflow_sdk.types import VERSION_SPANS, Batch, Ragged, loss_mask, token_steps, token_versions

from .collate import check_tokens, check_training, split
from .open_step import Totals
from .per_token import PerToken, checked_advantages, extra_columns

VALUES, STALENESS = "values", "staleness"
BEFORE = {VALUES, STALENESS}
"""Columns computed before the advantages."""


@dataclass(frozen=True)
class Share:
    """``used``: bool (rows,), True for trained rows. All other fields hold trained rows, and
    trained tokens in them. ``parts``: row numbers of each forward pass. ``counts``: JSON for the
    other ranks."""

    used: npt.NDArray[np.bool_]
    batch: Batch
    mask: Ragged | None
    advantages: PerToken
    behaviour: PerToken
    columns: Mapping[str, PerToken]
    parts: Sequence[npt.NDArray[np.int64]]
    counts: dict[str, float]


def share_of(
    batch: Batch, algorithm: Algorithm, *, vocabulary: int, context: int | None, tokens: int | None, packed: bool = False
) -> Share:  # fmt: skip
    """Return the rows of ``batch``, whole groups, trained by ``algorithm``, in passes of at most
    ``tokens`` input tokens. Raises SchemaError, with the rows, for rows unfit for training,
    EngineError for invalid advantages."""
    if not batch.rows:
        none = PerToken(np.zeros(0, np.float32), np.zeros(0, np.int64), by_row=True)
        return Share(np.zeros(0, np.bool_), batch, None, none, none, {}, (), _counts(batch, batch, 0, 0))
    check_tokens(batch, vocabulary=vocabulary, context=context)
    check_training(batch)
    whole = algorithm.standardise is None
    given = algorithm.advantages(batch) if whole else algorithm.advantages_of_share(batch)
    advantages, further = checked_advantages(given, batch, algorithm)
    # An advantage of 0 is not 0 after standardisation.
    used = advantages.nonzero if algorithm.drop_zero_advantage and whole else np.ones(batch.rows, np.bool_)
    rows = np.flatnonzero(used)
    chosen, mask = batch.take(rows), None
    if len(rows):
        mask = loss_mask(chosen)
    behaviour = PerToken.of(chosen.ragged("logprobs")).masked(mask)
    asked = BEFORE & {*algorithm.asks}
    columns = extra_columns([*algorithm.needs, *asked], chosen) | {n: each.take(rows) for n, each in further.items()}
    columns = {name: each.masked(mask) for name, each in columns.items()}
    parts = split(chosen, tokens=tokens, packed=packed)
    counts = _counts(batch, chosen, int(behaviour.lengths.sum()), len(parts))
    worth = advantages.take(rows).masked(mask)
    if not whole:
        moments = Moments.of(worth.of_rows(np.arange(len(rows))).astype(np.float64))
        counts |= {"worth": moments.mean, "apart": moments.squares}
    return Share(used, chosen, mask, worth, behaviour, columns, parts, counts)


def standardised_over(share: Share, whole: Whole, epsilon: float | None) -> Share:
    """Return the share with advantages of mean 0 and spread 1 over the tokens of all ranks;
    unchanged for None."""
    if epsilon is None:
        return share
    worth = share.advantages
    values = standardise(worth.values.astype(np.float64), epsilon=epsilon, moments=whole.moments)
    return replace(share, advantages=replace(worth, values=values))


def token_staleness_of(batch: Batch) -> Ragged:
    """Return the staleness of each response token, float32: the version of the step's begin minus
    the token's version. Raises SchemaError for rows without a step of a run."""
    step = getattr(batch, "index", -1)
    if step < 0:
        raise SchemaError("the algorithm asks for staleness, and these rows are no step of a run")
    spans = batch.ragged(VERSION_SPANS)
    late = step - token_steps(spans, batch.version_step_offsets)
    return Ragged(late.astype(np.float32), token_versions(spans).offsets)


def pieces(share: Share, order: Sequence[npt.NDArray[np.int64]], *, tokens: int | None, packed: bool) -> list[Share]:
    """Return a share of each element of ``order``: row numbers among the trained rows."""
    made = []
    for rows in order:
        batch, mask = share.batch.take(rows), None if share.mask is None else share.mask.take(rows)
        behaviour, parts = share.behaviour.take(rows), split(batch, tokens=tokens, packed=packed)
        counts = _counts(batch, batch, int(behaviour.lengths.sum()), len(parts))
        columns = {name: each.take(rows) for name, each in share.columns.items()}
        used = np.ones(len(rows), np.bool_)
        made.append(Share(used, batch, mask, share.advantages.take(rows), behaviour, columns, parts, counts))
    return made


def _counts(batch: Batch, used: Batch, tokens: int, passes: int) -> dict[str, float]:
    found: dict[str, float] = {"rows": batch.rows, "used": used.rows, "tokens": tokens, "passes": passes}
    found |= {"groups": len(np.unique(used.groups)), "worth": 0.0, "apart": 0.0}
    if not batch.rows:
        return found | {"length": 0, "reward": 0.0, "spread": 0.0}
    rewards = batch.array("reward").astype(np.float64)
    length = int(batch.ragged("response_ids").lengths.sum())
    spread = float(((rewards - rewards.mean()) ** 2).sum())
    return found | {"length": length, "reward": float(rewards.sum()), "spread": spread}


@dataclass(frozen=True)
class Whole:
    """Totals of a step. ``rows``: all rows; ``trained``: trained tokens, rows and groups.
    ``passes``: of the rank with most; all ranks make as many, since the layers of a sharded
    model run collectives in each. ``moments``: of the advantages of all tokens, if they are
    standardised."""

    rows: int
    trained: Totals
    passes: int
    metrics: dict[str, float]
    moments: Moments

    @classmethod
    def of(cls, counts: Sequence[Mapping[str, Any]]) -> Whole:
        """Sum the counts of all ranks. Metrics: mean and standard deviation of the rewards, mean
        length of responses, numbers of trained rows and tokens."""
        total = {name: sum(each[name] for each in counts) for name in counts[0]}
        rows = int(total["rows"])
        mean = total["reward"] / max(rows, 1)
        # of all rows: within ranks, and between them
        spread = total["spread"] + sum(c["rows"] * (c["reward"] / c["rows"] - mean) ** 2 for c in counts if c["rows"])
        return cls(
            rows, Totals(int(total["tokens"]), int(total["used"]), int(total["groups"])), max(int(each["passes"]) for each in counts),
            {
                "reward": mean, "reward_std": math.sqrt(spread / max(rows, 1)),
                "response_tokens": total["length"] / max(rows, 1),
                "rows_used": float(total["used"]), "tokens": float(total["tokens"]),
            },
            Moments.merge([Moments(int(each["tokens"]), each["worth"], each["apart"]) for each in counts]),
        )  # fmt: skip
