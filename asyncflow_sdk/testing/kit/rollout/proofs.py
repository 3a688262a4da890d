"""Checks of the engine's evidence for its weights, the basis of every proof of a swap."""

from __future__ import annotations

import contextlib

import numpy as np

from ....errors import WeightError
from ....interfaces import Completion
from ....weights import check_held
from ..check import CheckFailed, check, expect, needs
from .lab import RolloutLab


@check(
    "rollout", "full",
    impact="the proof of each swap is worthless: missing weights go unnoticed, or correct ones are refused",
    hint="logprobs(): the same numbers as generate() gives at temperature 1, for any prompts and responses",
    after=("update",),
)  # fmt: skip
@needs(lambda lab: lab.engine.capabilities.logprobs, "it cannot score given responses")
async def scores(lab: RolloutLab) -> None:
    """logprobs() of given responses are those of the loaded weights."""
    prompts, responses = lab.policy.prompts(5, seed=30), lab.policy.prompts(5, longest=20, seed=31)
    for _ in range(2):
        scored = await lab.engine.logprobs([p.tolist() for p in prompts], [r.tolist() for r in responses])
        expect(len(scored) == len(responses), f"logprobs() gave {len(scored)} rows for {len(responses)} responses")
        for prompt, response, got in zip(prompts, responses, scored, strict=True):
            expect(
                len(got) == len(response),
                f"logprobs() gave {len(got)} numbers for a response of {len(response)} tokens",
            )
            lab.check_logprobs(prompt, Completion(0, response, np.asarray(got, np.float32)), when=" by logprobs()")
        await lab.update()


@check(
    "rollout", "full",
    impact="the proof of each swap is worthless: the hashed tensors are not the ones used to compute",
    hint="held_weights(): the live parameters, in the names, dtypes and shapes of the loaded version",
    after=("update",),
)  # fmt: skip
@needs(lambda lab: lab.engine.capabilities.held_weights, "it does not hold weights as they were published")
async def holds(lab: RolloutLab) -> None:
    """held_weights() are the loaded version, byte for byte."""
    for _ in range(2):
        version = await lab.update()
        update = lab.make_update(version)
        try:
            check_held(update, lab.engine.held_weights())
        except WeightError as error:
            raise CheckFailed(f"{error}{_of_version(lab)}") from None
        finally:
            update.release()


def _of_version(lab: RolloutLab) -> str:
    for version in {max(lab.version - 1, 0), 0}:
        update = lab.make_update(version)
        with contextlib.suppress(Exception):
            check_held(update, lab.engine.held_weights())
            return f": they are those of version {version}"
    return ""
