"""tests/run.py, run on tests that fail beside others, alone, or always."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "run.py"
LOADED = """
import pathlib, pytest
@pytest.mark.parametrize("number", range(COUNT))
def test_loaded(number):
    first = pathlib.Path(f"first-{number}")
    if not first.exists():
        first.touch()
        raise TimeoutError("the machine is busy")
"""
FAULTY = "def test_faulty(): assert 1 == 2\n"


def run(folder: Path, code: str, *options: str, **variables: str) -> tuple[int, str]:
    """Run pytest on one module. Returns its exit status and output."""
    (folder / "test_it.py").write_text(code)
    command = [sys.executable, str(RUN), "-p", "no:cacheprovider", "--rootdir", str(folder), *options, "test_it.py"]
    environment = os.environ | {"PYTHONPATH": ""} | variables
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_what_passes_alone_is_listed_with_its_first_failure(tmp_path: Path, options: tuple[str, ...]) -> None:
    status, said = run(tmp_path, LOADED.replace("COUNT", "3"), *options)

    assert status == 0, said
    heading, _, listed = said.rpartition("passed only alone: each is a defect")
    assert heading
    assert listed.count("TimeoutError: the machine is busy") >= 3
    assert [f"PASSED ONLY ALONE test_it.py::test_loaded[{number}]" in listed for number in range(3)] == [True] * 3
    assert "3 passed only alone" in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("code", "red"),
    [
        (LOADED.replace("COUNT", "4"), "at most 3 are accepted"),
        (LOADED.replace("COUNT", "1") + FAULTY, "1 failed, 1 passed only alone"),
        (LOADED.replace("COUNT", "21"), "21 failed"),
        ("import no_such_module\n" + FAULTY, "1 error"),
    ],
    ids=["too many", "one that fails alone", "far too many", "a module that cannot be imported"],
)
def test_other_failures_are_red(tmp_path: Path, code: str, red: str) -> None:
    status, said = run(tmp_path, code)

    assert status in (1, 2)
    assert red in said


def test_the_parts_of_one_command_are_counted_together(tmp_path: Path) -> None:
    counted = {"PASSED_ALONE": str(tmp_path / "build" / "passed-alone")}
    statuses = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        statuses.append(run(tmp_path / name, LOADED.replace("COUNT", "2"), **counted)[0])

    assert statuses == [0, 1]


def test_options_of_the_run_hold_for_each_repetition(tmp_path: Path) -> None:
    code = LOADED.replace("COUNT", "1") + "import os\ndef test_other(): raise OSError\n"

    assert run(tmp_path, code, "-k", "loaded")[0] == 0
    assert run(tmp_path, code, "-k", "other")[0] == 1
