"""Checks for long runs of a train engine: padding, masks, old rows, resumes, memory, bfloat16."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ....algorithms import GRPO
from ....errors import ConfigError
from ....interfaces import Algorithm, PackedTokens
from ....types import Batch, Ragged
from ..check import CheckFailed, DoesNotApply, checks, expect, needs
from ..resources import Growth
from ..updates import HeldUpdate
from .basic import SEEN, learns, names, train_until_seen
from .lab import NOTHING, Tensors, TrainLab, changed, masked, plain, random_mask, unlike

LOW, HIGH, WITHIN, FAR = 0.01, 3.0, 0.8, 3.0
"""A clip_low and a clip_high; a log-ratio between the two, and one beyond both."""
STEPS, WAY = 24, (2.0, 6.0)
"""Small steps in bfloat16, and the way of all of them in half roundings, at the median weight by
contribution: visible when rounded once, and too short to be visible in a single step."""
KEPT = 0.5
"""The part of the way needed. Steps rounded one by one keep about 0.1; rounded once, 0.9 and more."""
_BITS = 8
_grpo = needs(lambda lab: isinstance(lab.options["algorithm"], GRPO), "it is not GRPO that it trains by here")


def fresh_logprobs(lab: TrainLab) -> None:
    """After a step logprobs() are of the weights in named_weights()."""
    batch = lab.batch((3, 4), seed=2)
    lab.fresh()
    for number in range(3):
        lab.check_logprobs(batch, lab.tensors(), when=f" after {number} steps")
        lab.step(batch)
    lab.check_logprobs(batch, lab.tensors(), when=" after 3 steps")


def row_order(lab: TrainLab) -> None:
    """The rows of a batch in another order make the same step."""
    batch = lab.batch((4, 2, 5, 3), seed=3, longest=48)
    order = np.random.default_rng(0).permutation(batch.rows)
    lab.expect_same(lab.trained(batch), lab.trained(batch.take(order)), "the same rows in another order")


def companions(lab: TrainLab) -> None:
    """The effect of a batch does not depend on tokens after the last trained token of a row."""
    short = lab.batch((4, 2), seed=4, longest=9)
    lengths = short.ragged("response_ids").lengths
    wanted = lab.trained(masked(short, np.ones(int(lengths.sum()), np.bool_)))
    tail = np.resize(np.concatenate(lab.policy.prompts(4, seed=45)), min(96, lab.policy.context // 3))
    responses = list(short.ragged("response_ids"))
    responses[4] = np.concatenate([responses[4], tail]).astype(np.int32)
    long = lab.batch((4, 2), seed=4, responses=responses, rewards=short.array("reward").tolist())
    trains = [np.arange(len(row)) < n for row, n in zip(responses, lengths, strict=True)]
    said = f"one of 6 rows is followed by {len(tail)} tokens that loss_mask leaves out"
    lab.expect_same(wanted, lab.trained(masked(long, np.concatenate(trains))), said)


@learns
def loss_mask(lab: TrainLab) -> None:
    """Tokens excluded by loss_mask are not trained, whatever their log-probs."""
    batch = lab.batch((4, 3), seed=5)
    behaviour = batch.ragged("logprobs")
    mask = random_mask(batch, 5, 0.5)
    part = masked(batch, mask)
    zeros = Ragged(np.where(mask, behaviour.values, 0.0).astype(np.float32), behaviour.offsets)
    wanted, other = lab.trained(part), lab.trained(changed(part, logprobs=zeros))
    lab.expect_same(wanted, other, "tokens that are left out, with log-probs of 0")
    with contextlib.suppress(CheckFailed):
        lab.expect_same(wanted, lab.trained(batch), "")
        wanted = {}
    expect(wanted, "a batch half of whose tokens loss_mask leaves out is trained as if all were to be")


@learns
@_grpo
def off_policy(lab: TrainLab) -> None:
    """The ratio is to the log-probs in the rows: a token beyond clip_low or clip_high is not
    trained, and all others are."""
    batch = lab.batch((4, 4), seed=6)
    behaviour = batch.ragged("logprobs")
    rewarded = np.repeat(batch.array("reward") > 0, behaviour.lengths)
    normal = lab.stride(batch)

    def _went(up: float, down: float, clip_high: float = HIGH) -> float:
        """The part of a step on policy done with these log-ratios, of rewarded tokens and of others."""
        logprobs = (behaviour.values - np.where(rewarded, up, down)).astype(np.float32)
        shifted = changed(batch, logprobs=Ragged(logprobs, behaviour.offsets))
        return lab.moved(lab.trained(shifted, algorithm=GRPO(clip_low=LOW, clip_high=clip_high))) / normal

    # more likely than they were and rewarded, or less likely and not: the policy has gone there already
    below = -max(WITHIN, 1.1 * lab.tolerance)
    clipped = _went(FAR, below)
    if clipped > NOTHING:
        lower = _went(FAR, below, clip_high=LOW) <= NOTHING
        raise CheckFailed(
            "rows whose ratio to their own log-probs is far beyond the clip range moved the weights by"
            f" {clipped:.2g} of what the same rows do when they are on policy"
            f"{': the lower bound uses clip_high, not clip_low' if lower else ''}",
            "loss: the lower bound of the clip uses clip_high" if lower else "",
        )
    expect(
        _went(WITHIN, -FAR) > NOTHING,
        f"with clip_low={LOW:g} and clip_high={HIGH:g} rewarded tokens with a ratio of {np.exp(WITHIN):.2g} are not"
        " trained: the upper bound of the clip uses clip_low, not clip_high",
        "loss: the upper bound of the clip uses clip_low",
    )
    expect(
        _went(-FAR, FAR) > NOTHING,
        "rewarded tokens that have become less likely, and others that have become likelier, are not trained: the loss"
        " clips on both sides, and not only where the policy has gone already",
        "loss: the clip is applied on both sides",
    )


@learns
@_grpo
def token_mean(lab: TrainLab) -> None:
    """Under GRPO every token of a step weighs the same: a row counts like two with half of its tokens each."""
    algorithm = dataclasses.replace(lab.options["algorithm"], normalize_std=False)
    stream = np.concatenate(lab.policy.prompts(8, longest=24, seed=46))
    batch = lab.batch((4, 4), seed=7, responses=[np.roll(stream, -n)[:n] for n in (6, 9, 4, 12, 2, 3, 1, 2)])
    twice = batch.take(np.concatenate([np.arange(4), np.arange(batch.rows)]))
    row = np.repeat(np.arange(twice.rows), twice.ragged("response_ids").lengths)
    first = np.concatenate([np.arange(n) < n // 2 for n in twice.ragged("response_ids").lengths])
    # the group of long rows is there twice, with the first and with the second half of each row; the other once, as it is
    trains = np.where(row < 4, first, np.where(row < 8, ~first, True))
    whole = lab.trained(batch, algorithm=algorithm)
    lab.expect_same(whole, lab.trained(masked(twice, trains), algorithm=algorithm), "rows in halves")


@learns
def algorithm(lab: TrainLab) -> None:
    """An algorithm unknown to the engine is applied exactly, to each token, or refused."""
    batch = lab.batch((4, 3), seed=8)
    mask = random_mask(batch, 8, 0.7)
    batch, asked = changed(masked(batch, mask), weight=np.linspace(1, 2, batch.rows)), Opposite()
    weights = np.where(mask, asked.advantages(batch).values, 0.0)
    try:
        lab.start(algorithm=asked)
    except CheckFailed:
        raise
    except Exception as error:
        raise DoesNotApply(f"it is made for some algorithms only ({type(error).__name__}: {error})") from error
    gain = train_until_seen(lab, batch, weights, algorithm=asked)
    expect(
        gain > SEEN,
        f"asked to train by {type(asked).__name__}, which makes what is rewarded less likely, it made its advantages"
        f" {gain:+.2g} worth: it trains by something else",
    )
    if asked.given:  # in this process: look at what it was asked
        _check_packed(lab, batch, mask, asked)


@dataclasses.dataclass(frozen=True)
class Opposite(Algorithm):
    """An advantage for each token, against the reward, and a column of its own. ``given``: the
    inputs of its loss, if in this process."""

    needs = ("weight",)
    given: list[PackedTokens] = dataclasses.field(default_factory=list, compare=False, repr=False)

    def advantages(self, batch: Batch) -> Ragged:
        """Return the opposite of the reward, slightly different for each token."""
        lengths = batch.ragged("response_ids").lengths
        values = np.repeat(0.5 - batch.array("reward"), lengths) + 1e-3 * np.arange(lengths.sum())
        return Ragged.from_lengths(values.astype(np.float32), lengths)

    def loss(self, tokens: PackedTokens) -> tuple[Any, dict[str, Any]]:
        """Keep the inputs; return the loss."""
        self.given.append(tokens)
        gain = (tokens.logprobs - tokens.behaviour).exp() * tokens.advantages * tokens.columns["weight"]
        return -gain.sum() / tokens.total_tokens, {}


def _check_packed(lab: TrainLab, batch: Batch, mask: npt.NDArray[np.bool_], asked: Opposite) -> None:
    wanted, parts = np.flatnonzero(mask), list[PackedTokens]()
    while asked.given and sum(len(part.advantages) for part in parts) < len(wanted):
        parts.append(asked.given.pop(0))
    advantages = asked.advantages(batch).values
    order = np.argsort(np.concatenate([plain(part.advantages) for part in parts]))
    want = wanted[np.argsort(advantages[wanted])]
    for name, theirs, near in (
        ("advantages", advantages, 1e-6),
        ("behaviour", batch.ragged("logprobs").values, 1e-6),
        ("logprobs", np.concatenate(lab.reference(batch)), lab.tolerance),
        ("weight", np.repeat(batch.array("weight"), batch.ragged("response_ids").lengths), 1e-6),
    ):
        given = [plain(part.columns["weight"] if name == "weight" else getattr(part, name)) for part in parts]
        have = np.concatenate(given)[order]
        right = len(have) == len(want) and np.abs(have - theirs[want]).max() <= near
        expect(right, f"the loss was given {len(have)} {name} that are not those of the {len(want)} tokens to train")
    for name, count in (("total_tokens", len(wanted)), ("total_rows", batch.rows)):
        said = {getattr(part, name) for part in parts}
        expect(said == {count}, f"the loss was told {name}={said}; the step has {count}")


def resume(lab: TrainLab) -> None:
    """A checkpoint continues training in another engine as in its own."""
    batches = [lab.batch((4, 3), seed=50 + number) for number in range(5)]
    with lab.folder() as path:
        saved = lab.trained(*batches[:3])
        lab.engine.save(path)
        wanted = lab.further(*batches[3:])
        lab.start().logprobs(batches[0])  # what was computed before must not be what comes after
        lab.used.load(path)
        lab.expect_bits(lab.tensors(), saved, "after load() {count} weights are not those that were saved")
        lab.check_logprobs(batches[0], saved, when=" after load()")
        said, cause = (
            "3 steps, save, load and 2 more are not the same 5 steps",
            "load: the optimizer's state is not restored",
        )
        lab.expect_same(wanted, lab.further(*batches[3:]), said, cause)


def save_is_whole(lab: TrainLab) -> None:
    """A save, also over an older one, is complete: it loads from a new location. An empty directory does not load."""
    with lab.folder() as path:
        place = path / "part" / "engine"
        place.mkdir(parents=True)
        lab.fresh()
        lab.engine.save(place)
        wanted = lab.further(lab.batch((4, 3), seed=60))
        lab.engine.save(place)
        (path / "part").rename(path / "moved")
        (path / "empty").mkdir()
        lab.start()
        lab.used.load(path / "moved" / "engine")
        said = "what was saved over an older save, and moved, loads with {count} other weights"
        lab.expect_bits(lab.tensors(), wanted, said)
        lab.start()
        try:
            lab.used.load(path / "empty")
        except Exception:
            return
    raise CheckFailed("load() of an empty directory went well: a lost checkpoint would be trained on from the start")


def export(lab: TrainLab) -> None:
    """The exported folder has the engine's weights."""
    lab.trained(lab.batch((4, 3), seed=61))
    _check_export(lab)


def _check_export(lab: TrainLab) -> None:
    """Compare the export with named_weights(). Raises DoesNotApply for an engine without export."""
    with lab.folder() as path:
        try:
            lab.engine.export(path / "model")
        except NotImplementedError as error:
            raise DoesNotApply(str(error)) from error
        said = "{count} weights are not in the exported folder as named_weights() gives them"
        lab.expect_bits(lab.policy.read(path / "model"), lab.tensors(), said)


def live_views(lab: TrainLab) -> None:
    """Weights stay the same until the next step, however often they are read, and reading has no effect."""
    batches = [lab.batch((4, 3), seed=62 + number) for number in range(3)]
    wanted = lab.trained(*batches)
    lab.start()
    for batch in batches:
        held = list(lab.engine.named_weights())
        once = lab.tensors()
        known = {name: plain(tensor) for name, tensor in held if name in once}
        lab.expect_bits(known, once, "{count} tensors changed while others were read")
        lab.expect_bits(lab.tensors(), once, "read twice without a step, {count} tensors are not the same")
        lab.step(batch)
    lab.expect_same(wanted, lab.tensors(), "steps between which the weights were read are not those without")


def memory(lab: TrainLab) -> None:
    """Repeated steps take no growing memory, shared memory, GPU memory, descriptors, threads or processes."""
    batch = lab.batch((4, 4), seed=65)
    nbytes = sum(array.nbytes for array in lab.policy.tensors(0).values())
    steps = max(12, min(math.ceil((16 << 20) / max(nbytes, 1)), 60))

    def _some(count: int) -> None:
        for _ in range(count):
            lab.step(batch)
            for _ in lab.engine.named_weights():
                pass

    lab.fresh()
    _some(8)
    growth = Growth(nbytes=steps * nbytes // 4 + (4 << 20), count=steps // 2)
    while growth.goes_on():
        _some(steps)
    growth.check("steps", steps, nbytes)


@needs(lambda lab: lab.engine.restores, "it does not say that it restores (TrainEngine.restores)")
def load_weights(lab: TrainLab) -> None:
    """load_weights() takes a published version whole: named_weights() gives its bytes, and the next
    step uses a new optimizer."""
    first, second, third = (lab.batch((4, 3), seed=seed) for seed in (31, 32, 33))
    lab.trained(first)
    version = lab.published()
    lab.further(second, second)
    _load(lab, version, "after two more steps")
    _check_refusals(lab, version)
    went_on = lab.further(third)
    lab.fresh()
    _load(lab, version, "into a new engine")
    said = "a step after load_weights(), of an engine that had trained and of a new one"
    lab.expect_same(went_on, lab.further(third), said)


def _load(lab: TrainLab, version: Tensors, when: str) -> None:
    update = HeldUpdate(7, version)
    lab.used.load_weights(update)
    update.scribble()
    wrong = ", ".join(sorted(unlike(version, lab.published()))[:4])
    expect(not wrong, f"load_weights() {when}: named_weights() differs from what was loaded in {wrong}")


def _check_refusals(lab: TrainLab, version: Tensors) -> None:
    name = max(version, key=lambda each: version[each].nbytes)
    bad = {
        "lacks a weight": {other: array for other, array in version.items() if other != name},
        "has one of another shape": {**version, name: np.concatenate([version[name], version[name]])},
        "has one too many": {**version, "a.weight.that.no.model.has": version[name]},
    }
    for what, tensors in bad.items():
        try:
            lab.used.load_weights(HeldUpdate(8, tensors))
        except CheckFailed:
            raise
        except Exception:
            odd = unlike(version, lab.published())
            expect(not odd, f"load_weights() of a version that {what} raised, and has changed weights")
        else:
            raise CheckFailed(f"load_weights() took a version that {what}")


@learns
def small_updates(lab: TrainLab) -> None:
    """From a checkpoint in bfloat16, small steps add up as in float32; published and exported
    weights are bfloat16."""
    rate = _given_rate(lab)
    half, whole = (lab.policy.rounded(dtype) for dtype in ("bfloat16", "float32"))
    with lab.of(whole):
        batch = lab.batch((4, 4), seed=66)
        rate, wanted = _slowly(lab, batch, rate)
    with lab.of(half):
        try:
            lab.start()
        except ConfigError as error:
            raise DoesNotApply(f"it takes no checkpoint in bfloat16: {error}") from error
        names(lab)
        have = lab.trained(*[batch] * STEPS, learning_rate=rate)
        with contextlib.suppress(DoesNotApply):
            _check_export(lab)
    first = whole.tensors(0)
    way = _flat(wanted, first) - _flat(first, first)
    kept = float((_flat(have, first) - _flat(first, first)) @ way / (way @ way))
    expect(
        kept >= KEPT,
        f"of the way that {STEPS} steps at a learning rate of {rate:.2g} go in float32, {kept:.2g} is left when"
        " the checkpoint is bfloat16: steps smaller than its roundings are lost",
    )


def _given_rate(lab: TrainLab) -> float:
    parameter = inspect.signature(lab.make).parameters.get("learning_rate")
    rate = lab.options.get("learning_rate", parameter.default if parameter is not None else None)
    if isinstance(rate, (int, float)) and rate > 0:
        return float(rate)
    raise DoesNotApply(
        "its factory has no option learning_rate, a number, by which it could be asked for small steps"
    )


def _slowly(lab: TrainLab, batch: Batch, rate: float) -> tuple[float, Tensors]:
    for _ in range(6):
        found = lab.trained(*[batch] * STEPS, learning_rate=rate)
        went = _roundings(found, lab.policy.tensors(0))
        expect(went, "steps on rows with advantages changed no weight, so nothing can be said; see check 'step'")
        if WAY[0] <= went <= WAY[1]:
            return rate, found
        rate *= float(np.clip(sum(WAY) / 2 / went, 1e-3, 1e3))
    raise DoesNotApply("its steps are not smaller at a smaller learning rate")


def _roundings(tensors: Mapping[str, npt.NDArray[Any]], first: Mapping[str, npt.NDArray[Any]]) -> float:
    """Return the distance from ``first`` in half roundings, of the weight at half of the squared way."""
    begin = _flat(first, first)
    way = (_flat(tensors, first) - begin)[begin != 0]  # near 0 nothing is rounded away
    far = np.abs(way) / np.exp2(np.floor(np.log2(np.abs(begin[begin != 0]))) - _BITS)
    order = np.argsort(far)
    done = np.cumsum(way[order] ** 2)
    return float(far[order][np.searchsorted(done, done[-1] / 2)])


def _flat(tensors: Mapping[str, npt.NDArray[Any]], order: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    return np.concatenate([tensors[name].astype(np.float64).ravel() for name in order])


CHECKS = checks("train", {
    fresh_logprobs: ("full", ("logprobs", "step"),
        "log-probs sent as the present policy's are of an older one, in proofs of weights, too",
        "caches, an inference copy of the model, gathered parameters from before the step"),
    row_order: ("full", ("step",),
        "training depends on the order of rows: groups are mixed up, or micro-batches weigh unequally",
        "rows of a group lie anywhere in a batch (batch.groups); a mean of the means of micro-batches is not the "
        "mean"),
    companions: ("full", ("step",),
        "the effect of a row depends on the lengths of others: noise grows with the spread of lengths",
        "padding in the loss, in its mean, in attention and positions; tokens behind the last trained one"),
    loss_mask: ("full", ("step",), "the policy learns to write the answers of tools and environments",
        "the column loss_mask: masked tokens are read, and are in no loss, no mean and no ratio"),
    off_policy: ("full", ("step",), "rows of older weights are trained as if the present ones had drawn them: the run"
        " drifts, the more the staler they are",
        "the column logprobs is the denominator of the ratio; log-probs computed anew before the step are not"),
    token_mean: ("full", ("loss_mask",), "long responses count for more or less than the algorithm says",
        "the mean of the loss: over all trained tokens of the step, not by row"),
    algorithm: ("full", ("direction",),
        "a user's own algorithm is asked for and ignored: the run trains by another, and says nothing",
        "the factory's `algorithm`: call its advantages() and loss(), or raise ConfigError for an unsupported one"),
    resume: ("full", ("step", "logprobs"),
        "a resumed run differs from the stopped one: a jump in the curve after each resume",
        "save() and load(): the optimizer's state, its count of steps, random state and schedules, not the weights "
        "only"),
    save_is_whole: ("full", ("step",), "the checkpoint cannot be loaded after a crash, or an empty one is accepted",
        "save() into an existing directory, also over an older save; only paths below it, none stored in a file; "
        "load() of an empty one raises"),
    export: ("full", ("names",), "the final model of a run is not the trained one",
        "export(): the present weights, in the checkpoint's names and dtypes, with their configuration"),
    live_views: ("full", ("step",),
        "publishing a version changes training, or published tensors change while they are read",
        "named_weights(): the same tensors in each reading; no buffer shared by several tensors"),
    memory: ("full", ("step",), "every step leaks memory: a run is killed after some hours",
        "losses kept with their graphs, tensors of batches, metrics other than plain floats, gathered copies"),
    load_weights: ("full", ("step",),
        "after a rollback the trainer continues from unpublished weights, in part or wholly the discarded ones",
        "load_weights(): every tensor, copied; masters made from them; a new optimizer's state; names and shapes "
        "compared first"),
    small_updates: ("full", ("step", "export"), "at the small learning rates of post-training only weights near 0 are"
        " learned although the run looks well; or replicas refuse the published dtype",
        "an optimizer with bfloat16 weights: keep master weights in float32, step on them, and round only for "
        "publishing"),
})  # fmt: skip
