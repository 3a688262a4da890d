"""``asyncflow run`` and ``asyncflow resume``: what they say of a run that ended, and never of another."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from children import warm_python
from rich.console import Console
from synthetic_run import synthetic_run, synthetic_summary, write_run
from waiting import until

from asyncflow_sdk.cli import run_command
from asyncflow_sdk.errors import Interrupted

WORKFLOW = """\
steps = 3
batch_size = 16
prompts = { prompt_ids = [[1], [2]] }
reward = "rewards:length"
rollout = { engine = "echo", prompt = "prompt_ids", group_size = 4 }
train = { engine = "echo" }
checkpoint = { every = 2 }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(
        "def length(response_ids):\n    return [float(len(r)) for r in response_ids]\n"
    )
    (tmp_path / "run.toml").write_text(WORKFLOW)
    return tmp_path / "run.toml"


def begun(*args: object) -> subprocess.Popen[str]:
    words = [warm_python(), "-m", "asyncflow_sdk.cli", *map(str, args)]
    env = os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def said(*args: object) -> tuple[int, str, str]:
    process = begun(*args)
    out, err = process.communicate(timeout=250)  # only ends a test that would hang
    return process.returncode, out, err


def files(directory: Path) -> dict[Path, tuple[int, int]]:
    return {path: ((found := path.stat()).st_mtime_ns, found.st_size) for path in directory.rglob("*")}


def test_a_run_in_the_directory_of_another_is_refused_and_writes_nothing(file: Path) -> None:
    one = file.parent / "one"
    code, out, err = said("run", file, one)
    assert (code, err) == (0, "")
    assert "steps trained" in out
    (one / "summary.json").unlink()  # as if it had been killed after its last step
    before = files(one)

    for again in (["run", file, one], ["serve", one]):
        code, out, err = said(*again)

        assert (code, "steps trained" in out) == (2, False), out
        assert "one already holds a run, which has ended; choose another directory, or move it away" in err
        assert files(one) == before


def test_a_run_that_cannot_be_served_leaves_no_record(tmp_path: Path) -> None:
    code, _, err = said("serve", tmp_path / "run", "--address", "tcp://nowhere.invalid:1")
    assert (code, "nowhere.invalid" in err) == (2, True)
    assert not (tmp_path / "run" / "events.jsonl").exists(), "the next one would be refused"


def test_a_run_that_is_resumed_is_shown_as_it_is_when_it_is_run(file: Path) -> None:
    # given a run that is killed
    process = begun("run", file, file.parent / "one", "--set", "steps=100000")
    until(lambda: list((file.parent / "one" / "steps").glob("*.safetensors")), "a step")
    process.kill()
    process.communicate()

    # when it is gone on with, and stopped
    process = begun("resume", file.parent / "one")
    assert process.stdout is not None
    for line in process.stdout:
        if "worker train-0: ready" in line:
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=250)

    # then
    assert process.returncode == 130
    assert "interrupted: stopped by request" in err
    assert "rows ended" in out
    assert (file.parent / "one" / "report.html").is_file()


def test_a_second_ctrl_c_skips_the_report_with_a_word(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    stop = Interrupted("stopped by request")
    stop.repeated = True

    def interrupted() -> None:
        with run_command.outcome_of(tmp_path, console):
            write_run(tmp_path, synthetic_run(3, None), synthetic_summary(3))
            raise stop

    with pytest.raises(Interrupted):
        interrupted()

    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"no report page: skipped after Ctrl-C; `asyncflow report {tmp_path}` writes it" in printed
    assert not (tmp_path / "report.html").exists()


def test_ctrl_c_while_the_report_is_written_skips_it_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(run_dir: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_command, "write_report", interrupted)
    console = Console(file=io.StringIO(), width=200)

    with pytest.raises(KeyboardInterrupt), run_command.outcome_of(tmp_path, console):
        write_run(tmp_path, synthetic_run(3, None), synthetic_summary(3))

    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "no report page: skipped after Ctrl-C" in printed


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.argv[1:] = ['--version']; from asyncflow_sdk.cli.app import main; main()",
        "import runpy; runpy.run_module('asyncflow_sdk.workflow')",  # a worker whose driver died before it had said a word
    ],
)
def test_a_process_that_ends_collects_nothing_any_more(program: str) -> None:
    code = f"import atexit, gc; atexit.register(lambda: print('frozen:', gc.get_freeze_count() > 0)); {program}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "frozen: True" in done.stdout
