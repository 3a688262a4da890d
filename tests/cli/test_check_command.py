"""``asyncflow check``: what it prints of right and wrong engines, what it returns, and that Ctrl-C ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from children import warm_python
from typer.testing import CliRunner, Result

from asyncflow_sdk.cli.app import app

WRONG = """
import time
from asyncflow_sdk.testing import EchoRollout
class Deaf(EchoRollout):
    def _take(self, version, new): pass
class Hangs(EchoRollout):
    async def generate(self, request):
        print("it hangs", flush=True)
        time.sleep(100)
        yield
class Unmade(EchoRollout):
    def __init__(self, model): raise RuntimeError("no such device")
"""


@pytest.fixture(autouse=True)
def _wrong_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_echoes.py").write_text(WRONG)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", warm_python())


def check(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["check", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


def test_a_right_engine_reaches_its_level(tmp_path: Path) -> None:
    done = check("echo", "--kind", "rollout", "--json", "said.json")

    assert done.exit_code == 0, done.output
    assert "level reached: full" in done.output
    said = json.loads((tmp_path / "said.json").read_text())
    assert (said["ok"], [engine["level"] for engine in said["engines"]]) == (True, ["full"])


def test_a_name_of_two_kinds_is_checked_as_both() -> None:
    done = check("echo", "--tier", "basic")

    assert "rollout echo:" in done.output
    assert "train echo:" in done.output
    assert done.output.count("level reached: basic") == 2


def test_what_is_wrong_is_told_with_what_it_means_and_where_to_look(tmp_path: Path) -> None:
    done = check("wrong_echoes:Deaf", "--only", "greedy", "--only", "update", "--json", "said.json")

    assert done.exit_code == 1
    for words in (
        "ok       greedy", "FAILED   update", "Probable cause: ", "seen    log-probs after the update are up to 1 from those of version 1",
        "impact  the run goes on with old weights", "hint    load_weights()", "level reached: none",
    ):  # fmt: skip
        assert words in done.output
    (engine,) = json.loads((tmp_path / "said.json").read_text())["engines"]
    assert engine["results"][1]["impact"].startswith("the run goes on with old weights")


def test_an_expected_failure_is_none_and_one_too_many_is() -> None:
    known = check("wrong_echoes:Deaf", "--only", "update", "--expect", "update=it never listens")
    wrong = check("echo", "--kind", "rollout", "--only", "update", "--expect", "update=it was broken once")

    assert known.exit_code == 0
    assert "it never listens" in known.output
    assert wrong.exit_code == 1
    assert "take the expectation out" in wrong.output


def test_an_engine_that_cannot_be_made_is_told_once() -> None:
    done = check("wrong_echoes:Unmade", "--tier", "basic")

    assert done.exit_code == 1
    assert done.output.count("no such device") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["echo", "--only", "nonesuch"], "no check of .* is named 'nonesuch'"),
        (["echo", "--tier", "best"], "--tier is one of basic, full, chaos"),
        (["nonesuch"], "no rollout adapter is named 'nonesuch'"),
        (["echo", "--expect", "update"], "no reason is given"),
        (["timed"], "it answers as no model does"),
        (["echo", "--option", "speed"], "--option takes NAME=VALUE"),
    ],
)
def test_what_cannot_be_asked_is_said(arguments: list[str], said: str) -> None:
    import re

    done = check(*arguments)

    assert done.exit_code == 2
    assert re.search(said, done.output), done.output


def test_without_a_name_every_engine_that_is_there_is_checked() -> None:
    done = check("--only", "capabilities", "--kind", "rollout")

    assert "rollout echo: 1 passed" in done.output
    assert "rollout timed: not checked, it answers as no model does" in done.output


def test_ctrl_c_ends_it_while_an_engine_hangs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncflow_sdk.cli", "check", "wrong_echoes:Hangs", "--only", "greedy"]
    env = os.environ | {"NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as it:
        assert it.stdout is not None
        assert any("it hangs" in line for line in it.stdout)
        it.send_signal(signal.SIGINT)
        _, said = it.communicate(timeout=250)

    assert it.returncode == 130
    assert said.splitlines() == ["interrupted"]
