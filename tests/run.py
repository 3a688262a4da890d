"""Run pytest, then run each failed test once more, alone: load of the machine is told from a fault.

    python tests/run.py [arguments of pytest]

The exit status is 0 if at most MAX_LOADED tests failed and each of them passed alone. They are listed at the end with their
first failure: each is a defect of a test (or a race of the product) to be mended. With several test runs of one command,
PASSED_ALONE names a file that collects them, and the limit counts its lines.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MAX_LOADED = 3
"""Number of tests that may fail beside others and pass alone."""
MAX_REPEATED = 20
"""With more failures none is run again: no load explains them."""


class Repeater:
    """A plugin of the process that starts the tests, not of xdist's workers."""

    def __init__(self) -> None:
        self._failures: dict[str, list[pytest.TestReport]] = {}  # by node id, of the first run
        self._passed_alone: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failures.setdefault(report.nodeid, []).append(report)

    @pytest.hookimpl(
        wrapper=True, trylast=True
    )  # after xdist has ended its workers, before pytest prints its summary
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> object:
        result = yield
        if exitstatus == pytest.ExitCode.TESTS_FAILED and len(self._failures) <= MAX_REPEATED:
            self._passed_alone = [name for name in self._failures if _passes(session.config, name)]
            loaded = _collected(self._passed_alone)
            if len(self._passed_alone) == len(self._failures) and loaded <= MAX_LOADED:
                session.exitstatus = pytest.ExitCode.OK
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        moved = [report for name in self._passed_alone for report in self._failures[name]]
        stats = terminalreporter.stats
        for kind in ("failed", "error"):
            stats[kind] = [report for report in stats.get(kind, []) if report not in moved]
        if not moved:
            return
        stats["passed only alone"] = moved
        terminalreporter.section("passed only alone: each is a defect", yellow=True)
        for report in moved:
            terminalreporter.write_line(f"{report.nodeid} ({report.when}), its first failure:", bold=True)
            terminalreporter.write_line(f"{report.longreprtext}\n")
        for name in self._passed_alone:
            terminalreporter.write_line(f"PASSED ONLY ALONE {name}")
        terminalreporter.write_line(f"at most {MAX_LOADED} are accepted")


def _passes(config: pytest.Config, name: str) -> bool:
    """Run one test in a process of its own, with the options of this run."""
    paths = config.option.file_or_dir
    options = [option for option in config.invocation_params.args if option not in paths]
    if config.pluginmanager.hasplugin("xdist"):
        options += ["-n", "0", "--dist", "no"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *options,
        "--rootdir",
        str(config.rootpath),
        str(config.rootpath / name),
    ]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    print(f"\nonce more, alone: {name}: {'failed' if done.returncode else 'passed'}", flush=True)
    if done.returncode:
        print(done.stdout, flush=True)
    return not done.returncode


def _collected(names: list[str]) -> int:
    """Return the number of tests that passed only alone, those of earlier test runs of the same command included."""
    if "PASSED_ALONE" not in os.environ:
        return len(names)
    path = Path(os.environ["PASSED_ALONE"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        file.write("".join(f"{name}\n" for name in names))
        file.flush()
        file.seek(0)
        return len(file.readlines())


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # as of python -m pytest
    sys.exit(pytest.main(sys.argv[1:], plugins=[Repeater()]))
