"""Blocking and allowing plugins: what is left out is not imported, here and in workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from plugin_packages import HEAD, install, write_plugin

import asyncflow_sdk as af
from asyncflow_sdk.plugins import ONLY, WITHOUT, find_plugins
from asyncflow_sdk.plugins.discovery import PluginChoice, read_choice

GOOD = HEAD + "    return [af.AdapterSpec(kind='tracker', name='good', factory='x:Y')]\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of distributions, also of the processes that are started; one has an engine, one tells when it is imported."""
    folder = tmp_path / "site"
    write_plugin(folder, "zz_good", GOOD)
    write_plugin(folder, "af_blocked", f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    install(folder, "asyncflow_old")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv(WITHOUT, raising=False)
    return folder


@pytest.mark.parametrize("choice", [PluginChoice(None, ("AF.Blocked",)), PluginChoice(("zz-good", "torch"), ())])
def test_blocked_plugins_are_not_imported_and_are_named(site: Path, tmp_path: Path, choice: PluginChoice) -> None:
    found = find_plugins(choice)

    assert not (tmp_path / "imported").exists()
    assert "plugin 'af_blocked' of af_blocked 1.0" in found.blocked
    assert found.problems == ()
    assert found.find("tracker", "good") is not None
    assert found.find("transport", "shm") is not None, "the core is always there"
    assert (found.find("rollout", "echo") is None) == (choice.only is not None)


def test_the_name_of_a_distribution_counts_too(site: Path) -> None:
    assert find_plugins(PluginChoice(None, ("asyncflow-old", "af-blocked"))).find("rollout", "old") is None
    assert find_plugins(PluginChoice(("asyncflow_old",), ())).find("rollout", "old") is not None


def test_names_that_block_nothing_and_the_core_are_told(site: Path) -> None:
    found = find_plugins(PluginChoice(("zz_good", "mistyped"), ("core", "tourch")))

    assert found.find("transport", "shm") is not None
    core, block, only = found.problems
    by = "--no-plugin, or ASYNCFLOW_NO_PLUGINS,"
    assert core == f"{by} names 'core', which cannot be blocked: it was loaded"
    assert block.startswith(f"{by} names 'tourch', and no plugin has that name in this environment; installed:")
    assert block.endswith(". Did you mean 'torch'?")
    assert "ASYNCFLOW_PLUGINS names 'mistyped'" in only


def test_an_empty_allow_list_allows_the_core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ONLY, "")
    assert {adapter.source.split()[0] for adapter in find_plugins().adapters} == {"asyncflow-sdk"}
    assert find_plugins().find("rollout", "echo") is None
    monkeypatch.setenv(ONLY, " a, b\nc ")
    assert read_choice().only == ("a", "b", "c")


def given_command(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncflow_sdk.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


def test_the_command_leaves_plugins_out(site: Path, tmp_path: Path) -> None:
    done = given_command("plugins", "--no-plugin", "af_blocked", "--no-plugin", "old")

    assert done.returncode == 0, done.stdout
    assert "blocked: plugin 'old' of asyncflow-old 1.0" in done.stdout
    assert not (tmp_path / "imported").exists()
    assert "af_blocked" not in given_command("--no-plugin", "af_blocked", "plugins", "--json").stderr


WORKFLOW = """\
steps = 1
batch_size = 4
prompts = { prompt_ids = [[1], [2]] }
rollout = { engine = "old", prompt = "prompt_ids", group_size = 2, python = "PYTHON" }
train = { engine = "echo", needs = [] }
[[stages]]
work = "site_rewards:length"
task = "reward"
"""


def test_it_reaches_workers_under_other_interpreters(site: Path, tmp_path: Path) -> None:
    # given: a workflow whose engine only its worker looks for
    (site / "site_rewards.py").write_text("def length(response_ids):\n    return [1.0] * len(response_ids)\n")
    (tmp_path / "run.toml").write_text(WORKFLOW.replace("PYTHON", sys.executable))

    done = given_command("run", str(tmp_path / "run.toml"), str(tmp_path / "out"), "--no-plugin", "old")

    assert done.returncode == 2, done.stdout
    log = (tmp_path / "out" / "logs" / "rollout-0.log").read_text()
    assert "no rollout adapter is named 'old'" in log
    assert "blocked: plugin 'old' of asyncflow-old 1.0" in log


BARE = """
import pathlib
from asyncflow_sdk.interfaces import Launcher
class Bare(Launcher):
    def start(self, order):
        pathlib.Path({kept!r}).write_bytes(order.config)
        raise af.ConfigError("it is started by the test")
def make():
    return Bare()
"""


def test_it_reaches_workers_whose_launcher_hands_no_environment_on(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a launcher that hands its worker the configuration alone
    kept = tmp_path / "config"
    specs = "    return [af.AdapterSpec(kind='launcher', name='bare', factory='zz_bare:make')]\n"
    write_plugin(site, "zz_bare", HEAD + specs + BARE.format(kept=str(kept)))
    bare = dict(os.environ)
    monkeypatch.setenv(WITHOUT, "old,af_blocked")
    with af.serve() as run:
        with pytest.raises(af.ConfigError, match="it is started by the test"):
            run.start(af.Rollout("old", prompt="prompt_ids", python=sys.executable, launcher="bare"))
        # when
        code = "import sys; from asyncflow_sdk.workflow import run_worker; print(run_worker(sys.stdin.buffer.read()).text)"
        done = subprocess.run(
            [sys.executable, "-c", code], input=kept.read_bytes(), env=bare, capture_output=True, check=True
        )
    # then
    assert b"blocked: plugin 'old' of asyncflow-old 1.0" in done.stdout
