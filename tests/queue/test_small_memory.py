"""Little shared memory: files instead, with one warning; and when it fills up, a put fails and nothing else."""

from typing import Any

import numpy as np
import pytest
from children import Child
from small_children import fill_up, serve_in_a_container


def hear(child: Child) -> Any:
    """What it says, if it may mount."""
    said = child.hear()
    if isinstance(said, str) and said.startswith("cannot"):
        pytest.skip(f"mounting a small /dev/shm needs root: {said}")
    return said


def test_a_container_with_little_shared_memory_works_on_files_and_warns_once(tmp_path: Any) -> None:
    # given 64 MB of /dev/shm, of which most is taken by what a killed run left
    with Child(serve_in_a_container, str(tmp_path), 64, 30) as child:
        # when more goes through the queue than there is shared memory
        outcome = hear(child)
        # then
        assert outcome["equal"] == 40
        assert outcome["base"] == str(tmp_path)
        assert child.wait() == 0
        warning = "/dev/shm has only 64 MB free; segments go to files in"
        assert child.errors().count(warning) == 1
        assert "--shm-size" in child.errors()
        # and nothing is left, of the killed run neither
        assert list(tmp_path.iterdir()) == []
        assert outcome["shm"] == []


def test_what_a_killed_run_left_does_not_make_shared_memory_small(tmp_path: Any) -> None:
    with Child(serve_in_a_container, str(tmp_path), 400, 300) as child:
        outcome = hear(child)
        assert (outcome["base"], outcome["equal"], outcome["shm"]) == ("/dev/shm", 40, [])
        assert child.errors() == ""


def test_shared_memory_that_fills_up_fails_puts_and_nothing_else(tmp_path: Any) -> None:
    # given a queue on 300 MB of shared memory, with rows leased and rows ready
    with Child(fill_up) as child:
        outcome = hear(child)
    # then while others fill it up, puts say what to do, also one of 5 GB
    assert len(outcome["errors"]) == 3
    for error in outcome["errors"]:
        assert error.startswith("MemoryFull: no room for ")
        assert "--shm-size" in error
    # and rows under way are read, completed with new columns, and those of a small put too
    assert outcome["read"] == [float(n) for n in range(5)]
    assert outcome["completed"] == np.arange(5.0).tolist()
    # and puts go on when there is room again
    assert outcome["after"] == 100
    assert outcome["balanced"]
