"""Checks every run needs of a train engine."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from ....errors import SchemaError
from ....types import Batch, Ragged, one_version
from ..check import CheckFailed, checks, expect, needs
from ..resources import check_given_back
from .lab import NOTHING, TrainLab, changed, copied, unlike

ODD_OPTION = "an_option_that_no_engine_has"
TRIES = 20
"""The most steps on one batch until its effect exceeds rounding, for small learning rates."""
SEEN = 1e-3
learns = needs(lambda lab: lab.policy.learns, "this policy does not learn")


def made(lab: TrainLab) -> None:
    """The factory makes an engine of model, algorithm and options, and refuses unknown options."""
    engine = lab.start()
    for name in ("train_step", "logprobs", "save", "load", "close"):
        awaited = inspect.iscoroutinefunction(getattr(engine, name))
        expect(not awaited, f"{name}() is a coroutine function: the worker would never wait for it")
    try:
        lab.start(**{ODD_OPTION: 1})
    except CheckFailed:
        raise
    except Exception:
        return
    lab.end()
    raise CheckFailed(f"the factory took the option {ODD_OPTION!r} in silence, and would any misspelt one")


def names(lab: TrainLab) -> None:
    """named_weights() yields the whole policy under the checkpoint's names. Before any step it
    equals the checkpoint bit for bit."""
    have: dict[str, Any] = {}
    want = lab.policy.tensors(0)
    for name, tensor in lab.fresh().named_weights():
        expect(name not in have, f"named_weights() gives {name!r} twice")
        have[name] = array = copied(tensor)
        twin = [other for other in have if other != name and have[other].tobytes() == array.tobytes()]
        more = f"; it is the same as {twin[0]!r}: tied weights are given once" if twin else ""
        prefix = next((name.removesuffix(right) for right in want if name.endswith(right)), "")
        cause = f"named_weights: names have the prefix {prefix!r}" if prefix else ""
        cause = f"named_weights: tied weights are given twice, {name!r} too" if twin else cause
        expect(name in want, f"named_weights() gives {name!r}, which the checkpoint does not have{more}", cause)
        right, shape = want[name], list(want[name].shape)
        turned = array.ndim == 2 and array.shape == right.shape[::-1] != right.shape
        cause = f"named_weights: {name!r} is transposed" if turned else ""
        mine = list(array.shape)
        expect(mine == shape, f"{name!r} has the shape {mine}; in the checkpoint it has the shape {shape}", cause)
        expect(array.dtype == right.dtype, f"{name!r} is {array.dtype}; in the checkpoint it is {right.dtype}")
    missing = sorted(want.keys() - have.keys())
    cause = f"named_weights: {', '.join(map(repr, missing[:3]))} missing"
    expect(not missing, f"named_weights() does not give {missing[:4]}, which the checkpoint has", cause)
    odd = sorted(unlike(have, want))
    turns = [name for name in odd if want[name].ndim == 2 and np.array_equal(have[name].T, want[name])]
    cause = f"named_weights: {turns[0]!r} is transposed" if turns else ""
    expect(not odd, f"before any step {len(odd)} tensors are not what the checkpoint has, {odd[:1]} for one", cause)


def step(lab: TrainLab) -> None:
    """A step changes the weights, reports finite metrics, and writes nothing into the batch."""
    batch = lab.batch((4, 3, 5))
    before = _raw(batch)
    lab.fresh()
    result = lab.step(batch)
    odd = [name for name, bits in _raw(batch).items() if bits != before[name]]
    expect(not odd, f"train_step() wrote into the batch: {', '.join(odd)}")
    for name, value in result.metrics.items():
        is_plain = isinstance(name, str) and isinstance(value, (int, float))
        expect(is_plain, f"metric {name!r} is a {type(value).__name__}; metrics are plain floats by name")
        expect(np.isfinite(value), f"metric {name!r} is {value}")
    _filtered(result.filtered, batch.rows)
    after = lab.tensors()
    broken = [name for name, array in after.items() if not np.isfinite(array.astype(np.float64)).all()]
    expect(not broken, f"after a step {broken[:4]} hold numbers that are not finite")
    expect(
        unlike(after, lab.policy.tensors(0)),
        "a step on rows with advantages changed no bit of any weight. Is the learning rate too small for the"
        " dtype, or does it begin at 0?",
    )


def logprobs(lab: TrainLab) -> None:
    """Log-probs of a batch of very different lengths are the policy's, row by row, as of each row alone."""
    lab.fresh()
    long = min(lab.policy.context // 2 - 16, 96)
    prompts, streams = lab.policy.prompts(4, longest=40, seed=40), lab.policy.prompts(8, longest=long, seed=41)
    lengths = (1, long, 2, 3, 17, 1, 33, 5)
    responses = [np.resize(stream, length) for stream, length in zip(streams, lengths, strict=True)]
    batch = lab.batch((2, 2, 2, 2), prompts=prompts, responses=responses)
    lab.check_logprobs(batch)
    for row in (0, 1):
        lab.check_logprobs(batch.take([row]), when=" of one row alone")
    lab.check_logprobs(batch.take([5, 1, 0]), when=" of rows in another order")


def bad_batches(lab: TrainLab) -> None:
    """Invalid rows are refused with SchemaError, and leave no trace."""
    good = lab.batch()
    lab.fresh()
    before = lab.tensors()
    for what, batch in _bad(lab, good).items():
        try:
            lab.step(batch)
        except SchemaError:
            lab.expect_bits(
                lab.tensors(), before, f"{what} was refused, and {{count}} weights are not what they were"
            )
        except CheckFailed:
            raise
        except Exception as error:
            raise CheckFailed(f"{what} raised {type(error).__name__} ({error}), not SchemaError") from error
        else:
            raise CheckFailed(f"{what} was trained on")
    after = lab.further(good)
    lab.expect_same(after, lab.trained(good), "a good batch after bad ones does not do what it does alone")


@learns
def no_gradient(lab: TrainLab) -> None:
    """Groups of equal rewards change nothing, and rows with an advantage are never reported as filtered."""
    normal = lab.stride(lab.batch((3, 5, 7)))
    equal = lab.batch((3, 5, 7), rewards=[0.1] * 3 + [0.7] * 5 + [1 / 3] * 7)
    lab.fresh()
    lab.step(equal)
    went = lab.moved(lab.tensors())
    expect(
        went <= NOTHING * normal,
        f"a step on groups of equal rewards moved the weights by {went / normal:.2g} of what a step on others does",
    )
    mixed = lab.batch((3, 4), rewards=[0.1] * 3 + [0.0, 1.0, 0.5, 0.0])
    left_out = _filtered(lab.step(mixed).filtered, mixed.rows)
    expect(not left_out[3:].any(), "rows of a group with different rewards are reported as filtered")


@learns
def direction(lab: TrainLab) -> None:
    """After a step rewarded responses are more likely than the others of their group."""
    batch = lab.batch((4, 4, 4, 4), seed=1)
    rewarded = np.repeat(batch.array("reward") > 0, batch.ragged("response_ids").lengths)
    gain = train_until_seen(lab, batch, np.where(rewarded, 1 / rewarded.sum(), -1 / (~rewarded).sum()))
    expect(
        gain > SEEN,
        f"trained on a batch, its rewarded responses became {gain:+.2g} nats a token more likely than the others",
        "loss: the sign is reversed" if gain < -SEEN else "",
    )


@learns
def every_token(lab: TrainLab) -> None:
    """The first and the last token of a response are trained like those between them."""
    (prompt,) = lab.policy.prompts(1, seed=42)
    one, other = np.unique(np.concatenate(lab.policy.prompts(4, seed=43)))[:2].astype(np.int32)
    begun = lab.policy.prompts(1, longest=9, seed=44)[0]
    for what, start in (("only", begun[:0]), ("last", begun)):
        responses = [np.append(start, token).astype(np.int32) for token in (one, other, one, other)]
        batch = lab.batch((4,), prompts=[prompt], responses=responses, rewards=[1.0, 0.0, 1.0, 0.0])
        weights = np.zeros(len(batch.ragged("response_ids").values))
        weights[batch.ragged("response_ids").offsets[1:] - 1] = [0.5, -0.5, 0.5, -0.5]
        gain = train_until_seen(lab, batch, weights)
        expect(
            gain > SEEN,
            f"responses differ in their {what} token, and one is rewarded: it became {gain:+.2g} nats more likely"
            " than the other. It is not trained",
            f"loss: the {what} token of a response is not trained" if abs(gain) <= SEEN else "",
        )


def closes(lab: TrainLab) -> None:
    """close() releases the engine's resources: threads, processes, shared memory, descriptors."""
    batch = lab.batch()
    lab.end()
    check_given_back(lambda: lab.trained(batch), lab.end, limit_s=lab.limit_s)


def train_until_seen(lab: TrainLab, batch: Batch, weights: Any, **options: Any) -> float:
    """Return the weighted change of the batch's log-probs (nats) after a step of a new engine.

    If one step is too small to measure, take several.
    """
    lab.start(**options) if options else lab.fresh()
    before, gain = np.concatenate(lab.reference(batch)), 0.0
    for _ in range(TRIES):
        lab.step(batch)
        gain = float(((np.concatenate(lab.reference(batch, lab.tensors())) - before) * weights).sum())
        if abs(gain) > SEEN:
            break
    return gain


def _bad(lab: TrainLab, good: Batch) -> dict[str, Batch]:
    reward, behaviour, ids = good.array("reward").copy(), good.ragged("logprobs"), good.ragged("response_ids")
    reward[5], rows, vocabulary = np.nan, list(behaviour), lab.policy.vocabulary
    bad = {
        "a reward that is NaN": changed(good, reward=reward),
        "a response without log-probs": changed(good, logprobs=Ragged.of([*rows[:2], rows[2][:0], *rows[3:]])),
        "a batch without the column logprobs": changed(good, logprobs=None),
        "a batch without the column reward": changed(good, reward=None),
    }
    if not lab.policy.learns:
        return bad
    for token in (vocabulary, -1):
        values = ids.values.copy()
        values[7] = token
        said = f"token {token}, which is not in the vocabulary of {vocabulary},"
        bad[said] = changed(good, response_ids=Ragged(values, ids.offsets))
    numbers = behaviour.values.copy()
    numbers[3] = np.nan
    bad["a log-prob that is NaN"] = changed(good, logprobs=Ragged(numbers, behaviour.offsets))
    context = lab.policy.context
    if context <= 1 << 16:
        long = np.resize(ids.values, (good.rows, context)).astype(np.int32)
        logprobs, spans = np.full(long.shape, -1.0, np.float32), one_version(0, np.full(good.rows, context))
        columns = {
            "response_ids": Ragged.of(list(long)),
            "logprobs": Ragged.of(list(logprobs)),
            "version_spans": spans,
        }
        bad[f"a row longer than the context of {context}"] = changed(good, **columns)
    return bad


def _filtered(filtered: Any, rows: int) -> Any:
    if filtered is None:
        return np.zeros(rows, np.bool_)
    right = isinstance(filtered, np.ndarray) and filtered.dtype == np.bool_ and filtered.shape == (rows,)
    expect(right, f"filtered is {filtered!r:.80}; it is None or a bool array ({rows},)")
    return filtered


def _raw(batch: Batch) -> dict[str, bytes]:
    raw = {"ids": batch.ids.tobytes(), "groups": batch.groups.tobytes()}
    for name, column in batch.columns.items():
        offsets = b"" if column.offsets is None else column.offsets.tobytes()
        raw[f"column {name!r}"] = column.values.tobytes() + offsets
    return raw


CHECKS = checks("train", {
    made: ("basic", (),
        "the worker cannot make the engine, or a misspelt option is ignored and the run trains by a default",
        "the factory: model, algorithm and options by keyword; no unread **kwargs; methods are no coroutine "
        "functions"),
    names: ("basic", ("made",), "rollouts never get the trained weights, or get them under unknown names",
        "named_weights(): names, shapes and dtypes of the Hugging Face checkpoint; no wrapper's prefix; tied "
        "weights once"),
    step: ("basic", ("names",),
        "nothing is learned although the run looks well; or rows still read by others are changed",
        "train_step(): zero the gradient, backward, the optimizer's step; metrics as plain floats; the batch is "
        "read-only"),
    logprobs: ("basic", ("made",),
        "importance ratios compare two different things, and proofs of weights fail or prove nothing",
        "logprobs(): padding, attention mask, positions; the log-prob of a token is at the position before it; "
        "natural logs over all of the vocabulary"),
    bad_batches: ("basic", ("step",),
        "one bad row makes every weight NaN, or is trained like a good one; or the run ends without naming the row",
        "look at the whole batch before anything is computed, and raise SchemaError naming the rows"),
    no_gradient: ("basic", ("step",),
        "groups of equal rewards move the policy by rounding errors, amplified by the optimizer to a full step",
        "advantages of equal rewards must be exactly 0: rounding of the mean leaves 1e-9, and Adam normalises it to"
        " a full step"),
    direction: ("basic", ("step",), "the policy learns to do worse, or by chance",
        "the sign of the loss; the assignment of advantages to rows and groups"),
    every_token: ("basic", ("direction",),
        "the end token is never learned, and responses run on to the limit; or the first token is not",
        "the shift between inputs and targets: a response of n tokens has n log-probs, the first one after the "
        "prompt's last token"),
    closes: ("basic", ("step",), "processes of an ended run stay, with their memory and their GPUs",
        "close(): join threads, end processes and process groups"),
}, alone=("closes",))  # fmt: skip
