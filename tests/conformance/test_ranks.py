"""Train engines of several processes are asked what those of one are, and their own faults are seen."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bigram_ranks import BigramRanks
from waiting import until

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.testing.kit import ranks
from asyncflow_sdk.testing.kit.conformance import BoundCheck

right = Conformance("train", BigramRanks, world_size=2)
pytestmark = pytest.mark.usefixtures("warm")


@right.parametrize
def test_two_ranks_pass_as_one_engine(check: BoundCheck) -> None:
    check()


@pytest.mark.parametrize(
    ("fault", "check", "says"),
    [
        ("sums no gradients", "row_order", "of their size apart"),
        ("refuses alone", "bad_batches", r"rank \d does not come back from train_step\(\), and rank \d raised SchemaError"),
        ("publishes half", "names", "leave a gap"),
        ("both publish", "names", "twice"),
        ("never comes", "step", r"rank 0, 1 does not come back from train_step\(\)|rank 1"),
    ],
)  # fmt: skip
def test_what_ranks_get_wrong_is_seen(fault: str, check: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short_s = {"never comes": ("ANSWER_S", 5.0), "refuses alone": ("AFTER_AN_ERROR_S", 1.0)}
    if fault in short_s:
        monkeypatch.setattr(ranks, *short_s[fault])

    report = Conformance("train", BigramRanks, options={"fault": fault}, world_size=2, only=[check]).run()

    (result,) = report.results
    assert result.outcome == "failed"
    assert re.search(says, result.detail), result.detail


def children() -> set[str]:
    """Processes that this one started and that live."""
    return {pid for each in Path("/proc/self/task").glob("*/children") for pid in each.read_text().split()}


def test_no_rank_stays_when_all_is_asked() -> None:
    before = children()

    assert Conformance("train", BigramRanks, world_size=2, only=["names"]).run().ok

    until(lambda: children() <= before, "the end of its processes")


@pytest.mark.starts("asyncflow check")
def test_the_command_asks_ranks_and_says_how_many(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    engine = "asyncflow_sdk.testing.echo_ranks:EchoRanks"
    command = [sys.executable, "-m", "asyncflow_sdk.cli", "check", engine, "--world-size", "2", "--only", "names"]

    done = subprocess.run([*command, "--json", str(told)], capture_output=True, text=True, timeout=250, check=False)

    assert not done.returncode, done.stdout + done.stderr
    (checked,) = json.loads(told.read_text())["engines"]
    assert '"world_size": 2' in json.dumps(checked)


def test_ranks_that_make_no_sense_are_refused() -> None:
    for kind, world_size in (("rollout", 2), ("train", 0)):
        with pytest.raises(ConfigError, match="world_size"):
            Conformance(kind, BigramRanks, world_size=world_size)  # type: ignore[arg-type]
    local = Conformance("train", lambda **options: BigramRanks(**options), policy="bigram:BigramPolicy", world_size=2)
    with pytest.raises(ConfigError, match="cannot be imported"):
        local.run()
