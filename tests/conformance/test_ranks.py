"""Train engines of several processes are asked what those of one are, and their own faults are seen."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bigram import BigramTrain
from faults import Fault, before, with_fault
from waiting import until

from asyncflow_sdk.errors import ConfigError, SchemaError
from asyncflow_sdk.interfaces import StepResult
from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.testing.echo_ranks import Gather
from asyncflow_sdk.testing.kit import ranks
from asyncflow_sdk.testing.kit.conformance import BoundCheck
from asyncflow_sdk.types import Batch, Shard


class BigramRanks(BigramTrain):
    """Each rank computes the gradient of its rows; the table is published in pieces, one a rank, the rest by rank 0."""

    def __init__(self, model: str, *, algorithm: Any, learning_rate: float = 1.0, fault: str = "") -> None:
        super().__init__(model, algorithm=algorithm, learning_rate=learning_rate)
        self.gather = Gather()
        self.rank, self.ranks = self.gather.rank, self.gather.world_size
        with_fault(self, FAULTS.get(fault, {}))

    def check(self, batch: Batch) -> None:
        """All refuse a step, or none: who went on would wait for the others."""
        refused = ""
        try:
            super().check(batch)
        except SchemaError as error:
            refused = str(error)
        if self.summed(np.array(refused != "", np.float64)):
            raise SchemaError(f"a rank refused its rows of this step: {refused}")

    def summed(self, array: Any) -> Any:
        return np.sum(self.gather(array.tolist()), axis=0)

    def named_weights(self) -> Any:
        for name, array in super().named_weights():
            if name == "table.weight":
                start, end = (len(array) * rank // self.ranks for rank in (self.rank, self.rank + 1))
                yield name, Shard(array[start:end], (start, 0), array.shape)
            elif not self.rank:
                yield name, array

    def save(self, path: Path) -> None:
        if not self.rank:
            super().save(path)
        self.gather("saved")

    def export(self, path: Path) -> None:
        if not self.rank:
            super().export(path)
        self.gather("exported")

    def close(self) -> None:
        self.gather.close()


def tensor() -> Any:
    return pytest.importorskip("torch").tensor(0.5)


FAULTS: dict[str, Fault] = {
    "sums no gradients": {"summed": lambda self, right, array: array},
    "refuses alone": {"check": lambda self, right, batch: BigramTrain.check(self, batch)},
    "publishes half": {"named_weights": lambda self, right: () if self.rank else right()},
    "both publish": {"named_weights": lambda self, right: BigramTrain.named_weights(self)},
    "reports tensors": {"train_step": lambda self, right, batch: (right(batch), StepResult({"loss": tensor()}))[1]},
    "never comes": {"descend": before(lambda self, *_: self.rank and time.sleep(600))},
}

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
        ("reports tensors", "step", "gave a Tensor, where numbers"),
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
