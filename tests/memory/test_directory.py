"""The segments of a run lie in one directory, removed with the run, or by the next start after a kill -9."""

import fcntl
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from children import Child, hear, say

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.memory import SharedDirectory, remove_if_ownerless, sweep
from asyncflow_sdk.memory import directory as rules


def own(base: str, journal: str = "") -> None:
    """Own a run's directory until killed."""
    directory = SharedDirectory(Path(base), journal=Path(journal) if journal else None)
    (directory.path / "s1-1").write_bytes(b"payload")
    say(str(directory.path))
    hear()


def test_the_next_start_removes_what_a_killed_run_left_and_nothing_of_a_living_one(tmp_path: Path) -> None:
    # given two runs, one of which is killed
    with Child(own, str(tmp_path)) as killed, Child(own, str(tmp_path)) as living:
        left, kept = Path(killed.hear()), Path(living.hear())
        killed.kill()
        assert left.exists()
        # when
        mine = SharedDirectory(tmp_path)
        # then
        assert not left.exists()
        assert (kept / "s1-1").read_bytes() == b"payload"
        # and a frozen run is a living one
        living.stop()
        assert sweep(tmp_path) == []
        assert not remove_if_ownerless(kept)
        assert kept.exists()
        living.kill()
        assert sweep(tmp_path) == [kept]
        mine.close()


def test_who_sees_a_run_die_may_wait_for_its_lock(tmp_path: Path) -> None:
    # given somebody who knows that a run is ending
    with Child(own, str(tmp_path)) as dying:
        path = Path(dying.hear())
        outcome: list[bool] = []
        waiting = threading.Thread(target=lambda: outcome.append(remove_if_ownerless(path, wait_s=60)))
        waiting.start()
        # when
        dying.kill()
        waiting.join(60)
        # then
        assert outcome == [True]
        assert not path.exists()


def test_closing_removes_it_and_may_be_repeated(tmp_path: Path) -> None:
    directory = SharedDirectory(tmp_path)
    assert directory.path.stat().st_mode & 0o777 == 0o700
    (directory.path / "s1-1").touch()
    directory.close()
    directory.close()
    assert list(tmp_path.iterdir()) == []


def start_and_close(base: str, times: int) -> None:
    """Make and remove directories, as many runs that start at once do."""
    hear()
    for _ in range(times):
        directory = SharedDirectory(Path(base))
        for pause_s in (0.0005, 0.0):
            assert (directory.path / "owner").exists(), "swept away while its owner lives"
            time.sleep(pause_s)
        directory.close()
    say("done")


def test_runs_that_start_at_the_same_time_do_not_sweep_each_other_away(tmp_path: Path) -> None:
    # given
    with Child(start_and_close, str(tmp_path), 40) as one, Child(start_and_close, str(tmp_path), 40) as two:
        # when
        for each in (one, two):
            each.say("go")
        # then
        assert [one.hear(), two.hear()] == ["done", "done"]
        assert list(tmp_path.iterdir()) == []


def test_a_directory_without_an_owner_goes_when_it_is_old(tmp_path: Path) -> None:
    # given what a run leaves that is killed while it makes or removes its directory
    path = tmp_path / f"{rules.PREFIX}{os.getuid()}-1-0"
    path.mkdir()
    (path / "s1-1").touch()
    # when / then: it may be somebody's who is at it this moment
    assert sweep(tmp_path) == []
    os.utime(path, (0, 0))
    assert sweep(tmp_path) == [path]
    assert not path.exists()


def test_payload_of_a_journal_that_cannot_be_seen_is_removed_when_it_is_old(tmp_path: Path) -> None:
    # given a killed server whose journal is on a disk
    base, disk, elsewhere = tmp_path / "shm", tmp_path / "disk", tmp_path / "elsewhere"
    base.mkdir()
    (disk / "run" / "journal").mkdir(parents=True)
    with Child(own, str(base), str(disk / "run" / "journal")) as server:
        path = Path(server.hear())
        server.kill()
    # when the disk is not there, as in another container, or another one is in its place
    disk.rename(elsewhere)
    assert sweep(base) == []
    disk.mkdir()
    assert sweep(base) == []
    # and another run has a journal of the same path there
    (disk / "run" / "journal").mkdir(parents=True)
    SharedDirectory(base, journal=disk / "run" / "journal").close()
    # then nothing is removed
    assert (path / "s1-1").read_bytes() == b"payload"
    # until its server was alive a stated time ago
    shutil.rmtree(disk)
    os.utime(path / rules.MARK, (0, time.time() - rules.UNSEEN_S + 100))
    assert sweep(base) == []
    os.utime(path / rules.MARK, (0, time.time() - rules.UNSEEN_S))
    assert sweep(base) == [path]


def test_payload_of_a_journal_that_is_known_to_be_gone_is_removed(tmp_path: Path) -> None:
    base, journal = tmp_path / "shm", tmp_path / "run" / "journal"
    base.mkdir()
    journal.mkdir(parents=True)
    SharedDirectory(base, journal=journal).close(keep=True)
    assert sweep(base) == []
    shutil.rmtree(journal.parent)
    assert len(sweep(base)) == 1


def test_a_directory_that_is_removed_is_made_again_by_its_owner(tmp_path: Path) -> None:
    # given
    base, journal = tmp_path / "shm", tmp_path / "run" / "journal"
    base.mkdir()
    directory = SharedDirectory(base, journal=journal.parent)
    assert not directory.keep()
    # when
    shutil.rmtree(directory.path)
    # then it is there, still its owner's and its journal's, and is removed with it
    assert directory.keep()
    assert not directory.keep()
    assert not remove_if_ownerless(directory.path)
    directory.close(keep=True)
    assert (directory.path / rules.MARK).exists()


def test_other_users_and_other_files_are_left_alone(tmp_path: Path) -> None:
    for name in ("asyncflow-notes", f"{rules.PREFIX}{os.getuid() + 1}-1-0", "else"):
        (tmp_path / name).mkdir()
    assert sweep(tmp_path) == []


def test_a_small_shared_memory_falls_back_to_files_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # given
    monkeypatch.setattr(rules, "SMALL_BYTES", 1 << 60)
    monkeypatch.setattr(rules.tempfile, "gettempdir", lambda: str(tmp_path))
    # when
    directory = SharedDirectory()
    # then
    assert directory.path.parent == tmp_path
    assert "segments go to files" in directory.warning
    directory.close()


def test_what_others_put_under_such_a_name_is_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a file, a link, and a directory that is somebody else's, under names of this user's runs
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    base = tmp_path / "shm"
    base.mkdir()
    name = f"{rules.PREFIX}{os.getuid()}-"
    (base / f"{name}file").write_text("x")
    (base / f"{name}link").symlink_to(elsewhere)
    theirs = base / f"{name}theirs"
    theirs.mkdir()
    os.utime(theirs, (0, 0))  # old enough to be somebody's leftover
    lstat = Path.lstat

    def owned_by_another(path: Path) -> os.stat_result:
        state = lstat(path)
        return os.stat_result([*state[:4], state.st_uid + 1, *state[5:]]) if path == theirs else state

    monkeypatch.setattr(Path, "lstat", owned_by_another)
    # when / then
    assert sweep(base) == []
    assert {path.name[len(name) :] for path in base.iterdir()} == {"file", "link", "theirs"}
    assert elsewhere.exists()
    # and once it is this user's
    monkeypatch.undo()
    assert sweep(base) == [theirs]


def test_a_folder_that_is_gone_holds_no_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/gone"):
        SharedDirectory(tmp_path / "gone")


def test_a_process_that_stands_still_while_it_removes_a_directory_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a process that locks a new directory first, to remove it, and stands still
    held, opened = list[int](), os.open

    def open_late(path: Path, *arguments: int) -> int:
        file = opened(path, *arguments)
        if not held:
            held.append(opened(path, os.O_RDWR))
            fcntl.flock(held[0], fcntl.LOCK_EX)
        return file

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_late)
        # when, then another directory is made
        directory = SharedDirectory(tmp_path)
    os.close(held[0])
    directory.close(keep=True)
    # given such a process in the directory of an earlier server
    monkeypatch.setattr(rules, "LOCK_S", 0.1)
    with open(directory.path / "owner") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        # when, then the next server names it
        with pytest.raises(ConfigError, match=f"lock {directory.path}/owner cannot be taken"):
            SharedDirectory(path=directory.path)
