"""Checks for long runs of a train engine: padding, masks, old rows, resumes, memory."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ....algorithms import GRPO
from ....interfaces import Algorithm, PackedTokens
from ....types import Batch, Ragged
from ..check import CheckFailed, DoesNotApply, check, expect, needs
from ..resources import Growth, Held
from ..updates import HeldUpdate
from .basic import SEEN, train_until_seen
from .lab import NOTHING, TrainLab, changed, copied, masked, plain, unlike

LOW, HIGH, WITHIN, FAR = 0.01, 3.0, 0.8, 3.0
"""A clip_low and a clip_high; a log-ratio between the two, and one beyond both."""
_learns = needs(lambda lab: lab.policy.learns, "this policy does not learn")
_grpo = needs(
    lambda lab: isinstance(lab.options["algorithm"], GRPO),
    "it is not GRPO that it trains by here",
)


@check(
    "train", "full",
    impact="log-probs sent as the present policy's are of an older one, in proofs of weights, too",
    hint="caches, an inference copy of the model, gathered parameters from before the step",
    after=("logprobs", "step"),
)  # fmt: skip
def fresh_logprobs(lab: TrainLab) -> None:
    """After a step logprobs() are of the weights in named_weights()."""
    batch = lab.batch((3, 4), seed=2)
    lab.fresh()
    for number in range(3):
        tensors = lab.tensors()
        lab.check_logprobs(batch, tensors, when=f" after {number} steps")
        lab.step(batch)
    lab.check_logprobs(batch, lab.tensors(), when=" after 3 steps")


@check(
    "train", "full",
    impact="training depends on the order of rows: groups are mixed up, or micro-batches weigh unequally",
    hint="rows of a group lie anywhere in a batch (batch.groups); a mean of the means of micro-batches is not the mean",
    after=("step",),
)  # fmt: skip
def row_order(lab: TrainLab) -> None:
    """The rows of a batch in another order make the same step."""
    batch = lab.batch((4, 2, 5, 3), seed=3, longest=48)
    order = np.random.default_rng(0).permutation(batch.rows)
    straight = lab.trained(batch)
    lab.end()
    lab.expect_same(straight, lab.trained(batch.take(order)), "the same rows in another order")


@check(
    "train", "full",
    impact="the effect of a row depends on the lengths of others: noise grows with the spread of lengths",
    hint="padding in the loss, in its mean, in attention and positions; tokens behind the last trained one",
    after=("step",),
)  # fmt: skip
def companions(lab: TrainLab) -> None:
    """The effect of a batch does not depend on tokens after the last trained token of a row."""
    short, lengths = lab.batch((4, 2), seed=4, longest=9), None
    lengths = short.ragged("response_ids").lengths
    every = np.ones(int(lengths.sum()), np.bool_)
    wanted = lab.trained(masked(short, every))
    tail = np.resize(np.concatenate(lab.policy.prompts(4, seed=45)), min(96, lab.policy.context // 3)).astype(
        np.int32
    )
    responses = list(short.ragged("response_ids"))
    responses[4] = np.concatenate([responses[4], tail])
    rewards = short.array("reward").tolist()
    long = lab.batch((4, 2), seed=4, responses=responses, rewards=rewards)
    trains = [np.arange(len(row)) < n for row, n in zip(responses, lengths, strict=True)]
    lab.end()
    lab.expect_same(
        wanted, lab.trained(masked(long, np.concatenate(trains))),
        f"one of 6 rows is followed by {len(tail)} tokens that loss_mask leaves out",
    )  # fmt: skip


@check(
    "train", "full",
    impact="the policy learns to write the answers of tools and environments",
    hint="the column loss_mask: masked tokens are read, and are in no loss, no mean and no ratio",
    after=("step",),
)  # fmt: skip
@_learns
def loss_mask(lab: TrainLab) -> None:
    """Tokens excluded by loss_mask are not trained, whatever their log-probs."""
    batch = lab.batch((4, 3), seed=5)
    behaviour = batch.ragged("logprobs")
    ends = behaviour.offsets[1:] - 1
    mask = np.random.default_rng(5).random(len(behaviour.values)) < 0.5
    mask[ends] = True
    part = masked(batch, mask)
    other = Ragged(np.where(mask, behaviour.values, 0.0).astype(np.float32), behaviour.offsets)
    wanted = lab.trained(part)
    lab.end()
    lab.expect_same(
        wanted, lab.trained(changed(part, logprobs=other)), "tokens that are left out, with log-probs of 0"
    )
    lab.end()
    try:
        lab.expect_same(wanted, lab.trained(batch), "")
    except CheckFailed:
        return
    raise CheckFailed("a batch half of whose tokens loss_mask leaves out is trained as if all were to be")


@check(
    "train", "full",
    impact="rows of older weights are trained as if the present ones had drawn them: the run drifts, the more the staler they are",
    hint="the column logprobs is the denominator of the ratio; log-probs computed anew before the step are not",
    after=("step",),
)  # fmt: skip
@_learns
@_grpo
def off_policy(lab: TrainLab) -> None:
    """The ratio is to the log-probs in the rows: a token beyond clip_low or clip_high is not
    trained, and all others are."""
    batch = lab.batch((4, 4), seed=6)
    behaviour = batch.ragged("logprobs")
    rewarded = np.repeat(batch.array("reward") > 0, behaviour.lengths)
    normal = lab.stride(batch)

    def went(up: float, down: float, clip_high: float = HIGH) -> float:
        """The part of a step on policy that is done with these log-ratios, of rewarded tokens and of others."""
        logprobs = (behaviour.values - np.where(rewarded, up, down)).astype(np.float32)
        shifted = changed(batch, logprobs=Ragged(logprobs, behaviour.offsets))
        return lab.moved(lab.trained(shifted, algorithm=GRPO(clip_low=LOW, clip_high=clip_high))) / normal

    # more likely than they were and rewarded, or less likely and not: the policy has gone there already
    below = -max(WITHIN, 1.1 * lab.tolerance)
    clipped = went(FAR, below)
    if clipped > NOTHING:
        lower = went(FAR, below, clip_high=LOW) <= NOTHING
        cause = "loss: the lower bound of the clip uses clip_high" if lower else ""
        raise CheckFailed(
            "rows whose ratio to their own log-probs is far beyond the clip range moved the weights by"
            f" {clipped:.2g} of what the same rows do when they are on policy"
            f"{': the lower bound uses clip_high, not clip_low' if lower else ''}",
            cause,
        )
    expect(
        went(WITHIN, -FAR) > NOTHING,
        f"with clip_low={LOW:g} and clip_high={HIGH:g} rewarded tokens with a ratio of {np.exp(WITHIN):.2g} are not"
        " trained: the upper bound of the clip uses clip_low, not clip_high",
        "loss: the upper bound of the clip uses clip_low",
    )
    expect(
        went(-FAR, FAR) > NOTHING,
        "rewarded tokens that have become less likely, and others that have become likelier, are not trained: the loss"
        " clips on both sides, and not only where the policy has gone already",
        "loss: the clip is applied on both sides",
    )


@check(
    "train", "full",
    impact="long responses count for more or less than the algorithm says",
    hint="the mean of the loss: over all trained tokens of the step, not by row",
    after=("loss_mask",),
)  # fmt: skip
@_learns
@_grpo
def token_mean(lab: TrainLab) -> None:
    """Under GRPO every token of a step weighs the same: a row counts like two with half of its
    tokens each."""
    algorithm = dataclasses.replace(lab.options["algorithm"], normalize_std=False)
    stream = np.concatenate(lab.policy.prompts(8, longest=24, seed=46))
    lengths = (6, 9, 4, 12, 2, 3, 1, 2)
    batch = lab.batch((4, 4), seed=7, responses=[np.roll(stream, -n)[:n] for n in lengths])
    twice = batch.take(np.concatenate([np.arange(4), np.arange(batch.rows)]))
    row = np.repeat(np.arange(twice.rows), twice.ragged("response_ids").lengths)
    first = np.concatenate([np.arange(n) < n // 2 for n in twice.ragged("response_ids").lengths])
    # the group of long rows is there twice, with the first and with the second half of each row; the other once, as it is
    trains = np.where(row < 4, first, np.where(row < 8, ~first, True))
    whole = lab.trained(batch, algorithm=algorithm)
    lab.expect_same(whole, lab.trained(masked(twice, trains), algorithm=algorithm), "rows in halves")


@check(
    "train", "full",
    impact="a user's own algorithm is asked for and ignored: the run trains by another, and says nothing",
    hint="the factory's `algorithm`: call its advantages() and loss(), or raise ConfigError for an unsupported one",
    after=("direction",),
)  # fmt: skip
@_learns
def algorithm(lab: TrainLab) -> None:
    """An algorithm unknown to the engine is applied exactly, to each token, or refused."""
    batch = lab.batch((4, 3), seed=8)
    mask = np.random.default_rng(8).random(len(batch.ragged("logprobs").values)) < 0.7
    mask[batch.ragged("logprobs").offsets[1:] - 1] = True
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
        _packed(lab, batch, mask, asked)


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
        weight = tokens.columns["weight"]
        gain = (tokens.logprobs - tokens.behaviour).exp() * tokens.advantages * weight
        return -gain.sum() / tokens.total_tokens, {}


def _packed(lab: TrainLab, batch: Batch, mask: npt.NDArray[np.bool_], asked: Opposite) -> None:
    """Verify the first step: each token once, with its own values."""
    wanted = np.flatnonzero(mask)
    parts: list[PackedTokens] = []
    while asked.given and sum(len(part.advantages) for part in parts) < len(wanted):
        parts.append(asked.given.pop(0))
    given = {
        name: np.concatenate([plain(getattr(part, name)) for part in parts])
        for name in ("advantages", "behaviour", "logprobs")
    }
    given["weight"] = np.concatenate([plain(part.columns["weight"]) for part in parts])
    all_advantages = asked.advantages(batch).values
    order = np.argsort(given["advantages"])
    want = wanted[np.argsort(all_advantages[wanted])]
    for name, theirs, near in (
        ("advantages", all_advantages, 1e-6),
        ("behaviour", batch.ragged("logprobs").values, 1e-6),
        ("logprobs", np.concatenate(lab.reference(batch)), lab.tolerance),
        ("weight", np.repeat(batch.array("weight"), batch.ragged("response_ids").lengths), 1e-6),
    ):
        have = given[name][order]
        expect(
            len(have) == len(want) and np.abs(have - theirs[want]).max() <= near,
            f"the loss was given {len(have)} {name} that are not those of the {len(want)} tokens to train",
        )
    for name, count in (("total_tokens", len(wanted)), ("total_rows", batch.rows)):
        said = {getattr(part, name) for part in parts}
        expect(said == {count}, f"the loss was told {name}={said}; the step has {count}")


@check(
    "train", "full",
    impact="a resumed run differs from the stopped one: a jump in the curve after each resume",
    hint="save() and load(): the optimizer's state, its count of steps, random state and schedules, not the weights only",
    after=("step", "logprobs"),
)  # fmt: skip
def resume(lab: TrainLab) -> None:
    """A checkpoint continues training in another engine as in its own."""
    batches = [lab.batch((4, 3), seed=50 + number) for number in range(5)]
    with lab.folder() as path:
        lab.fresh()
        for batch in batches[:3]:
            lab.step(batch)
        lab.engine.save(path)
        saved = lab.tensors()
        for batch in batches[3:]:
            lab.step(batch)
        wanted = lab.tensors()
        lab.start().logprobs(batches[0])  # what was computed before must not be what comes after
        lab.load(path)
        odd = unlike(lab.tensors(), saved)
        expect(not odd, f"after load() {len(odd)} weights are not those that were saved, {odd[:1]} for one")
        lab.check_logprobs(batches[0], saved, when=" after load()")
        for batch in batches[3:]:
            lab.step(batch)
        text, cause = (
            "3 steps, save, load and 2 more are not the same 5 steps",
            "load: the optimizer's state is not restored",
        )
        lab.expect_same(wanted, lab.tensors(), text, cause)


@check(
    "train", "full",
    impact="the checkpoint cannot be loaded after a crash, or an empty one is accepted",
    hint="save() into an existing directory, also over an older save; only paths below it, none stored in a file; load() of an empty one raises",
    after=("step",),
)  # fmt: skip
def save_is_whole(lab: TrainLab) -> None:
    """A save, also over an older one, is complete: it loads from a new location. An empty directory
    does not load."""
    batch = lab.batch((4, 3), seed=60)
    with lab.folder() as path:
        place = path / "part" / "engine"
        place.mkdir(parents=True)
        lab.fresh()
        lab.engine.save(place)
        lab.step(batch)
        lab.engine.save(place)
        wanted = lab.tensors()
        (path / "part").rename(path / "moved")
        (path / "empty").mkdir()
        lab.start()
        lab.load(path / "moved" / "engine")
        odd = unlike(lab.tensors(), wanted)
        expect(
            not odd,
            f"what was saved over an older save, and moved, loads with {len(odd)} other weights, {odd[:1]} for one",
        )
        lab.start()
        try:
            lab.load(path / "empty")
        except Exception:
            return
    raise CheckFailed("load() of an empty directory went well: a lost checkpoint would be trained on from the start")


@check(
    "train", "full",
    impact="the final model of a run is not the trained one",
    hint="export(): the present weights, in the checkpoint's names and dtypes, with their configuration",
    after=("names",),
)  # fmt: skip
def export(lab: TrainLab) -> None:
    """The exported folder has the engine's weights."""
    lab.fresh()
    lab.step(lab.batch((4, 3), seed=61))
    exported(lab)


def exported(lab: TrainLab) -> None:
    """Compare the export with named_weights(). Raises DoesNotApply for an engine without export."""
    with lab.folder() as path:
        try:
            lab.engine.export(path / "model")
        except NotImplementedError as error:
            raise DoesNotApply(str(error)) from error
        have, want = lab.policy.read(path / "model"), lab.tensors()
        odd = unlike(have, want)
        expect(
            not odd,
            f"of {len(want)} weights {len(odd)} are not in the exported folder as named_weights() gives them,"
            f" {odd[:1]} for one",
        )


@check(
    "train", "full",
    impact="publishing a version changes training, or published tensors change while they are read",
    hint="named_weights(): the same tensors in each reading; no buffer shared by several tensors",
    after=("step",),
)  # fmt: skip
def live_views(lab: TrainLab) -> None:
    """Weights stay the same until the next step, however often they are read, and reading has no
    effect."""
    batches = [lab.batch((4, 3), seed=62 + number) for number in range(3)]
    wanted = lab.trained(*batches)
    lab.start()
    for batch in batches:
        held = list(lab.engine.named_weights())
        once = lab.tensors()
        odd = unlike({name: copied(tensor) for name, tensor in held if name in once}, once)
        expect(not odd, f"{len(odd)} tensors changed while others were read, {odd[:1]} for one")
        odd = unlike(lab.tensors(), once)
        expect(not odd, f"read twice without a step, {len(odd)} tensors are not the same, {odd[:1]} for one")
        lab.step(batch)
    lab.expect_same(wanted, lab.tensors(), "steps between which the weights were read are not those without")


@check(
    "train", "full",
    impact="every step leaks memory: a run is killed after some hours",
    hint="losses kept with their graphs, tensors of batches, metrics other than plain floats, gathered copies",
    after=("step",),
)  # fmt: skip
def memory(lab: TrainLab) -> None:
    """Repeated steps take no growing memory, shared memory, GPU memory, descriptors, threads or
    processes."""
    batch = lab.batch((4, 4), seed=65)
    nbytes = sum(array.nbytes for array in lab.policy.tensors(0).values())
    steps = max(12, min(math.ceil((16 << 20) / max(nbytes, 1)), 60))

    def some(count: int) -> None:
        """Train and read the weights."""
        for _ in range(count):
            lab.step(batch)
            for _ in lab.engine.named_weights():
                pass

    lab.fresh()
    some(8)
    growth = Growth(nbytes=steps * nbytes // 4 + (4 << 20), count=steps // 2)
    for _ in range(3):
        before = Held.now()
        some(steps)
        if not growth.look(before):
            return
    raise CheckFailed(growth.said("steps", steps, nbytes))


@check(
    "train", "full",
    impact="after a rollback the trainer continues from unpublished weights, in part or wholly the discarded ones",
    hint="load_weights(): every tensor, copied; masters made from them; a new optimizer's state; names and shapes compared first",
    after=("step",),
)  # fmt: skip
@needs(lambda lab: lab.engine.restores, "it does not say that it restores (TrainEngine.restores)")
def load_weights(lab: TrainLab) -> None:
    """load_weights() takes a published version whole: named_weights() gives its bytes, and the next
    step uses a new optimizer."""
    first, second, third = (lab.batch((4, 3), seed=seed) for seed in (31, 32, 33))
    lab.trained(first)
    version = {name: copied(tensor) for name, tensor in lab.engine.named_weights()}
    lab.step(second)
    lab.step(second)
    _load(lab, version, "after two more steps")
    _refuses(lab, version)
    lab.step(third)
    went_on = lab.tensors()
    lab.end()
    lab.fresh()
    _load(lab, version, "into a new engine")
    lab.step(third)
    lab.expect_same(
        went_on, lab.tensors(), "a step after load_weights(), of an engine that had trained and of a new one"
    )


def _load(lab: TrainLab, version: dict[str, npt.NDArray[Any]], when: str) -> None:
    """Load a version, then overwrite its memory."""
    update = HeldUpdate(7, version)
    lab.take(update)
    update.scribble()
    found = {name: copied(tensor) for name, tensor in lab.engine.named_weights()}
    wrong = unlike(version, found)
    expect(
        not wrong,
        f"load_weights() {when}: named_weights() differs from what was loaded in {', '.join(sorted(wrong)[:4])}",
    )


def _refuses(lab: TrainLab, version: dict[str, npt.NDArray[Any]]) -> None:
    name = max(version, key=lambda each: version[each].nbytes)
    lacking = {other: array for other, array in version.items() if other != name}
    wider = {**version, name: np.concatenate([version[name], version[name]])}
    more = {**version, "a.weight.that.no.model.has": version[name]}
    for what, tensors in (
        ("lacks a weight", lacking),
        ("has one of another shape", wider),
        ("has one too many", more),
    ):
        try:
            lab.take(HeldUpdate(8, tensors))
        except CheckFailed:
            raise
        except Exception:
            found = {each: copied(tensor) for each, tensor in lab.engine.named_weights()}
            expect(
                not unlike(version, found), f"load_weights() of a version that {what} raised, and has changed weights"
            )
        else:
            raise CheckFailed(f"load_weights() took a version that {what}")
