"""The kit, of plugins without a model: what ships passes, and what is wrong is caught by the check that is about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from asyncflow_sdk.interfaces import (
    Candidates,
    Launcher,
    Sampler,
    TrackedRun,
    Tracker,
    WorkerExit,
    WorkerHandle,
    WorkerSpec,
)
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.testing.kit import launcher_checks

processes, threads = Conformance("launcher", "process"), Conformance("launcher", "thread")


@processes.parametrize
def test_processes(check: Callable[[], None]) -> None:
    check()


@threads.parametrize
def test_threads(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(("kind", "name"), [("sampler", "fifo"), ("staleness", "drop"), ("transport", "shm")])
def test_what_ships(kind: Any, name: str) -> None:
    report = Conformance(kind, name).run()

    assert report.ok, report.to_dict()
    assert report.level


class Lines(Tracker):
    """Right."""

    def open(self, run: TrackedRun) -> None:
        self.file = (run.directory / "lines.txt").open("a")

    def log(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        print(step, dict(metrics), file=self.file)

    def close(self) -> None:
        self.file.close()


class Rounds(Lines):
    def log(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        super().log(step, version, {name: round(value) for name, value in metrics.items()})


class Anew(Lines):
    def open(self, run: TrackedRun) -> None:
        (run.directory / "lines.txt").touch(exist_ok=False)
        super().open(run)


class OfProcesses(Launcher):
    """Starts what the launcher "process" starts."""

    def start(self, spec: WorkerSpec) -> WorkerHandle:
        launcher: Launcher = registry().get("launcher", "process").load()()
        return self.changed(launcher.start(spec))

    def changed(self, handle: Any) -> Any: ...


class NeverStops(OfProcesses):
    """Its workers cannot be stopped, however long they are waited for."""

    def changed(self, handle: Any) -> Any:
        handle.stop = lambda: setattr(launcher_checks, "END_S", 0.1)
        return handle


class SaysNothing(OfProcesses):
    """Whatever became of a worker, it was through."""

    def changed(self, handle: Any) -> Any:
        wait = handle.wait
        handle.wait = lambda: WorkerExit(0 * wait().status)
        return handle


class Backwards(Sampler):
    """The newest first, for ever."""

    def choose(self, rows: Candidates, count: int) -> Any:
        return range(len(rows))[::-1][:count]


WRONG: list[tuple[Any, Callable[..., Any], str, str]] = [
    ("tracker", Rounds, "odd_numbers", "cannot convert float"),
    ("tracker", Anew, "resumed", "File exists"),
    ("launcher", NeverStops, "stops", "did not end within"),
    ("launcher", SaysNothing, "failing", "status 0"),
    ("sampler", Backwards, "choices", "were not chosen"),
]


@pytest.mark.parametrize(("kind", "factory", "check", "says"), WRONG, ids=[each[1].__name__ for each in WRONG])
def test_what_is_wrong_is_caught(
    kind: Any, factory: Callable[..., Any], check: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_checks, "END_S", launcher_checks.END_S)  # put back after the test

    report = Conformance(kind, factory, only=[check]).run()

    assert [result.outcome for result in report.results] == ["failed"]
    assert says in report.results[0].detail


def test_a_right_tracker_reaches_the_top() -> None:
    assert Conformance("tracker", Lines).run().level == "full"
