"""Run pytest. Then run each failed test again, alone in a process of its own. If it passes there, it failed because of load.

    python tests/rerun.py [arguments of pytest]
    FAILED=build/failed python tests/rerun.py ...      # only writes the failed tests to this file
    python tests/rerun.py --of build/failed            # runs them again

The exit status is 0 if at most MAX_PASSED_ALONE tests failed and each of them passed alone. They are listed at the end with
their first failure: each is a defect of a test, or a race of the product. A stopped run, a failed import of a module, and a
crash of pytest are failures in any case.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

MAX_PASSED_ALONE = 3
MAX_RERUN = 20
"""Above this number no failed test is run again."""
OWN_OPTIONS = ("--junitxml", "--junit-xml", "--basetemp", "--pdb", "--trace")
"""Options of the first run only."""


@dataclass(frozen=True)
class Failure:
    """A failed test: its id, its first failure as text, and the command to run it alone, with its folder and variables."""

    name: str
    text: str
    command: list[str]
    folder: str
    variables: dict[str, str]

    def passes_alone(self) -> bool:
        """Run the test again. A skipped test has not passed."""
        done = subprocess.run(
            self.command, cwd=self.folder, env=self.variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
        )  # fmt: skip
        passed = (
            not done.returncode and re.search(r"\b1 passed\b", done.stdout.rstrip().rpartition("\n")[2]) is not None
        )
        print(f"again, alone: {self.name}: {'passed' if passed else f'failed{chr(10)}{done.stdout}'}", flush=True)
        return passed


class Recorder:
    """A plugin of pytest's first process, not of xdist's workers."""

    def __init__(self) -> None:
        self._reports: dict[str, list[pytest.TestReport]] = {}  # the failed ones, by the test's id
        self._whole = True  # each module was imported
        self._passed_alone: list[Failure] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._whole = self._whole and not report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._reports.setdefault(report.nodeid, []).append(report)

    @pytest.hookimpl(
        wrapper=True, trylast=True
    )  # after xdist has ended its workers, before pytest prints its summary
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, object, object]:
        result = yield
        stopped = session.shouldfail or session.shouldstop or session.config.option.usepdb
        if exitstatus == pytest.ExitCode.TESTS_FAILED and self._reports and self._whole and not stopped:
            failures = [_failure(session.config, name, reports) for name, reports in self._reports.items()]
            if path := os.environ.get("FAILED"):
                Path(path).touch(0o600)  # the variables of a test may hold a token
                with Path(path).open("a") as file:
                    file.write("".join(f"{json.dumps(asdict(failure))}\n" for failure in failures))
                session.exitstatus = pytest.ExitCode.OK
            else:
                self._passed_alone = _rerun(failures)
                session.exitstatus = int(not _accepted(failures, self._passed_alone))
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own, which prints the failures
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, object, object]:
        stats = terminalreporter.stats
        moved = [report for failure in self._passed_alone for report in self._reports[failure.name]]
        for kind in ("failed", "error") if moved else ():
            stats[kind] = [report for report in stats.pop(kind, []) if report not in moved]
            if not stats[kind]:
                del stats[kind]  # an empty one makes the summary red
        result = yield
        if moved:
            stats["passed only alone"] = moved
            _list(self._passed_alone)
        return result


def _failure(config: pytest.Config, name: str, reports: Sequence[pytest.TestReport]) -> Failure:
    paths = config.option.file_or_dir
    options = [
        each for each in config.invocation_params.args if each not in paths and not each.startswith(OWN_OPTIONS)
    ]
    if config.pluginmanager.hasplugin("xdist"):
        options += ["-n", "0", "--dist", "no"]
    test = f"{config.rootpath}/{name}"  # as text: a path would lose the // of an address in a test's id
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(config.rootpath), test]
    variables = {key: value for key, value in os.environ.items() if not key.startswith("ASYNCFLOW_TEST_PYTHON_")}
    text = "\n".join(f"{name} ({report.when})\n{report.longreprtext}" for report in reports)
    return Failure(name, text, command, os.getcwd(), variables)


def _rerun(failures: Sequence[Failure]) -> list[Failure]:
    """Return the tests with a pass alone."""
    return [failure for failure in failures if failure.passes_alone()] if len(failures) <= MAX_RERUN else []


def _accepted(failures: Sequence[Failure], passed_alone: Sequence[Failure]) -> bool:
    return len(passed_alone) == len(failures) <= MAX_PASSED_ALONE


def _list(passed_alone: Sequence[Failure]) -> None:
    print("\n==== passed only alone: each is a defect ====")
    for failure in passed_alone:
        print(failure.text, end="\n\n")
    for failure in passed_alone:
        print(f"PASSED ONLY ALONE {failure.name}")
    print(f"at most {MAX_PASSED_ALONE} are accepted", flush=True)


def _rerun_of(path: Path) -> int:
    """Run the tests of a file again. Return the exit status."""
    failures = [Failure(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    path.unlink(missing_ok=True)
    passed_alone = _rerun(failures)
    if passed_alone:
        _list(passed_alone)
    print(f"{len(failures)} failed in the first run, {len(passed_alone)} of them passed alone")
    return int(not _accepted(failures, passed_alone))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--of"]:
        sys.exit(_rerun_of(Path(sys.argv[2])))
    sys.path[0] = os.getcwd()  # python -m pytest puts the current directory first
    sys.exit(pytest.main(sys.argv[1:], plugins=[Recorder()]))
