"""Room is real and bounded: a full file system is an error, and churn of any shape holds no more than it needs."""

import random
import subprocess
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_sdk.errors import MemoryFull, ServerLost
from asyncflow_sdk.memory import Allocation, Arena, Mapper, SharedDirectory

MB = 1 << 20


@pytest.fixture
def directory() -> Iterator[Path]:
    shared = SharedDirectory(Path("/dev/shm"))
    yield shared.path
    shared.close()


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=12", "tmpfs", str(tmp_path)],
            check=True, capture_output=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a small tmpfs needs root: {error}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def on_disk(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("w*"))


def free(arena: Arena, block: Allocation) -> None:
    arena.free(block.segment, block.generation)


def test_a_full_file_system_is_an_error_that_says_what_to_do(tiny: Path) -> None:
    # given
    arena = Arena(tiny, "w", MB)
    kept = [arena.allocate(900_000) for _ in range(3)]
    for block in kept:
        block.memory[:] = 7
    # when
    with pytest.raises(MemoryFull, match=r"no room for a segment of \d+ bytes.*--shm-size"):
        arena.allocate(2 * MB)
    # then nothing is left of the attempt, and what was there is as it was
    assert on_disk(tiny) == arena.nbytes == 3 * MB
    assert all((block.memory == 7).all() for block in kept)
    # and there is room again as soon as something is freed
    free(arena, kept[0])
    assert arena.allocate(900_000).segment == kept[0].segment


def test_idle_segments_make_room_for_a_larger_one(tiny: Path) -> None:
    # given a file system full of segments that are idle and too small
    arena = Arena(tiny, "w", MB)
    blocks = [arena.allocate(900_000) for _ in range(4)]
    while blocks:
        free(arena, blocks.pop())
    # when / then
    assert len(arena.allocate(3_500_000).memory) == 3_500_000
    assert on_disk(tiny) == arena.nbytes


def test_no_inode_is_no_room_either(tiny: Path) -> None:
    for number in range(20):
        try:
            (tiny / f"file{number}").touch()
        except OSError:
            break
    with pytest.raises(MemoryFull, match="no room"):
        Arena(tiny, "w", 1 << 16).allocate(10)


def test_a_directory_that_is_gone_is_a_run_that_has_ended(tmp_path: Path) -> None:
    with pytest.raises(ServerLost, match="is gone"):
        Arena(tmp_path / "no", "w").allocate(10)


def test_long_churn_holds_what_lives_and_two_segments(directory: Path) -> None:
    # given blocks of all sizes, freed in order, as rows end
    arena, numbers = Arena(directory, "w", MB), random.Random(0)
    alive: deque[Allocation] = deque()
    most = 0
    # when
    for _ in range(20_000):
        alive.append(arena.allocate(numbers.choice([0, 1, 63, 64, 1000, 40_000, 200_000])))
        while sum(len(block.memory) for block in alive) > 3 * MB:
            free(arena, alive.popleft())
        most = max(most, arena.nbytes)
    # then
    assert most <= 6 * MB
    assert on_disk(directory) == arena.nbytes


def test_blocks_that_grow_do_not_leave_all_their_sizes_behind(directory: Path) -> None:
    # given responses that get longer: each block larger than the one before
    arena = Arena(directory, "w", MB)
    previous = arena.allocate(MB)
    # when
    for step in range(1, 40):
        block = arena.allocate(MB + step * 100_000)
        free(arena, previous)
        previous = block
    # then
    assert arena.nbytes <= 2 * len(previous.memory) + 2 * MB
    assert on_disk(directory) == arena.nbytes


def test_freeing_what_is_not_there_any_more_does_nothing(directory: Path) -> None:
    arena = Arena(directory, "w", MB)
    block = arena.allocate(10)
    arena.free("w99", 1)
    arena.free(block.segment, block.generation + 1)
    free(arena, block)
    again = arena.allocate(10)
    free(arena, block)  # of the generation before
    assert (again.segment, again.generation) == (block.segment, block.generation + 1)
    free(arena, again)


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(["write", "free", "look", "drop"]), st.integers(0, 30)), max_size=60))
def test_no_view_ever_changes(steps: list[tuple[str, int]]) -> None:
    # given blocks, each full of its own number, and views of some of them
    shared = SharedDirectory(Path("/dev/shm"))
    arena, mapper = Arena(shared.path, "w", 1 << 14), Mapper(shared.path)
    blocks: list[tuple[int, Allocation]] = []
    views: list[tuple[int, np.ndarray]] = []  # type: ignore[type-arg]
    number = 0
    try:
        for what, which in steps:
            if what == "write":
                number = (number + 1) % 251
                block = arena.allocate(which * 400)
                block.memory[:] = number
                blocks.append((number, block))
            elif what == "free" and blocks:
                free(arena, blocks.pop(which % len(blocks))[1])
            elif what == "look" and blocks:
                value, block = blocks[which % len(blocks)]
                look = mapper.private if which % 2 else mapper.view
                views.append((value, look(block.segment, block.generation, block.start, block.stop)))
            elif what == "drop" and views:
                views.pop(which % len(views))
            # then, after every step
            assert all((view == value).all() for value, view in views)
            assert all((block.memory == value).all() for value, block in blocks)
        views.clear()
    finally:
        mapper.close()
        arena.close(unlink=True)
        shared.close()
