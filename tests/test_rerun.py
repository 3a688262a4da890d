"""tests/rerun.py on failures of all kinds: beside others only, always, in an import, by a stopped run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RERUN = Path(__file__).parent / "rerun.py"
LOADED = """
import pathlib, pytest

def once(name):
    first = pathlib.Path(f"first-{name}")
    if not first.exists():
        first.touch()
        raise TimeoutError("the machine is busy")

@pytest.mark.parametrize("number", range(COUNT))
def test_loaded(number):
    once(number)
"""
FAULTY = "def test_faulty(): assert 1 == 2\n"
SKIPPED = """
def test_skipped():
    try:
        once("skipped")
    finally:
        if pathlib.Path("again").exists(): pytest.skip("no such tool")
        pathlib.Path("again").touch()
"""
STRANGE = """
class TestIt:
    @pytest.mark.parametrize("name", ["tcp://[::1]:0", "a::b", "a b", "a/./b", "é"])
    def test_strange(self, name):
        once(name.encode().hex())
"""


def run(folder: Path, code: str, *options: str, **variables: str) -> tuple[int, str]:
    """Run pytest on one module. Returns its exit status and output."""
    folder.mkdir(exist_ok=True)
    (folder / "test_it.py").write_text(code)
    return rerun(folder, "-p", "no:cacheprovider", "--rootdir", str(folder), *options, "test_it.py", **variables)


def rerun(folder: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    environment = os.environ | {"PYTHONPATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | variables
    done = subprocess.run(
        [sys.executable, str(RERUN), *arguments], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=250, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def check_red(folder: Path, code: str, red: str, *options: str) -> None:
    status, said = run(folder, code, *options)

    assert status in (1, 2), said
    assert red in said


@pytest.mark.parametrize("options", [(), ("-p", "xdist", "-n", "2")], ids=["one process", "xdist"])
class TestBothWays:
    def test_what_passes_alone_is_listed_with_its_first_failure(
        self, tmp_path: Path, options: tuple[str, ...]
    ) -> None:
        status, said = run(tmp_path, LOADED.replace("COUNT", "3"), *options)

        assert status == 0, said
        heading, _, listed = said.rpartition("passed only alone: each is a defect")
        assert heading
        assert "= FAILURES =" not in said
        assert listed.count("TimeoutError: the machine is busy") >= 3
        assert [f"PASSED ONLY ALONE test_it.py::test_loaded[{number}]" in listed for number in range(3)] == [True] * 3
        assert "3 passed only alone" in said.splitlines()[-1]

    @pytest.mark.parametrize(
        ("code", "red"),
        [
            (LOADED.replace("COUNT", "1") + FAULTY, "1 failed, 1 passed only alone"),
            ("import no_such_module\n" + FAULTY, "1 error"),
        ],
        ids=["one fails alone", "a module that cannot be imported"],
    )
    def test_other_failures_are_red(self, tmp_path: Path, options: tuple[str, ...], code: str, red: str) -> None:
        check_red(tmp_path, code, red, *options)

    def test_a_run_that_was_stopped_is_red(self, tmp_path: Path, options: tuple[str, ...]) -> None:
        assert run(tmp_path, LOADED.replace("COUNT", "2"), "-x", *options)[0] != 0

    def test_processes_that_found_other_tests_are_red(self, tmp_path: Path, options: tuple[str, ...]) -> None:
        code = "import os\nprocess = os.environ.get('PYTEST_XDIST_WORKER', '')\nexec(f'def test_{process}(): assert process == 0')"

        assert run(tmp_path, code, *options)[0] != 0


@pytest.mark.parametrize(
    ("code", "red"),
    [
        (LOADED.replace("COUNT", "4"), "at most 3 are accepted"),
        (LOADED.replace("COUNT", "1") + SKIPPED, "1 failed, 1 passed only alone"),
        (LOADED.replace("COUNT", "21"), "21 failed"),
    ],
    ids=["too many", "one is skipped alone", "far too many"],
)
def test_what_does_not_pass_alone_or_is_too_much_is_red(tmp_path: Path, code: str, red: str) -> None:
    check_red(tmp_path, code, red)


def test_any_id_is_found_again(tmp_path: Path) -> None:
    for strange in ("tcp", "b]"):
        status, said = run(tmp_path, LOADED.replace("COUNT", "0") + STRANGE, "-k", strange)
        assert status in (0, 1)
        assert "not found" not in said
        assert "failed\n" not in said


def test_parts_of_a_command_are_run_again_after_all_of_them(tmp_path: Path) -> None:
    failed = tmp_path / "failed"
    firsts = [run(tmp_path / name, LOADED.replace("COUNT", "2"), FAILED=str(failed))[0] for name in ("a", "b")]
    lines = failed.read_text().splitlines(keepends=True)
    mode = failed.stat().st_mode & 0o777
    four, said = rerun(tmp_path, "--of", str(failed))
    removed = not failed.exists()
    failed.write_text("".join(lines[:3]))
    three, _ = rerun(tmp_path, "--of", str(failed))

    assert firsts == [0, 0]
    assert (mode, removed) == (0o600, True), "the variables of a test are for its owner only"
    assert (four, three) == (1, 0)
    assert said.count("PASSED ONLY ALONE") == 4
    assert rerun(tmp_path, "--of", "missing")[0] == 0


def test_options_of_the_run_hold_for_each_repetition(tmp_path: Path) -> None:
    code = LOADED.replace("COUNT", "1") + "def test_other(): raise OSError\n"

    assert run(tmp_path, code, "-k", "loaded", "--junitxml=all.xml")[0] == 0
    assert 'failures="1"' in (tmp_path / "all.xml").read_text(), "the report of the first run is kept"
    assert run(tmp_path, code, "-k", "other")[0] == 1
