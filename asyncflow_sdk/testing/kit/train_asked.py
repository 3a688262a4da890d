"""What a train engine computes for algorithms that ask for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ...interfaces import Algorithm, PackedTokens
from ...types import Batch, Ragged
from ...types.dtypes import from_torch, is_torch
from .check import CheckFailed, DoesNotApply, check, expect
from .train_lab import TrainLab, masked


@check(
    "train", "full",
    means="corrections for stale tokens that correct nothing, or a critic that learns what nobody asked",
    look="`computes`, and for what an algorithm `asks`: tokens.columns, tokens.values, tokens.entropy",
)  # fmt: skip
def asked(lab: TrainLab) -> None:
    """An algorithm gets what the engine says it computes, of each token: log-probs before the step, values, entropies."""
    names = tuple(name for name in lab.engine.computes if name != "staleness")  # of a run's steps only
    if not names:
        raise DoesNotApply("it computes nothing for algorithms")
    batch = lab.batch((4, 3), seed=9)
    mask = np.random.default_rng(9).random(len(batch.ragged("logprobs").values)) < 0.7
    mask[batch.ragged("logprobs").offsets[1:] - 1] = True
    batch, asking = masked(batch, mask), Asking(asks=names)
    try:
        lab.start(algorithm=asking)
    except CheckFailed:
        raise
    except Exception as error:
        raise CheckFailed(
            f"it says that it computes {', '.join(names)}, and refuses an algorithm that asks for them:"
            f" {type(error).__name__}: {error}"
        ) from error
    lab.step(batch)
    if asking.given:  # in this process
        _looked_at(lab, batch, mask, asking)


@dataclasses.dataclass(frozen=True)
class Asking(Algorithm):
    """Each token has an advantage of its own, by which it is known. ``given``: what its loss was asked, if in this process."""

    asks: tuple[str, ...] = ()
    given: list[PackedTokens] = dataclasses.field(default_factory=list, compare=False, repr=False)

    def advantages(self, batch: Batch) -> Any:
        lengths = batch.ragged("response_ids").lengths
        each = np.arange(1, lengths.sum() + 1, dtype=np.float32)
        return {"advantages": Ragged.from_lengths(each, lengths), "halved": Ragged.from_lengths(each / 2, lengths)}

    def loss(self, tokens: PackedTokens) -> tuple[Any, dict[str, Any]]:
        self.given.append(tokens)
        loss = tokens.logprobs.sum()
        if "entropy" in self.asks:
            loss = loss + tokens.entropy.sum()
        if "values" in self.asks:
            loss = loss + (tokens.values - 1).square().sum()
        return loss / tokens.total_tokens, {}


def _looked_at(lab: TrainLab, batch: Batch, mask: np.ndarray[Any, Any], asking: Asking) -> None:
    place = np.concatenate([_plain(part.advantages) for part in asking.given]).astype(np.int64) - 1
    expect(
        sorted(place) == np.flatnonzero(mask).tolist(),
        "the loss was not given each token that is trained once, with its own advantage",
    )
    wanted = {"halved": (place + 1) / 2}
    if "proximal_logprobs" in asking.asks:
        wanted["proximal_logprobs"] = np.concatenate(lab.reference(batch))[place]
    for name, numbers in wanted.items():
        odd = [part for part in asking.given if name not in part.columns]
        expect(not odd, f"the loss was given no column {name!r}")
        far = np.abs(np.concatenate([_plain(part.columns[name]) for part in asking.given]) - numbers).max()
        expect(far <= max(lab.tolerance, 1e-6), f"column {name!r} is up to {far:.3g} off")
    most = np.log(lab.policy.vocabulary) + lab.tolerance
    for name in ("entropy", "values"):
        if name not in asking.asks:
            continue
        for part in asking.given:
            each = getattr(part, name)
            expect(
                len(each) == len(part.advantages),
                f"the loss was given {len(each)} {name} of {len(part.advantages)} tokens",
            )
            expect(bool(getattr(each, "requires_grad", True)), f"{name} came without gradient")
            numbers = _plain(each)
            expect(bool(np.isfinite(numbers).all()), f"{name} that are not finite")
            if name == "entropy":
                expect(
                    numbers.min() >= -1e-3 and numbers.max() <= most,
                    "entropies that no distribution over the vocabulary has",
                )


def _plain(values: Any) -> np.ndarray[Any, Any]:
    return np.asarray(from_torch(values.detach()) if is_torch(values) else values)
