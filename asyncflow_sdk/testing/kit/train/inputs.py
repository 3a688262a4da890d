"""Checks of the columns a train engine computes for algorithms."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....interfaces import Algorithm, PackedTokens
from ....types import LOSS_MASK, Batch, Ragged
from ..check import CheckFailed, DoesNotApply, checks, expect
from .lab import FIRST_ROW, ROWS_APART, TrainLab, masked, plain, random_mask

LONGEST = 64
"""A bound for the tokens of a response."""


def asked(lab: TrainLab) -> None:
    """An algorithm gets all declared columns for each token: log-probs before the step, values,
    entropies; and advantages over all rows."""
    names = tuple(name for name in lab.engine.computes if name != "staleness")  # of a run's steps only
    if not names:
        raise DoesNotApply("it computes nothing for algorithms")
    batch = lab.batch((4, 3, 3), seed=9)
    mask = random_mask(batch, 9, 0.7)
    batch = masked(batch, mask)
    with lab.folder() as into:
        try:
            lab.start(algorithm=InputRecorder(asks=names, into=str(into)))
        except CheckFailed:
            raise
        except Exception as error:
            said = f"it says that it computes {', '.join(names)}, and refuses an algorithm that asks for them"
            raise CheckFailed(f"{said}: {type(error).__name__}: {error}") from error
        lab.step(batch)
        given = [dict(np.load(file, allow_pickle=False)) for file in sorted(into.glob("*.npz"))]
    expect(given, "the algorithm's loss was never asked")
    _check_given(lab, batch, mask, names, given)


@dataclasses.dataclass(frozen=True)
class InputRecorder(Algorithm):
    """An algorithm with a unique number for each token: twice its column "halved".

    Each call of its loss, in any process, writes its inputs to a file in ``into``.
    """

    asks: tuple[str, ...] = ()
    into: str = ""
    standardise: float | None = 0.5

    def advantages(self, batch: Batch) -> Any:
        """Return standardised numbers."""
        found = self.advantages_of_share(batch)
        mask = batch.ragged(LOSS_MASK)
        return {**found, "advantages": Ragged(_standardised(found["advantages"].values, mask.values), mask.offsets)}

    def advantages_of_share(self, batch: Batch) -> Any:
        """Return the numbers of a rank's rows."""
        numbers, offsets = _numbers(batch), batch.ragged("response_ids").offsets
        return {"advantages": Ragged(numbers, offsets), "halved": Ragged(numbers / 2, offsets)}

    def loss(self, tokens: PackedTokens) -> tuple[Any, dict[str, Any]]:
        """Write the inputs; return a loss of all of them."""
        loss = tokens.logprobs.sum()
        if "entropy" in self.asks:
            loss = loss + tokens.entropy.sum()
        if "values" in self.asks:
            loss = loss + (tokens.values - 1).square().sum()
        with open(Path(self.into) / f"{uuid.uuid4().hex}.npz", "wb") as file:
            np.savez(file, **_given(tokens, self.asks))
        return loss / tokens.total_tokens, {}


def _given(tokens: PackedTokens, asks: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {f"column {name}": plain(column) for name, column in tokens.columns.items()}
    for name in ("entropy", "values"):
        if name in asks:
            found[name] = plain(getattr(tokens, name))
            found[f"{name} learns"] = np.bool_(getattr(getattr(tokens, name), "requires_grad", True))
    return {**found, "advantages": plain(tokens.advantages)}


def _check_given(
    lab: TrainLab, batch: Batch, mask: np.ndarray[Any, Any], asks: Sequence[str], given: Sequence[dict[str, Any]]
) -> None:
    lacking = [part for part in given if "column halved" not in part]
    expect(not lacking, "the loss was given no column 'halved', which came with the advantages")
    numbers = _numbers(batch)
    found = np.concatenate([2 * part["column halved"] for part in given])
    once = sorted(found) == sorted(numbers[mask])
    expect(once, "the loss was not given each token that is trained once, with its own column")
    order = np.argsort(numbers)
    place = order[np.searchsorted(numbers, found, sorter=order)]
    wanted = {"advantages": _standardised(numbers, mask)[place]}
    if "proximal_logprobs" in asks:
        wanted["column proximal_logprobs"] = np.concatenate(lab.reference(batch))[place]
    for name, right in wanted.items():
        expect(all(name in part for part in given), f"the loss was given no {name}")
        far = np.abs(np.concatenate([part[name] for part in given]) - right).max()
        why = ": of mean 0 and spread 1 they are over the tokens of all rows" if name == "advantages" else ""
        expect(far <= max(lab.tolerance, 1e-5), f"{name} is up to {far:.3g} off{why}")
    most = np.log(lab.policy.vocabulary) + lab.tolerance
    for name, part in ((name, part) for name in ("entropy", "values") if name in asks for part in given):
        each, tokens = part[name], len(part["advantages"])
        expect(len(each) == tokens, f"the loss was given {len(each)} {name} of {tokens} tokens")
        expect(bool(part[f"{name} learns"]), f"{name} came without gradient")
        expect(bool(np.isfinite(each).all()), f"{name} that are not finite")
        possible = name != "entropy" or (each.min() >= -1e-3 and each.max() <= most)
        expect(possible, "entropies that no distribution over the vocabulary has")


def _numbers(batch: Batch) -> np.ndarray[Any, Any]:
    lengths = batch.ragged("response_ids").lengths
    rows = np.repeat((batch.ids - FIRST_ROW) // ROWS_APART, lengths)
    places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.asarray(rows * LONGEST + places + 1, np.float32)


def _standardised(numbers: np.ndarray[Any, Any], drawn: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    known = numbers[drawn.astype(np.bool_)].astype(np.float64)
    return np.where(drawn, (numbers - known.mean()) / (known.std() + 0.5), 0.0).astype(np.float32)


CHECKS = checks("train", {
    asked: ("full", ("step", "logprobs"), "corrections for stale tokens have no effect, the critic learns wrong "
        "values, or advantages cover a part of the step", "`computes` of the engine and `asks` of the algorithm: "
        "tokens.columns, tokens.values, tokens.entropy; with several ranks `standardise`"),
})  # fmt: skip
