"""Real models in real processes take new weights in every way, and prove them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.types.events import Loaded, WeightState

PROBE = af.Probe(((1, 5, 6), (7, 8)), ((9, 10, 11), (12, 13, 14, 15)))


def workflow(model: str, weights: af.Weights, *, tokens: int = 24, **rollout: Any) -> af.Workflow:
    return af.Workflow(
        prompts={"prompt_ids": af.Ragged.of([[1, 3, 4], [1, 5], [1, 6, 7, 8]])},
        rollout=af.Rollout(
            "transformers", model=model, group_size=4, prompt="prompt_ids", threads=1,
            sampling=af.Sampling(max_tokens=tokens, seed=3), **rollout,
        ),
        reward=lambda response_ids: [float(np.mean(np.asarray(row) > 20)) for row in response_ids],
        train=af.Train("torch", model=model, lr=1e-3, threads=1),
        batch_size=16, steps=6, staleness=af.Staleness(max_staleness=2), weights=weights,
    )  # fmt: skip


@pytest.mark.parametrize(("swap", "verify"), [("boundary", ["probe", "held"]), ("in_flight", ["held"])])
def test_every_version_is_proven_in_every_replica(tmp_path: Path, endless: str, swap: Any, verify: Any) -> None:
    events: list[Any] = []

    weights = af.Weights(swap=swap, verify=verify, probe=PROBE)
    result = workflow(endless, weights).run(tmp_path / "run", on_event=events.append)

    assert result.summary["balanced"]
    assert result.summary["steps"] == 6
    assert not [e for e in events if isinstance(e, WeightState) and e.state == "failed"]
    assert max(e.version for e in events if isinstance(e, Loaded)) >= 3  # else step 5 were too stale
    late = af.staleness_of(tmp_path / "run").values
    assert 0 <= late.min() <= late.max() <= 2


def test_weights_in_a_smaller_dtype_than_the_engines_are_refused_before_anything_starts(tiny: str) -> None:
    with pytest.raises(ConfigError, match=r"train publishes weights in bfloat16, and rollout .* takes float32"):
        workflow(tiny, af.Weights(dtype="bfloat16"))
