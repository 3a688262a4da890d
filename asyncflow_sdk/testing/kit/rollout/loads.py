"""Checks of weight loads: stale caches, refusals, interrupted loads; and of the engine's evidence for
its weights, the basis of every proof of a swap."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ....errors import EngineError, WeightError
from ....interfaces import Completion
from ....weights import check_held
from ..check import CheckFailed, checks, expect, needs
from .lab import RolloutLab

NOT_FOLLOWED = "load_weights: later versions are not loaded"
TORN = "load_weights: a load that breaks off leaves a mixture of two versions"
UNKNOWN = "model.layers.0.not_there.weight"


async def stale_cache(lab: RolloutLab) -> None:
    """A prompt computed under the old weights is computed again under the new ones, also as a
    prefix of another prompt."""
    prompt = np.resize(lab.policy.prompts(1, seed=20)[0], min(64, lab.context - 24)).astype(np.int32)
    longer = np.concatenate([prompt, lab.policy.prompts(1, seed=21)[0]])[: lab.context - 10]
    for _ in range(2):
        await lab.check_greedy([prompt])
        await lab.check_greedy([prompt])  # from a cache, if there is one
        await lab.update()
        try:
            await lab.check_greedy([prompt, longer], when=" of a prompt seen before the update", cause=NOT_FOLLOWED)
        except CheckFailed as failed:
            raise await lab.blame_cache(failed) from None


async def unknown_tensor(lab: RolloutLab) -> None:
    """A tensor unknown to the engine is refused by name, and never reported as loaded."""
    tensors = {**lab.policy.tensors(lab.version + 1), UNKNOWN: np.ones((4, 4), np.float32)}
    said = f"load_weights() said that it took {UNKNOWN!r}, which no model has"
    await _check_refused(lab, tensors, lambda taken: UNKNOWN in taken, said)
    await _check_whole(lab, "a version with a tensor too many")


async def missing_tensor(lab: RolloutLab) -> None:
    """A version without a tensor of the model is refused, and never reported as whole."""
    tensors = lab.policy.tensors(lab.version + 1)
    names = [name for name, array in tensors.items() if array.size]
    for name in dict.fromkeys((max(names, key=lambda name: tensors[name].size), names[-1])):
        others = {other: array for other, array in tensors.items() if other != name}
        loaded = {lab.engine.weight_name(other) for other in others}
        said = (
            f"load_weights() took a version without {name!r}, which the model has, and returned the other"
            f" {len(loaded)} names, as if it were whole"
        )
        await _check_refused(lab, others, lambda taken, loaded=loaded: taken == loaded, said)  # type: ignore[misc]
    await _check_whole(lab, "a version with a tensor too few")


async def misshapen_tensor(lab: RolloutLab) -> None:
    """A tensor of another shape is refused."""
    tensors = dict(lab.policy.tensors(lab.version + 1))
    name = max((n for n, a in tensors.items() if a.ndim == 2), key=lambda n: tensors[n].size)
    right, own = tensors[name], lab.engine.weight_name(name)
    for shaped in (right.T, right[1:], right.reshape(-1)):
        if shaped.shape != right.shape:
            said = f"{name!r} was taken as {list(shaped.shape)}, and the model has {list(right.shape)}"
            bad = {**tensors, name: np.ascontiguousarray(shaped)}
            await _check_refused(lab, bad, lambda taken: own in taken, said)
    await _check_whole(lab, "a misshapen version")


async def _check_refused(
    lab: RolloutLab, tensors: Mapping[str, Any], wrong: Callable[[set[str]], bool], said: str
) -> None:
    """Load bad tensors as the next version: it raises, or its loaded names are not ``wrong``."""
    taken = await _load(lab, lab.make_update(lab.version + 1, tensors))
    expect(taken is None or not wrong(taken), said)


async def _load(lab: RolloutLab, update: Any) -> set[str] | None:
    """Return the loaded names, or None if the load raised. The lab's version stays."""
    held = lab.version
    try:
        return set(await lab.load(update))
    except Exception:
        return None
    finally:
        lab.version = held


async def _check_whole(lab: RolloutLab, after: str) -> None:
    await lab.update()
    await lab.check_greedy(lab.policy.prompts(3, seed=33), when=f" after {after} and then a whole one")


async def torn_update(lab: RolloutLab) -> None:
    """An interrupted load raises. Until a load is whole, the engine answers by the old version, or not at all."""
    prompts = lab.policy.prompts(3, seed=22)
    before, version = lab.version, lab.version + 1
    count = len(lab.policy.tensors(version))
    for breaks_after in {1, count // 2, count - 1} & set(range(count)):
        taken = await _load(lab, lab.make_update(version, breaks_after=breaks_after))
        said = f"load_weights() returned, as if all was well, when tensor {breaks_after} of {count} could not be read"
        expect(taken is None, said)
        try:
            await lab.check_greedy(prompts, when=" after a load that broke off", cause=TORN)
        except EngineError:
            pass  # it may refuse, in so many words
        except CheckFailed as failed:
            is_new = f"of version {version}" in str(failed)
            held = "it is on the new version" if is_new else "it answers from a mixture"
            said = f"The load broke off before tensor {breaks_after} of {count}: {held}, and does not refuse"
            raise CheckFailed(f"{failed}. {said}", failed.cause, failed.hint) from None
    for each, what in ((before, "the version before was loaded again"), (version, "the version was loaded whole")):
        await lab.update(each)
        await lab.check_greedy(prompts, when=f" after {what}")


async def keeps_no_view(lab: RolloutLab) -> None:
    """After load_weights() returns, the memory of the update has no influence."""
    update = lab.make_update(lab.version + 1)
    await lab.load(update)
    update.scribble()
    cause = "load_weights: the engine keeps views of the update's memory"
    prompts, when = lab.policy.prompts(3, seed=23), " after the update's memory was written over"
    await lab.check_greedy(prompts, when=when, cause=cause)


async def updates_in_a_row(lab: RolloutLab) -> None:
    """Several versions in turn, one twice, and an older one again, as after a rollback, are loaded."""
    first = lab.version + 1
    for version in (first, first + 1, first + 2, first + 2, first):
        await lab.update(version)
        prompts = lab.policy.prompts(2, seed=version)
        await lab.check_greedy(prompts, when=f" after version {version}", cause=NOT_FOLLOWED)


@needs(lambda lab: lab.engine.capabilities.logprobs, "it cannot score given responses")
async def scores(lab: RolloutLab) -> None:
    """logprobs() of given responses are those of the loaded weights."""
    prompts, responses = lab.policy.prompts(5, seed=30), lab.policy.prompts(5, longest=20, seed=31)
    for _ in range(2):
        scored = await lab.engine.logprobs([p.tolist() for p in prompts], [r.tolist() for r in responses])
        expect(len(scored) == len(responses), f"logprobs() gave {len(scored)} rows for {len(responses)} responses")
        for prompt, response, got in zip(prompts, responses, scored, strict=True):
            count = f"logprobs() gave {len(got)} numbers for a response of {len(response)} tokens"
            expect(len(got) == len(response), count)
            lab.check_logprobs(prompt, Completion(0, response, np.asarray(got, np.float32)), when=" by logprobs()")
        await lab.update()


@needs(lambda lab: lab.engine.capabilities.held_weights, "it does not hold weights as they were published")
async def holds(lab: RolloutLab) -> None:
    """held_weights() are the loaded version, byte for byte."""
    for _ in range(2):
        version = await lab.update()
        try:
            _check_held(lab, version)
        except WeightError as error:
            raise CheckFailed(f"{error}{_held_version(lab)}") from None


def _check_held(lab: RolloutLab, version: int) -> None:
    update = lab.make_update(version)
    try:
        check_held(update, lab.engine.held_weights())
    finally:
        update.release()


def _held_version(lab: RolloutLab) -> str:
    for version in {max(lab.version - 1, 0), 0}:
        with contextlib.suppress(Exception):
            _check_held(lab, version)
            return f": they are those of version {version}"
    return ""


CHECKS = checks("rollout", {
    stale_cache: ("full", ("update",),
        "responses use a KV cache computed with old weights: their tokens belong to no version",
        "prefix or KV caches: empty them in load_weights(), after the last request under the old weights has ended"),
    unknown_tensor: ("full", ("update",),
        "an unknown tensor is silently dropped: the engine follows the trainer only in part",
        "load_weights(): compare all names with the model's, and raise WeightMismatch with the unknown ones"),
    missing_tensor: ("full", ("update",),
        "a missing tensor silently keeps its old value: the engine follows the trainer only in part",
        "load_weights(): compare the update's names with the model's, tied ones once, and raise WeightMismatch with"
        " the missing ones"),
    misshapen_tensor: ("full", ("update",),
        "weights are read in the wrong order, or cut off, and the model talks nonsense",
        "load_weights(): compare shapes before anything is written; a view or a broadcast hides the difference"),
    torn_update: ("full", ("update",),
        "after a broken transfer the engine answers from a mixture of two versions, and says it is one of them",
        "load_weights(): check before writing; when it breaks off later, refuse requests until a whole version is "
        "loaded"),
    keeps_no_view: ("full", ("update",), "a version's memory is reused for the next one while the engine still "
        "computes from it: weights change at random",
        "load_weights(): copy each tensor; the update's memory is valid only until the return"),
    updates_in_a_row: ("full", ("update",), "replicas stop following the trainer after the first few versions",
        "one-time actions of load_weights(): hooks, buffers, flags set and never reset"),
    scores: ("full", ("update",),
        "the proof of each swap is worthless: missing weights go unnoticed, or correct ones are refused",
        "logprobs(): the same numbers as generate() gives at temperature 1, for any prompts and responses"),
    holds: ("full", ("update",),
        "the proof of each swap is worthless: the hashed tensors are not the ones used to compute",
        "held_weights(): the live parameters, in the names, dtypes and shapes of the loaded version"),
})  # fmt: skip
