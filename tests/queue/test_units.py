"""Storage units as processes: started once for a host, detached, and ended with their run."""

import contextlib
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from children import Child, hear, say
from queue_runs import in_threads, running
from waiting import until

from asyncflow_sdk.errors import ConfigError, DeadlineExceeded
from asyncflow_sdk.interfaces.store import HomeOffer
from asyncflow_sdk.queue.connection import Connection
from asyncflow_sdk.queue.stores.unit import UnitConfig, ensure_unit
from asyncflow_sdk.queue.unit_process import run_unit
from asyncflow_sdk.wire import RunKey


def unit_of(address: str, key: str) -> None:
    """A unit of a run that is served elsewhere, until the run ends or a line is heard."""
    stop = threading.Event()
    threading.Thread(target=lambda: (hear(), stop.set()), daemon=True).start()

    known = RunKey.load(key) if key else None

    def told(text: str) -> None:
        with contextlib.closing(Connection(address, "test", key=known, insecure=not key)) as connection:
            (home,) = connection.homes().homes()
        say([text, home.name, home.directory, home.key])

    run_unit(UnitConfig(address, key=known, insecure=not key), told, stop, beat_s=0.05)
    say("ended")


@pytest.mark.parametrize("secure", [True, False])
def test_a_unit_ends_with_its_run_and_leaves_nothing(tmp_path: Path, secure: bool) -> None:
    keys: dict[str, Any] = {"directory": tmp_path / "run"} if secure else {"insecure": True}
    served = running("tcp", store="hosts", **keys)
    with served as run:
        key = str(tmp_path / "run" / "run.key") if secure else ""
        with Child(unit_of, run.address, key) as child:
            text, name, directory, public = child.hear()
            assert text.startswith("home 1, epoch 1, is served at tcp://127.0.0.1:")
            assert name.endswith("-127.0.0.1")
            assert bool(public) == secure
            assert (Path(directory) / "home").exists()
            # when the run ends
            run.run.queue.end()
            run.close()
            # then
            assert child.hear() == "ended"
            assert not Path(directory).exists()


def test_a_unit_that_is_stopped_leaves_its_files_to_the_next(tmp_path: Path) -> None:
    with running("tcp", tmp_path / "run", store="hosts") as run:
        key = str(tmp_path / "run" / "run.key")
        with Child(unit_of, run.address, key) as child:
            directory = Path(child.hear()[2])
            child.say("stop")
            assert child.hear() == "ended"
        assert directory.exists()
        with Child(unit_of, run.address, key) as child:
            assert Path(child.hear()[2]) == directory
            run.run.queue.end()
            run.close()
            assert child.hear() == "ended"
        assert not directory.exists()


def test_a_unit_begins_anew_if_a_file_of_it_is_removed(tmp_path: Path) -> None:
    with running("tcp", tmp_path / "run", store="hosts") as run:
        key = str(tmp_path / "run" / "run.key")
        queue = run.run.queue
        queue.declare("work", needs=["x"])
        with Child(unit_of, run.address, key) as child:
            directory = Path(child.hear()[2])
            producers = [run.queue(shared_memory=False) for _ in range(2)]
            for producer in producers:
                producer.put({"x": [1.0, 2.0]})
            segment, _ = sorted(directory.glob("h*!s*"))
            segment.unlink()
            until(lambda: run.run.audit().failed == 4, "the loss of its rows")
            (reason,) = {reason for group in queue.failed() for reason in group.reasons}
            assert f"payload lost: home {run.run.homes()[0].name} was lost, its contents are gone" in reason
            # while the unit and its writers go on
            for producer in producers:
                producer.put({"x": [3.0]})
            with queue.get("work", 2, at_least=2) as batch:
                assert batch["x"].tolist() == [3.0, 3.0]
                batch.ack()
            assert run.run.homes()[0].epoch == 2
            # a unit without its directory ends
            child.stop()  # else it removes files, too
            shutil.rmtree(directory)
            child.resume()
            assert child.hear() == "ended"


def test_a_run_with_one_home_opens_no_others() -> None:
    with running("ipc") as run:
        homes = run.queue().connection.homes()  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="has the store 'local', and no home of 'hosts'"):
            homes.open(HomeOffer(store="hosts", name="b", identity="b"))
        assert homes.homes() == ()


# ---- starting


PROGRAM = "asyncflow_sdk.queue.stores.unit.PROGRAM"
STARTED = """
import sys, os, time, pathlib
folder = pathlib.Path({folder!r})
(folder / f"started-{{os.getpid()}}").write_bytes(sys.stdin.buffer.read())
time.sleep(0.2)
(folder / "open").touch()
time.sleep(600)
"""


def started(folder: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in folder.glob("started-*")]


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return "run"


def test_workers_that_start_at_the_same_time_start_one_unit(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PROGRAM, ("-c", STARTED.format(folder=str(tmp_path))))
    config = UnitConfig("tcp://127.0.0.1:1", name="n")

    def work(number: int) -> Any:
        return ensure_unit(name, config, (tmp_path / "open").exists)

    in_threads(4, work)
    (pid,) = started(tmp_path)
    try:
        # in a session of its own, and told what to serve
        assert os.getsid(pid) == pid
        assert b'"address":"tcp://127.0.0.1:1"' in next(tmp_path.glob("started-*")).read_bytes()
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_unit_that_cannot_start_says_why(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = UnitConfig("tcp://127.0.0.1:1")
    monkeypatch.setattr(PROGRAM, ("-c", "print('no such luck'); raise SystemExit(3)"))
    with pytest.raises(DeadlineExceeded, match="ended with 3; its log, .*, ends: no such luck"):
        ensure_unit(name, config, lambda: False)
    monkeypatch.setattr(PROGRAM, ("-c", STARTED.format(folder=str(tmp_path))))
    with pytest.raises(DeadlineExceeded, match="did not open its home"):
        ensure_unit(name, config, lambda: False, timeout_s=0.5)
    for pid in started(tmp_path):
        until(lambda pid=pid: not Path(f"/proc/{pid}/cmdline").exists(), "its end")  # type: ignore[misc]


def test_the_real_program_reads_its_config_and_says_what_is_wrong(name: str) -> None:
    assert sys.executable
    with running("tcp", insecure=True) as run:
        config = UnitConfig(run.address, insecure=True)
        with pytest.raises(DeadlineExceeded, match="ended with 1; .*ConfigError: .*has the store .local."):
            ensure_unit(name, config, lambda: False)
