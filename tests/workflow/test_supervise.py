"""Supervision over any launcher: one that raises, that loses its workers, whose workers keep dying."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import asyncflow_sdk as af
from asyncflow_sdk.errors import WorkerFailed
from asyncflow_sdk.types import Event
from asyncflow_sdk.types.events import WorkerState
from asyncflow_sdk.workflow import supervise
from asyncflow_sdk.workflow.supervise import Worker


class Boss:
    """Remembers what it was told."""

    over = False

    def __init__(self) -> None:
        self.states: list[str] = []
        self.errors: list[WorkerFailed] = []
        self.dead: list[str] = []

    def report(self, event: Event) -> None:
        assert isinstance(event, WorkerState)
        self.states.append(event.state)

    def gone(self, worker: Worker, why: str) -> None:
        self.dead.append(why)

    def failed(self, worker: Worker, error: WorkerFailed) -> None:
        self.errors.append(error)

    def ended(self, worker: Worker) -> None: ...


class Waited(af.WorkerHandle):
    def __init__(self, end: Callable[[], af.WorkerEnding]) -> None:
        self._end, self._stopped = end, threading.Event()

    def wait(self) -> af.WorkerEnding:
        return self._end()

    def stop(self) -> None:
        self._stopped.set()

    def kill(self) -> None:
        self._stopped.set()


class Scripted(af.Launcher):
    """A launcher whose starts end, or fail, one after another as it is told."""

    def __init__(self, *starts: af.WorkerEnding | Exception) -> None:
        self._starts = list(starts)

    def start(self, order: af.WorkerOrder) -> af.WorkerHandle:
        this = self._starts.pop(0)
        if isinstance(this, OSError):
            raise this

        def end() -> af.WorkerEnding:
            if isinstance(this, Exception):
                raise this
            return this

        return Waited(end)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "BACKOFF_S", 0.001)


def supervised(tmp_path: Path, *starts: af.WorkerEnding | Exception, restarts: int = 2) -> Boss:
    boss = Boss()
    order = af.WorkerOrder(name="w", config=b"", place=af.Place(max_restarts=restarts), log=tmp_path / "log")
    worker = Worker(Scripted(*starts), order, "role", boss)
    assert worker.ended.wait(10)
    assert worker.lost == bool(boss.errors)
    return boss


def test_an_error_that_would_come_again_is_not_tried_again(tmp_path: Path) -> None:
    boss = supervised(tmp_path, af.WorkerEnding(3, "Traceback ... no such option"))

    assert boss.states == ["failed"]
    assert boss.errors[0].detail == "Traceback ... no such option"


def test_a_worker_is_started_again_so_often_and_no_more(tmp_path: Path) -> None:
    boss = supervised(tmp_path, *[af.WorkerEnding(-9)] * 3)

    assert boss.states == ["restarting", "restarting", "failed"]
    assert str(boss.errors[0]) == "worker 'w' was killed by SIGKILL after 2 restarts"
    assert boss.dead == ["its worker was killed by SIGKILL"] * 3


def test_it_is_waited_for_longer_each_time_unless_it_worked_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "BACKOFF_S", 0.5)
    waits = [0.0]
    for lived_s in [0.1, 1.0, 9.0, 2.0, 41.0, 0.1, *[0.1] * 5]:
        waits.append(supervise.back_off(waits[-1], lived_s))

    assert waits[1:] == [0.5, 1.0, 2.0, 4.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]


def test_a_worker_that_ends_well_after_it_died_is_through(tmp_path: Path) -> None:
    boss = supervised(tmp_path, af.WorkerEnding(1, "once"), af.WorkerEnding(0))

    assert boss.states == ["restarting", "stopped"]
    assert not boss.errors


def test_a_worker_that_has_died_is_not_waited_for_when_all_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "BACKOFF_S", 3600.0)
    boss = Boss()
    order = af.WorkerOrder(name="w", config=b"", place=af.Place(), log=tmp_path / "log")
    worker = Worker(Scripted(af.WorkerEnding(-9)), order, "role", boss)

    worker.finish()

    assert worker.ended.wait(10)
    assert not worker.lost
    assert boss.states[-1] == "stopped"


def test_a_launcher_that_cannot_start_a_worker_again_is_named(tmp_path: Path) -> None:
    boss = supervised(tmp_path, af.WorkerEnding(1), OSError("no more slots"))

    assert boss.states == ["restarting", "failed"]
    assert "'w' cannot be started again: OSError: no more slots" in str(boss.errors[0])


def test_a_launcher_that_cannot_start_a_worker_at_all_raises(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no more slots"):
        supervised(tmp_path, OSError("no more slots"))


def test_a_launcher_that_loses_a_worker_is_named_in_the_end(tmp_path: Path) -> None:
    boss = supervised(tmp_path, *[RuntimeError("the cluster is gone")] * 3)

    assert boss.states == ["restarting", "restarting", "failed"]
    assert boss.errors[0].detail == "its launcher lost it: RuntimeError: the cluster is gone"


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path: Path) -> None:
    boss = supervised(tmp_path, af.WorkerEnding(-77), restarts=0)

    assert str(boss.errors[0]) == "worker 'w' was killed by signal 77"


def test_a_worker_of_a_run_that_was_closed_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Boss, "over", True)
    boss = supervised(tmp_path, af.WorkerEnding(1, "the run was closed"))
    assert boss.states == ["failed"]
    assert len(boss.errors) == 1
