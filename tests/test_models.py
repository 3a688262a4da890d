"""A family of each kind: a cell of docs/models.md, and the kit's checks of weights by name, log-probs and exports."""

import sys
from pathlib import Path
from typing import Any

import pytest
from children import warm_python

from asyncflow_sdk.testing import Conformance
from asyncflow_torch.families import OF_EACH_KIND, family
from benchmarks import models
from benchmarks.pairs import ROLLOUTS, TRAINS, Engine, Environments, Pair

PLAIN, SHARDED, _ = TRAINS
CELLS = [*((model, PLAIN) for model in OF_EACH_KIND), ("qwen3_moe", SHARDED)]
CHECKS = ["names", "logprobs", "fresh_logprobs", "export", "load_weights"]


def name_of(each: Any) -> str:
    return getattr(each, "name", each)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "train"), CELLS, ids=name_of)
def test_cell_of_each_kind_is_green(model: str, train: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", warm_python())

    cell = models.run_cell(Pair(ROLLOUTS[0], train, model), Environments({}))

    assert (cell.green, cell.why, cell.steps, cell.proven) == (True, "", models.STEPS, models.STEPS - 1)
    assert cell.drift < 1e-4
    assert cell.export < 1e-4


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("train", [PLAIN, SHARDED], ids=name_of)
@pytest.mark.parametrize("model", OF_EACH_KIND)
def test_train_engines_conform_on_family_of_each_kind(model: str, train: Engine, tmp_path: Path) -> None:
    options = {"threads": 1, "learning_rate": 1e-3}
    kit = Conformance(
        "train", train.name, model=family(model, tmp_path), options=options, only=CHECKS, world_size=train.world_size
    )

    report = kit.run()

    assert [(each.check.name, each.detail) for each in report.results if each.outcome != "passed"] == []
