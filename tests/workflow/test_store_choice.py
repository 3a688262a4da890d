"""Where a workflow's columns stay: the argument, its checks, and a whole run."""

from __future__ import annotations

from pathlib import Path

import pytest
from echo_runs import TOML, echo_workflow

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, PluginError
from asyncflow_sdk.workflow.plan.toml import load_workflow


def test_another_store_needs_a_checkpoint_and_has_to_be_installed() -> None:
    with pytest.raises(ConfigError, match="store='hosts' needs checkpoint"):
        echo_workflow(store="hosts")
    with pytest.raises(PluginError, match="hostz"):
        echo_workflow(store="hostz", checkpoint=af.Checkpoint(every=2))
    with pytest.raises(ConfigError, match="silence_s must be above 0"):
        af.Store(kind="hosts", silence_s=0.0)


def test_a_store_is_a_name_or_a_table_in_a_file(tmp_path: Path) -> None:
    for text, wanted in (
        ('"hosts"', af.Store(kind="hosts")),
        ('{ kind = "hosts", silence_s = 5.0, options = { fetch_s = 9.0 } }', af.Store(kind="hosts", silence_s=5.0, options={"fetch_s": 9.0})),
    ):  # fmt: skip
        file = tmp_path / "run.toml"
        file.write_text(f"store = {text}\ncheckpoint = {{ every = 1 }}\n{TOML}")
        assert load_workflow(file).plan.store == wanted


def test_a_run_with_homes_trains_each_row_once(tmp_path: Path) -> None:
    workflow = echo_workflow(store=af.Store(kind="hosts", silence_s=30.0), checkpoint=af.Checkpoint(every=2))
    result = workflow.run(tmp_path / "run")
    assert result.summary["status"] == "completed"
    assert workflow.describe()["store"]["kind"] == "hosts"
