"""The directory of a storage unit: found again by the next unit, kept for a time without one, and then removed."""

import os
import time
from pathlib import Path

import pytest
from children import Child, hear, say

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.memory import KEEP_S, HomeDirectory, SharedDirectory, find_home_directory, sweep


def own(base: str, run: str) -> None:
    """Own the directory of a home until killed."""
    say(str(HomeDirectory(run, Path(base)).path))
    hear()


def test_the_next_unit_of_a_run_finds_the_files_of_one_that_was_killed(tmp_path: Path) -> None:
    with Child(own, str(tmp_path), "one") as first, Child(own, str(tmp_path), "two") as other:
        path, theirs = Path(first.hear()), Path(other.hear())
        assert (find_home_directory("one", tmp_path), find_home_directory("two", tmp_path)) == (path, theirs)
        # while it lives, there is no other
        with pytest.raises(ConfigError, match="serves .* already"):
            HomeDirectory("one", tmp_path)
        (path / "h1.1!s7-1").write_bytes(b"payload")
        first.kill()
        # when servers start beside it
        SharedDirectory(tmp_path).close()
        assert sweep(tmp_path) == []
        # then
        again = HomeDirectory("one", tmp_path)
        assert again.path == path
        assert [segment.read_bytes() for segment in again.segments()] == [b"payload"]
        again.close(keep=True)
        HomeDirectory("one", tmp_path).close(keep=False)
        assert not path.exists()
        assert find_home_directory("one", tmp_path) is None


def test_files_of_a_unit_that_does_not_come_back_are_removed(tmp_path: Path) -> None:
    directory = HomeDirectory("one", tmp_path)
    directory.close(keep=True)
    assert sweep(tmp_path) == []
    old = time.time() - KEEP_S - 1
    os.utime(directory.path / "home", (old, old))
    assert sweep(tmp_path) == [directory.path]
    # and one that lives is kept, however long it was silent
    living = HomeDirectory("one", tmp_path)
    assert living.path != directory.path
    os.utime(living.path / "home", (old, old))
    assert sweep(tmp_path) == []
    living.touch()
    living.close(keep=False)
    with pytest.raises(FileNotFoundError):
        living.touch()
