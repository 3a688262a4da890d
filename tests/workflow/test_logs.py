"""Where workers log, with a directory and without."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from functions import doubled, vanishes, writes_and_dies

import asyncflow_sdk as af
from asyncflow_sdk.errors import WorkerFailed
from asyncflow_sdk.workflow.processes import launchers


def test_workers_of_a_run_with_a_directory_log_there(tmp_path: Path) -> None:
    with af.serve(tmp_path / "run") as run:
        (worker,) = run.start(af.Stage(doubled, task="after", needs=["reward"], gives=["again"]))
        assert worker.spec.log == tmp_path / "run" / "logs" / "after-0.log"
    assert worker.spec.log.is_file()


def test_workers_of_a_client_log_where_it_says(tmp_path: Path) -> None:
    with af.serve() as server, af.connect(server.address, logs=tmp_path / "mine") as client:
        client.start(af.Stage(doubled, task="after", needs=["reward"], gives=["again"]))
    assert [path.suffix for path in (tmp_path / "mine").iterdir()] == [".log"]


@pytest.mark.parametrize("kind", ["server", "client"])
def test_a_run_without_a_directory_writes_nothing_where_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with af.serve() as server, af.connect(server.address) as client:
        run = server if kind == "server" else client

        (worker,) = run.start(af.Stage(doubled, task="after", needs=["reward"], gives=["again"]))

        folder = worker.spec.log.parent
        assert worker.spec.log.is_file()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists(), "nothing failed, so nobody wants it"
    assert os.listdir(tmp_path) == []


def test_the_log_of_a_worker_that_failed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with af.serve() as run:
        run.queue.put({"response_ids": [[1]]})
        (worker,) = run.start(af.Stage(vanishes, task="after", gives=["again"], max_restarts=0))
        with pytest.raises(WorkerFailed):
            run.wait(worker, timeout_s=100)

    assert worker.spec.log.is_file()
    assert os.listdir(tmp_path) == []
    worker.spec.log.unlink()
    worker.spec.log.parent.rmdir()


def test_logs_rotate_and_the_last_lines_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a worker that writes three times the size of a log, and dies
    monkeypatch.setattr(launchers, "LOG_BYTES", 200_000)
    dies = af.Stage(writes_and_dies, task="after", needs=["response_ids"], gives=["again"], max_restarts=0)
    with af.serve(tmp_path / "run") as run:
        run.queue.put({"response_ids": [[1]]})
        (worker,) = run.start(dies)
        # when its end is reported, then the report has the last lines
        with pytest.raises(WorkerFailed, match="line 49999\nthe last line"):
            run.wait(worker, timeout_s=100)
    # and two files of limited size have all the last lines, in order
    log = worker.spec.log
    files = [log.with_name("after-0.log.1"), log]
    assert sorted(log.parent.iterdir()) == sorted(files)
    assert all(each.stat().st_size <= 200_000 for each in files)
    lines = "".join(each.read_text() for each in files).splitlines()[1:]  # the first may be cut
    assert lines == [*(f"line {number}" for number in range(50_001 - len(lines), 50_000)), "the last line"]
