"""Checks of algorithms: advantages over whole groups, and a loss of additive parts. They need torch."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...interfaces import TRAIN_COLUMNS, Algorithm, PackedTokens
from ...types import Batch, Ragged
from ...types.spans import FINISH_REASON
from .check import DoesNotApply, NotAsked, checks, expect
from .lab import PlainLab

GROUPS, SIZE, FORMS, PARTS = 6, 4, 64, 3


class _Ask:
    """An algorithm, the rows of a step, and its loss in parts."""

    def __init__(self, lab: PlainLab, seed: int = 0) -> None:
        algorithm = lab.made()
        expect(isinstance(algorithm, Algorithm), f"the factory made {algorithm!r}, no asyncflow_sdk.Algorithm")
        self.algorithm: Algorithm = algorithm
        try:
            self.torch: Any = importlib.import_module("torch")
        except ImportError:
            raise NotAsked("torch is not installed: pip install 'asyncflow-sdk[torch]'") from None
        random = np.random.default_rng(seed)
        rows = GROUPS * SIZE
        lengths = random.integers(1, 9, rows)
        self.lengths, tokens = lengths, int(lengths.sum())
        self.behaviour = -random.gamma(1.0, 1.0, tokens).astype(np.float32)
        self.logprobs = np.minimum(self.behaviour + 0.3 * random.standard_normal(tokens), 0.0).astype(np.float32)
        given: dict[str, Any] = {
            "prompt_ids": Ragged.of([[1, 2]] * rows),
            "response_ids": Ragged.from_lengths(np.ones(tokens, np.int32), lengths),
            "logprobs": Ragged.from_lengths(self.behaviour, lengths),
            "reward": random.standard_normal(rows).astype(np.float32),
        }
        near, alike = 0.1 * random.standard_normal((2, tokens)), random.standard_normal(tokens)
        self.asked = {
            name: values.astype(np.float32)
            for name, values in (
                ("proximal_logprobs", np.minimum(self.behaviour + near[0], 0.0)),
                ("values", alike),
                ("entropy", random.gamma(1.0, 1.0, tokens)),
                ("staleness", random.integers(0, 3, tokens)),
            )
            if name in algorithm.asks
        }
        self.live_values = (alike + near[1]).astype(np.float32)
        given |= {name: Ragged.from_lengths(each, lengths) for name, each in self.asked.items() if name != "entropy"}
        given[FINISH_REASON] = ["stop"] * rows
        names = [name for name in algorithm.needs if name not in (*TRAIN_COLUMNS, FINISH_REASON)]
        self.columns, self.batch = self._taken(given, names, random)

    def _taken(
        self, given: dict[str, Any], names: list[str], random: np.random.Generator
    ) -> tuple[dict[str, Any], Batch]:
        """Return the needed columns by token, and a batch with them in an accepted form: a number a
        token or a number a row."""
        groups, first = np.repeat(np.arange(GROUPS), SIZE), None
        for form in itertools.islice(itertools.product((True, False), repeat=len(names)), FORMS):
            columns, batch = {}, dict(given)
            for name, by_token in zip(names, form, strict=True):
                count = int(self.lengths.sum()) if by_token else len(self.lengths)
                values = random.standard_normal(count).astype(np.float32)
                batch[name] = Ragged.from_lengths(values, self.lengths) if by_token else values
                columns[name] = values if by_token else np.repeat(values, self.lengths)
            made = columns, Batch.of(batch, groups=groups)
            first = first or made
            with contextlib.suppress(Exception):
                self.advantages(made[1])
                return made
        assert first is not None
        return first

    def advantages(self, batch: Batch | None = None) -> np.ndarray[Any, Any]:
        """Return the advantage of each token."""
        batch = batch or self.batch
        said = self.algorithm.advantages(batch)
        return self._by_token(said["advantages"] if isinstance(said, Mapping) else said, batch)

    def further(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the other columns given with the advantages, by token."""
        said = self.algorithm.advantages(self.batch)
        each = said if isinstance(said, Mapping) else {}
        return {name: self._by_token(values, self.batch) for name, values in each.items() if name != "advantages"}

    def _by_token(self, said: Any, batch: Batch) -> np.ndarray[Any, Any]:
        lengths = batch.ragged("response_ids").lengths
        if isinstance(said, Ragged):
            expect(said.lengths.tolist() == lengths.tolist(), "ragged advantages are one for each response token")
            return said.values
        array = np.asarray(said)
        right = array.shape == (batch.rows,)
        expect(right, f"advantages are of shape {array.shape}, and there are {batch.rows} rows")
        return np.repeat(array, lengths)

    @property
    def totals(self) -> dict[str, int]:
        """Tokens, rows and groups of the step, by normaliser."""
        return {"tokens": int(self.lengths.sum()), "rows": len(self.lengths), "groups": GROUPS, "constant": 1}

    def loss(self, parts: int, *, divided: bool = True) -> tuple[float, np.ndarray[Any, Any], dict[str, float]]:
        """Return the loss, its gradient by log-probs, and metrics, summed over so many parts of the
        rows. ``divided``: False for a step trained in parts, whose loss sees totals of 1."""
        torch, worth = self.torch, self.advantages().astype(np.float32)
        row = np.repeat(np.arange(len(self.lengths)), self.lengths)
        total, sums = 0.0, dict[str, float]()
        gradient = np.zeros(len(worth), np.float32)
        columns = self.columns | self.further() | {n: each for n, each in self.asked.items() if n != "entropy"}
        for rows in np.array_split(np.arange(len(self.lengths)), parts):
            kept = np.isin(row, rows)
            logprobs = torch.tensor(self.logprobs[kept], requires_grad=True)
            entropy, values = (
                torch.tensor(each[kept], requires_grad=True) if name in self.asked else None
                for name, each in (("entropy", self.asked.get("entropy", worth)), ("values", self.live_values))
            )
            totals = {f"total_{name}": self.totals[name] if divided else 1 for name in ("tokens", "rows", "groups")}
            packed = PackedTokens(
                logprobs=logprobs,
                behaviour=torch.tensor(self.behaviour[kept]),
                advantages=torch.tensor(worth[kept]),
                rows=torch.tensor(row[kept] - rows[0]),
                row_count=len(rows),
                columns={name: torch.tensor(each[kept]) for name, each in columns.items()},
                entropy=entropy,
                values=values,
                **totals,
            )
            loss, metrics = self.algorithm.loss(packed)
            expect(getattr(loss, "shape", None) == (), f"the loss is {loss!r}, no scalar tensor")
            expect(loss.requires_grad, "the loss has no gradient by the log-probs")
            loss.backward()
            gradient[kept] = logprobs.grad.numpy()
            total += float(loss.detach())
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return total, gradient, sums


def forms(lab: PlainLab) -> None:
    """Advantages and loss have the form needed by a train engine, and are finite; the batch is not written to."""
    ask = _Ask(lab)
    before = {name: np.array(ask.batch.ragged(name).values) for name in ("response_ids", "logprobs")}
    worth = ask.advantages()
    expect(worth.dtype.kind == "f", f"advantages are {worth.dtype}, not floating point")
    expect(np.isfinite(worth).all(), "an advantage is not finite")
    loss, gradient, metrics = ask.loss(1)
    expect(np.isfinite(loss) and np.isfinite(gradient).all(), f"the loss is {loss}, or its gradient is not finite")
    odd = [name for name, value in metrics.items() if not np.isfinite(value)]
    expect(not odd, f"metrics {odd} are not finite")
    for name, values in before.items():
        expect(np.array_equal(values, ask.batch.ragged(name).values), f"it wrote into column {name!r}")


def _is_near(have: float, wanted: float, share: float = 1e-4) -> bool:
    return abs(have - wanted) <= share * (1 + abs(wanted))


def parts(lab: PlainLab) -> None:
    """Loss, gradient and metrics of a step's parts add up to those of the whole."""
    ask = _Ask(lab, seed=1)
    whole, gradient, metrics = ask.loss(1)
    for count in (2, 5, GROUPS * SIZE):
        some, other, said = ask.loss(count)
        expect(_is_near(some, whole), f"the losses of {count} parts add up to {some:.6g}; the whole's is {whole:.6g}")
        expect(np.abs(other - gradient).max() <= 1e-5, f"the gradients of {count} parts are not those of the whole")
        for name, value in metrics.items():
            text = f"metric {name!r} of {count} parts adds up to {said.get(name)}; the whole's is {value}"
            expect(_is_near(said.get(name, np.inf), value, 1e-3), text)


def direction(lab: PlainLab) -> None:
    """If policy and behaviour agree, a step raises tokens of rows with a higher reward over those
    with a lower one."""
    ask = _Ask(lab, seed=2)
    ask.logprobs = ask.behaviour.copy()
    worth, (_, gradient, _) = ask.advantages(), ask.loss(1)
    if not np.ptp(worth):
        raise DoesNotApply("its advantages are all the same")
    better = (-gradient[worth > np.median(worth)]).mean() > (-gradient[worth < np.median(worth)]).mean()
    expect(
        better, "a step makes tokens of rows that were worth less likelier than those of rows that were worth more"
    )


def row_order(lab: PlainLab) -> None:
    """Advantages of rows are the same in any order of the rows."""
    ask = _Ask(lab, seed=3)
    said = ask.algorithm.advantages(ask.batch)
    if isinstance(said, (Ragged, Mapping)):
        raise DoesNotApply("its advantages are of tokens")
    order = np.random.default_rng(4).permutation(len(ask.lengths))
    again = ask.algorithm.advantages(ask.batch.take(order))
    same = np.allclose(np.asarray(said)[order], np.asarray(again), atol=1e-5)
    expect(same, "the same rows in another order have other advantages")


def normaliser(lab: PlainLab) -> None:
    """Loss, gradient and metrics with totals of 1, divided by the declared normaliser, are those of
    the whole step. The advantages of some groups are those of the whole step."""
    ask = _Ask(lab, seed=6)
    reason, declared = ask.algorithm.whole_step, ask.algorithm.normaliser
    if reason or declared is None:
        raise DoesNotApply(reason)
    whole, gradient, metrics = ask.loss(1)
    found, other, said = ask.loss(PARTS, divided=False)
    number = ask.totals[declared]
    expect(
        _is_near(found / number, whole) and np.abs(other / number - gradient).max() <= 1e-5,
        f"with totals of 1 the loss is {found:.6g}, by the step's {number} {declared} {found / number:.6g}; the"
        f" whole step's is {whole:.6g}, or their gradients differ: the normaliser is not {declared!r}",
    )
    for name, value in metrics.items():
        by = ask.algorithm.metric_normalisers.get(name, "tokens")
        have = said.get(name, np.inf) / ask.totals[by]
        text = f"metric {name!r} of a step in parts, divided by {by}, is {have:.6g}; the whole step's is {value:.6g}"
        expect(_is_near(have, value, 1e-3), f"{text}: say its normaliser in metric_normalisers")
    rows, worth = np.arange(len(ask.lengths)), ask.advantages()
    for part in np.array_split(rows, PARTS):
        own, same = ask.advantages(ask.batch.take(part)), worth[np.isin(np.repeat(rows, ask.lengths), part)]
        text = "the advantages of two groups alone are not those in the whole step, so it cannot be trained in parts"
        expect(np.allclose(own, same, atol=1e-5), text)


def extremes(lab: PlainLab) -> None:
    """Log-probs far from the behaviour's give a finite loss and gradient; equal rewards give finite advantages."""
    ask = _Ask(lab, seed=5)
    for apart in (200.0, -200.0):
        ask.logprobs = (ask.behaviour + apart).astype(np.float32)
        loss, gradient, _ = ask.loss(1)
        finite = np.isfinite(loss) and np.isfinite(gradient).all()
        expect(finite, f"log-probs {apart:g} from the behaviour's give a loss of {loss}")
    same = {name: ask.batch[name] for name in ask.batch if name != "reward"}
    batch = Batch.of({**same, "reward": np.ones(len(ask.lengths), np.float32)}, groups=ask.batch.groups)
    expect(np.isfinite(ask.advantages(batch)).all(), "equal rewards in a group give advantages that are not finite")


CHECKS = checks("algorithm", {
    forms: ("basic", (), "the trainer cannot use it, or every step ends in NaN",
        "advantages(): one a row or one a token, finite; loss(): a scalar with gradient, and metrics without"),
    parts: ("basic", ("forms",),
        "the result of a step depends on how it was cut for memory: no two machines train the same",
        "loss(): divide by total_tokens or total_rows, never by the counts of this part"),
    direction: ("basic", ("forms",), "the policy learns the punished responses",
        "the sign of the loss: training lowers it"),
    row_order: ("full", ("forms",), "a group's advantage depends on the random order of rows in the batch",
        "advantages(): rows of a group have the same number in batch.groups, in any order"),
    normaliser: ("full", ("parts",), "a step trained in parts, in a streamed run, is another step than the whole one",
        "normaliser: the total that the loss is divided by, once; metric_normalisers: those of metrics that are no "
        "means over tokens"),
    extremes: ("full", ("forms",), "one token with an infinite ratio, and the step, or the model, is lost",
        "loss(): bound the log-ratio before exp()"),
})  # fmt: skip
