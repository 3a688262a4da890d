"""Checks of weight loads: stale caches, refusals, and interrupted loads."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....errors import EngineError
from ..check import CheckFailed, check, expect
from .lab import RolloutLab

NOT_FOLLOWED = "load_weights: later versions are not loaded"
TORN = "load_weights: a load that breaks off leaves a mixture of two versions"


@check(
    "rollout", "full",
    impact="responses use a KV cache computed with old weights: their tokens belong to no version",
    hint="prefix or KV caches: empty them in load_weights(), after the last request under the old weights has ended",
    after=("update",),
)  # fmt: skip
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


@check(
    "rollout", "full",
    impact="an unknown tensor is silently dropped: the engine follows the trainer only in part",
    hint="load_weights(): compare all names with the model's, and raise WeightMismatch with the unknown ones",
    after=("update",),
)  # fmt: skip
async def unknown_tensor(lab: RolloutLab) -> None:
    """A tensor unknown to the engine is refused by name, and never reported as loaded."""
    version = lab.version + 1
    tensors = {**lab.policy.tensors(version), "model.layers.0.not_there.weight": np.ones((4, 4), np.float32)}
    taken = await _refused(lab, lab.make_update(version, tensors))
    expect(
        taken is None or "model.layers.0.not_there.weight" not in taken,
        "load_weights() said that it took 'model.layers.0.not_there.weight', which no model has",
    )
    await _sound(lab, version, "a version with a tensor too many")


@check(
    "rollout", "full",
    impact="a missing tensor silently keeps its old value: the engine follows the trainer only in part",
    hint="load_weights(): compare the update's names with the model's, tied ones once, and raise WeightMismatch with the missing ones",
    after=("update",),
)  # fmt: skip
async def missing_tensor(lab: RolloutLab) -> None:
    """A version without a tensor of the model is refused, and never reported as whole."""
    version = lab.version + 1
    tensors = lab.policy.tensors(version)
    names = [name for name, array in tensors.items() if array.size]
    for name in dict.fromkeys((max(names, key=lambda name: tensors[name].size), names[-1])):
        update = lab.make_update(version, {other: array for other, array in tensors.items() if other != name})
        taken = await _refused(lab, update)
        expect(
            taken != set(update.tensors),
            f"load_weights() took a version without {name!r}, which the model has, and returned the other"
            f" {len(update.tensors)} names, as if it were whole",
        )
    await _sound(lab, version, "a version with a tensor too few")


@check(
    "rollout", "full",
    impact="weights are read in the wrong order, or cut off, and the model talks nonsense",
    hint="load_weights(): compare shapes before anything is written; a view or a broadcast hides the difference",
    after=("update",),
)  # fmt: skip
async def misshapen_tensor(lab: RolloutLab) -> None:
    """A tensor of another shape is refused."""
    version = lab.version + 1
    tensors = dict(lab.policy.tensors(version))
    name = max((n for n, a in tensors.items() if a.ndim == 2), key=lambda n: tensors[n].size)
    right = tensors[name]
    for shaped in (right.T, right[1:], right.reshape(-1)):
        if shaped.shape == right.shape:
            continue
        update = lab.make_update(version, {**tensors, name: np.ascontiguousarray(shaped)})
        taken = await _refused(lab, update)
        expect(
            taken is None or lab.engine.weight_name(name) not in taken,
            f"{name!r} was taken as {list(shaped.shape)}, and the model has {list(right.shape)}",
        )
    await _sound(lab, version, "a misshapen version")


@check(
    "rollout", "full",
    impact="after a broken transfer the engine answers from a mixture of two versions, and says it is one of them",
    hint="load_weights(): check before writing; when it breaks off later, refuse requests until a whole version is loaded",
    after=("update",),
)  # fmt: skip
async def torn_update(lab: RolloutLab) -> None:
    """An interrupted load raises. Until a load is whole, the engine answers by the old version, or
    not at all."""
    prompts = lab.policy.prompts(3, seed=22)
    before, version = lab.version, lab.version + 1
    count = len(lab.policy.tensors(version))
    for breaks_after in {1, count // 2, count - 1} & set(range(count)):
        taken = await _refused(lab, lab.make_update(version, breaks_after=breaks_after))
        expect(
            taken is None,
            f"load_weights() returned, as if all was well, when tensor {breaks_after} of {count} could not be read",
        )
        try:
            await lab.check_greedy(prompts, when=" after a load that broke off", cause=TORN)
        except EngineError:
            pass  # it may refuse, in so many words
        except CheckFailed as failed:
            new = (
                "it is on the new version" if f"of version {version}" in str(failed) else "it answers from a mixture"
            )
            raise CheckFailed(
                f"{failed}. The load broke off before tensor {breaks_after} of {count}: {new}, and does not refuse",
                failed.cause,
                failed.hint,
            ) from None
    await lab.update(before)
    await lab.check_greedy(prompts, when=" after the version before was loaded again")
    await lab.update(version)
    await lab.check_greedy(prompts, when=" after the version was loaded whole")


@check(
    "rollout", "full",
    impact="a version's memory is reused for the next one while the engine still computes from it: weights change at random",
    hint="load_weights(): copy each tensor; the update's memory is valid only until the return",
    after=("update",),
)  # fmt: skip
async def keeps_no_view(lab: RolloutLab) -> None:
    """After load_weights() returns, the memory of the update has no influence."""
    update = lab.make_update(lab.version + 1)
    await lab.load(update)
    update.scribble()
    await lab.check_greedy(
        lab.policy.prompts(3, seed=23),
        when=" after the update's memory was written over",
        cause="load_weights: the engine keeps views of the update's memory",
    )


@check(
    "rollout", "full",
    impact="replicas stop following the trainer after the first few versions",
    hint="one-time actions of load_weights(): hooks, buffers, flags set and never reset",
    after=("update",),
)  # fmt: skip
async def updates_in_a_row(lab: RolloutLab) -> None:
    """Several versions in turn, one twice, and an older one again, as after a rollback, are loaded."""
    first = lab.version + 1
    for version in (first, first + 1, first + 2, first + 2, first):
        await lab.update(version)
        await lab.check_greedy(
            lab.policy.prompts(2, seed=version),
            when=f" after version {version}",
            cause=NOT_FOLLOWED,
        )


async def _refused(lab: RolloutLab, update: Any) -> set[str] | None:
    """Return the loaded names, or None if the load raised. The lab's version stays."""
    held = lab.version
    try:
        return set(await lab.load(update))
    except Exception:
        return None
    finally:
        lab.version = held


async def _sound(lab: RolloutLab, version: int, after: str) -> None:
    """Load a whole version and verify answers."""
    await lab.update(version)
    await lab.check_greedy(lab.policy.prompts(3, seed=33), when=f" after {after} and then a whole one")
