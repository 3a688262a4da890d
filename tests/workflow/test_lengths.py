"""Which lengths are trained, of those that were generated."""

from pathlib import Path

import numpy as np
import pytest
from echo_runs import echo_workflow, events_of

import asyncflow_sdk as af

PROMPTS = af.Ragged.of([[1] * (3 + i % 4) for i in range(24)] + [[1] * 250] * 8)


def heavy_tailed(policy: str, token_s: float) -> af.Workflow:
    """A quarter of the responses is fifty times as long as the others, and takes as much longer."""
    return echo_workflow(
        prompts={"prompt_ids": PROMPTS},
        rollout={"group_size": 2, "in_flight": True, "token_s": token_s, "delay_s": 0.0, "spread": 0.0},
        weights=af.Weights(swap="in_flight"),
        staleness=af.Staleness(max_staleness=1, policy=policy),
        batch_size=8,
        steps=10,
    )


def test_a_run_that_gives_long_responses_up_says_so(tmp_path: Path) -> None:
    result = heavy_tailed("drop", 0.004).run(tmp_path / "run")

    lengths = result.summary["lengths"]
    assert result.summary["rows"]["expired"] > 0
    assert lengths["ratio"]["mean"] < 0.8
    (expired,) = [
        ends for end, ends in lengths["ended"].items() if end.startswith("expired: older than max_staleness 1")
    ]
    assert expired["unfinished"]["mean"] > lengths["trained"]["p50"]
    (said,) = [warning for warning in result.summary["warnings"] if "what is trained is shorter" in warning]
    assert "standard errors; most of the others ended expired (older than max_staleness 1 (policy 'drop'))" in said
    assert said in [note["text"] for note in events_of(tmp_path / "run", "note") if note.get("level") == "warning"]


def test_a_run_that_trains_what_it_generates_has_a_ratio_of_one(tmp_path: Path) -> None:
    result = heavy_tailed("wait", 0.0).run(tmp_path / "run")

    lengths = result.summary["lengths"]
    assert set(lengths["ratio"].values()) == {1.0}
    trained = np.concatenate([batch.ragged("response_ids").lengths for _, batch in af.read_steps(tmp_path / "run")])
    assert lengths["trained"]["rows"] == len(trained) == 80
    assert lengths["trained"]["mean"] == pytest.approx(trained.mean(), abs=0.01)
    assert lengths["trained"]["p50"] == np.quantile(trained, 0.5, method="inverted_cdf")
    assert lengths["trained"]["p99"] == pytest.approx(trained.max(), rel=0.09)
    assert result.summary["warnings"] == []


def test_staleness_is_told_apart_by_where_it_came_from(tmp_path: Path) -> None:
    result = heavy_tailed("wait", 0.001).run(tmp_path / "run")

    ages = dict(af.ages_of(tmp_path / "run"))
    flying, queued = (np.concatenate([getattr(a, part) for a in ages.values()]) for part in ("in_flight", "in_queue"))
    assert flying.min() >= 0
    assert queued.min() >= 0
    assert (flying + queued == af.staleness_of(tmp_path / "run").values).all()
    said = result.summary["staleness"]
    assert said["in_flight"] == {"mean": pytest.approx(flying.mean(), abs=1e-4), "max": flying.max()}
    assert said["in_queue"] == {"mean": pytest.approx(queued.mean(), abs=1e-4), "max": queued.max()}
    assert said["total"]["max"] == result.summary["staleness_max"]
    assert flying.any()  # steps were published while long responses were generated
    assert list(result.summary["publish_lag"]) == ["rollout-0"]
    steps = {event["step"]: event["metrics"] for event in events_of(tmp_path / "run", "step")}
    assert {
        step: metrics.items() >= ages[step].metrics().items() for step, metrics in steps.items()
    } == dict.fromkeys(ages, True)
