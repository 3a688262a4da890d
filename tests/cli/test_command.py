"""The command: what it prints, what it returns, and that it loads nothing heavy."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from children import warm_python
from rich.console import Console
from synthetic_run import synthetic_run, synthetic_summary, write_run
from typer.testing import CliRunner, Result

import asyncflow_sdk.cli
from asyncflow_sdk import __version__
from asyncflow_sdk.cli.app import app
from asyncflow_sdk.cli.report.summary import summary_table
from asyncflow_sdk.errors import ConfigError, Interrupted, WorkerFailed

WIDE = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


def run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args), env=WIDE)


def asyncflow(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [warm_python(), "-m", "asyncflow_sdk.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | WIDE | env, check=False)


WORKFLOW = """\
steps = 2
batch_size = 16
reward = "rewards:length"
prompts = { prompt_ids = [[1], [2]] }
rollout = { engine = "echo", prompt = "prompt_ids", group_size = 4 }
train = { engine = "echo" }
"""


def given_workflow(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(
        "def length(response_ids):\n    return [float(len(ids)) for ids in response_ids]\n"
    )
    (tmp_path / "run.toml").write_text(WORKFLOW)
    return str(tmp_path / "run.toml")


@pytest.mark.starts("asyncflow run", "rollout echo", "train echo")
def test_run_trains_what_a_file_says_and_writes_the_report(tmp_path: Path) -> None:
    done = asyncflow("run", given_workflow(tmp_path), str(tmp_path / "out"), "--set", "steps=3")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 steps of 16 rows, in groups of 4" in done.stdout
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["steps"] == 3
    assert (tmp_path / "out" / "report.html").is_file()


def test_run_prints_and_starts_nothing(tmp_path: Path) -> None:
    file, out = given_workflow(tmp_path), tmp_path / "out"

    text = asyncflow("run", file, str(out), "--print").stdout
    drawing = asyncflow("run", file, str(out), "--mermaid").stdout

    assert "rollout ── response_ids, logprobs, version_spans, finish_reason ──▶ train" in text
    assert drawing.startswith("flowchart LR\n")
    assert not out.exists()


def test_run_points_at_what_is_wrong(tmp_path: Path) -> None:
    done = asyncflow(
        "run", given_workflow(tmp_path), "--set", "batch_size=17", "--set", "train.learning_rate=1", "--print"
    )

    assert done.returncode == 2
    assert "  batch_size=17: batch_size=17 is not a multiple" in done.stderr
    assert "  train.learning_rate=1: engine 'echo' has no option 'learning_rate'" in done.stderr
    assert "Traceback" not in done.stderr
    assert "--set takes KEY=VALUE" in asyncflow("run", given_workflow(tmp_path), "--set", "learning_rate").stderr


@pytest.mark.starts("docs/installation.md: asyncflow --install-completion")
def test_the_tab_key_completes_commands_and_options(tmp_path: Path) -> None:
    installs = f"{sys.executable} -m asyncflow_sdk.cli --install-completion; true"  # finds the shell that started it
    env = os.environ | {"HOME": str(tmp_path)}
    subprocess.run(["bash", "-c", installs], capture_output=True, env=env, check=True)
    words = {"COMP_WORDS": "asyncflow worker runs/x rollout --eng", "COMP_CWORD": "4"}

    assert "_asyncflow_completion asyncflow" in (tmp_path / ".bash_completions" / "asyncflow.sh").read_text()
    assert asyncflow(**words, _ASYNCFLOW_COMPLETE="complete_bash").stdout == "--engine\n"


def test_a_run_without_an_evaluation_has_no_best_version(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()

    refused = run("export", str(tmp_path), str(tmp_path / "new"), "--best")

    assert "has no best version: no evaluation was finished; it has: model" in refused.output


def test_the_room_exports_main_only() -> None:
    assert asyncflow_sdk.cli.__all__ == ["main"]


def test_importing_it_loads_no_engine_no_socket_and_no_plots() -> None:
    heavy = ("torch", "zmq", "matplotlib", "numpy")
    code = f"import asyncflow_sdk.cli, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]"


def test_help_says_what_it_is_and_three_uses() -> None:
    done = asyncflow("--help")
    assert done.returncode == 0
    assert "any inference engine and any training engine" in " ".join(done.stdout.split())
    for use in ("asyncflow demo", "asyncflow plugins", "asyncflow report runs/NAME", "--version", "--debug"):
        assert use in done.stdout


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.output.strip()) == (0, f"asyncflow-sdk {__version__}")


PLUGINS = {
    "af_good": """
import asyncflow_sdk as af
@af.hookimpl
def asyncflow_adapters():
    return [
        af.AdapterSpec(kind="tracker", name="goodtracker", factory="af_good:T", tested="itself"),
        af.AdapterSpec(kind="rollout", name="far", factory="far:Engine", requires=["no-such-distribution>=2"],
                       install="pip install 'asyncflow-sdk[far]'"),
    ]
""",
    "af_broken": "raise RuntimeError('broken on purpose')",
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Two installed distributions, as pip leaves them."""
    for name, body in PLUGINS.items():
        (tmp_path / f"{name}.py").write_text(body)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[asyncflow_sdk]\n{name} = {name}\n")
    return tmp_path


def test_plugins_lists_engines_how_to_get_the_missing_ones_and_what_is_broken(site: Path) -> None:
    done = asyncflow("plugins", PYTHONPATH=str(site))

    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert done.returncode == 1
    assert "tracker goodtracker af_good 1.0 present itself" in lines
    assert f"algorithm dapo asyncflow-sdk {__version__} built in" in lines
    assert "rollout far af_good 1.0 see below" in lines
    lacks = lines.index("rollout far needs no-such-distribution, which is not installed")
    assert lines[lacks + 1] == "pip install 'asyncflow-sdk[far]'"
    problem = lines[lines.index("1 PROBLEM") + 1]
    assert problem.startswith("plugin 'af_broken' of af_broken 1.0: RuntimeError: broken on purpose")


@pytest.mark.starts("asyncflow plugins", "docs/installation.md: asyncflow plugins")
def test_plugins_as_json_and_without_problems(site: Path) -> None:
    env = {"PYTHONPATH": str(site), "ASYNCFLOW_NO_PLUGINS": "af_broken"}

    done, listed = asyncflow("plugins", "--json", **env), asyncflow("plugins", **env)

    found = json.loads(done.stdout)
    assert (done.returncode, found["problems"]) == (0, [])
    assert "PROBLEM" not in listed.stdout
    (far,) = (adapter for adapter in found["adapters"] if adapter["name"] == "far")
    assert far["missing"] == ["no-such-distribution, which is not installed"]
    assert far["install"] == "pip install 'asyncflow-sdk[far]'"


def test_report_prints_the_path_of_the_page(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", synthetic_run(12, None), synthetic_summary(12))
    result = run("report", str(run_dir))
    assert result.exit_code == 0
    assert result.output.strip() == str(run_dir / "report.html")
    assert (run_dir / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_an_error_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    result = run("report", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        f"error: {tmp_path} has no events.jsonl: give the directory of a run, such as runs/demo"
    ]


@pytest.mark.parametrize("args", [("--debug", "report"), ("report", "--debug")])
def test_debug_adds_the_traceback(tmp_path: Path, args: tuple[str, ...]) -> None:
    result = run(*args, str(tmp_path))
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert "in read_record" in result.stderr


Demo = Callable[..., int]


def given_demo(monkeypatch: pytest.MonkeyPatch, run_demo: Demo) -> None:
    module: Any = ModuleType("asyncflow_torch.demo.run")
    module.run_demo = run_demo
    monkeypatch.setitem(sys.modules, "asyncflow_torch.demo.run", module)


def test_demo_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []
    given_demo(monkeypatch, lambda *args: calls.append(args) or 7)
    result = run(
        "demo", "--out", str(tmp_path / "d"), "--steps", "5", "--seed", "3", "--max-staleness", "0",
        "--model", str(tmp_path),
    )  # fmt: skip
    assert result.exit_code == 7
    assert calls[0][:5] == (tmp_path / "d", 5, 3, 0, tmp_path)
    assert isinstance(calls[0][5], Console)


def test_demo_takes_any_engine_for_rollouts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []
    given_demo(monkeypatch, lambda *args: calls.append(args) or 0)
    options = ("--option", "max_rows=64", "--option", 'server={"dtype": "float32"}', "--option", "dtype=auto")
    assert run("demo", "--out", str(tmp_path / "d"), "--rollout", "mine", "--python", "py", *options).exit_code == 0
    assert calls[0][7:10] == ("mine", "py", {"max_rows": 64, "server": {"dtype": "float32"}, "dtype": "auto"})
    assert calls[0][10:] == ("torch", 1, None, {}, ("grpo", {}))


def test_demo_takes_any_engine_for_training_on_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[Any, ...]] = []
    given_demo(monkeypatch, lambda *args: calls.append(args) or 0)
    options = ("--train", "mine", "--world-size", "2", "--train-python", "py", "--train-option", "stage=3")
    assert run("demo", "--out", str(tmp_path / "d"), *options).exit_code == 0
    assert calls[0][7:] == ("transformers", None, {}, "mine", 2, "py", {"stage": 3}, ("grpo", {}))


def test_demo_has_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.chdir(tmp_path)
    given_demo(monkeypatch, lambda *args: calls.append(args) or 0)
    assert run("demo").exit_code == 0
    out, *rest = calls[0][:5]
    assert out.parent == Path("runs")
    assert out.name.startswith("demo-2")
    assert rest == [300, 0, 1, None]
    assert calls[0][7:] == ("transformers", None, {}, "torch", 1, None, {}, ("grpo", {}))


def test_demo_never_writes_into_another_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given_demo(monkeypatch, lambda *_: pytest.fail("must not start"))
    (tmp_path / "events.jsonl").touch()
    result = run("demo", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "is not empty: name a new directory" in result.stderr


@pytest.mark.parametrize("args", [("--steps", "0"), ("--max-staleness", "-1"), ("--model", "no/such/folder")])
def test_demo_refuses_impossible_options(monkeypatch: pytest.MonkeyPatch, args: tuple[str, str]) -> None:
    given_demo(monkeypatch, lambda *_: pytest.fail("must not start"))
    result = run("demo", *args)
    assert result.exit_code == 2
    assert args[0] in result.stderr


def test_demo_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "asyncflow_torch.demo.run", None)
    result = run("demo", "--out", str(tmp_path / "d"))
    assert result.exit_code == 2
    assert result.stderr.strip().endswith("install them with: pip install 'asyncflow-sdk[torch]'")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("bad [red] option"), 2, "error: bad [red] option"),
        (
            WorkerFailed("worker a failed", "a", "ValueError: y\nTraceback\n  x"),
            2,
            "error: ValueError: y; worker a failed",
        ),
        (Interrupted("stopped after 12 steps"), 130, "interrupted: stopped after 12 steps"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_how_the_demo_may_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException, code: int, line: str
) -> None:
    def run_demo(*_: object) -> int:
        raise error

    given_demo(monkeypatch, run_demo)
    result = run("demo", "--out", str(tmp_path / "d"))
    assert (result.exit_code, result.stderr.splitlines()) == (code, [line])


def printed(summary: dict[str, object], width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(summary_table(summary))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_summary_table_of_a_whole_run() -> None:
    text = printed(synthetic_summary())
    for words in ("completed", "4:11", "0.8713", "consumed 18,600", "report.html", "Balanced: 19,264 rows were put"):
        assert words in text


def test_the_summary_table_says_of_how_many_steps_a_reward_is_the_mean() -> None:
    text = printed({"reward_first": 0.25, "reward_last": 0.5, "reward_steps": 20, "reasons": {"expired": 2}})
    assert re.search(r"first reward .* 0.25 \(mean of 20 steps\)", text)
    assert re.search(r"not trained .* expired: 2", text)
    assert "reward steps" not in text


def test_the_summary_table_of_a_run_that_failed() -> None:
    text = printed(
        {"status": "failed", "error": "[red]no", "rows": {"consumed": 3}, "rows_put": 4, "balanced": False}
    )
    assert "[red]no" in text
    assert "NOT BALANCED: 4 rows were put, 3 ended; 1 never ended." in text


def test_the_summary_table_of_what_it_was_not_told_of() -> None:
    text = printed({"reasons": {"filtered: no gradient": 1456}, "warnings": [], "rows_live": 0, "error": None})
    assert "filtered: no gradient: 1,456" in text
    assert "rows live" in text
    assert "warnings" not in text
    assert "error" not in text


def test_the_summary_table_of_nothing_and_of_a_narrow_terminal() -> None:
    assert printed({}).strip()
    assert max(map(len, printed(synthetic_summary(), 40).splitlines())) <= 40


@pytest.mark.parametrize("slow", ["typer", "rewards"])
def test_ctrl_c_while_something_is_imported_is_one_line(tmp_path: Path, slow: str) -> None:
    # given an import that takes long: of the command itself, or of what it was told to run
    (tmp_path / f"{slow}.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    (tmp_path / "run.toml").write_text(
        'steps = 1\nbatch_size = 1\nprompts = ["a"]\nreward = "rewards:f"\nrollout = { engine = "echo" }\ntrain = { engine = "echo" }\n'
    )
    env = os.environ | WIDE | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(
        [sys.executable, "-m", "asyncflow_sdk.cli", "run", "run.toml"],
        cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        # when
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=250)
    # then
    assert (process.returncode, said) == (130, "interrupted\n")
