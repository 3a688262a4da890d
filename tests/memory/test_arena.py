"""An arena's memory is bounded: a full file system is an error, and any pattern of allocations holds no more than it needs."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_disk import on_disk

from asyncflow_sdk.errors import MemoryFull, ServerLost
from asyncflow_sdk.memory import HEADER_BYTES, Allocation, Arena, Mapper, SharedDirectory, segment

pytestmark = pytest.mark.fast

MB = 1 << 20


def free(arena: Arena, *blocks: Allocation) -> None:
    arena.free([block.serial for block in blocks])


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_with_less_memory_than_its_file_system_is_full_before_it_is_killed(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    # given a limit of 10 MB, of which 9 are used, 3 of them for files that can be read again
    (tmp_path / "memory").mkdir()
    files = {
        1: ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
        2: ("memory.max", "memory.current", "memory.stat", ""),
    }[version]
    (tmp_path / files[0]).write_text(f"{10 * MB}\n")
    (tmp_path / files[1]).write_text(f"{9 * MB}\n")
    (tmp_path / files[2]).write_text(f"anon 5\n{files[3]}inactive_file {2 * MB}\n{files[3]}active_file {MB}\n")
    monkeypatch.setattr(segment, "CGROUPS", tmp_path)
    arena = Arena(directory, "w", MB)
    # when / then
    with pytest.raises(MemoryFull, match="no room for"):
        arena.allocate(5 * MB)
    assert len(arena.allocate(3 * MB).memory) == 3 * MB
    # and without a limit
    (tmp_path / files[0]).write_text("max\n" if version == 2 else f"{1 << 62}\n")
    assert len(arena.allocate(20 * MB).memory) == 20 * MB
    # and where the machine has less
    (tmp_path / "meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 2048 kB\n")
    monkeypatch.setattr(segment, "MEMINFO", tmp_path / "meminfo")
    with pytest.raises(MemoryFull, match="no room for"):
        arena.allocate(5 * MB)


def test_a_directory_that_is_gone_is_a_run_that_has_ended(tmp_path: Path) -> None:
    with pytest.raises(ServerLost, match="is gone"):
        Arena(tmp_path / "no", "w").allocate(10)


class Churn:
    """Blocks that live and end, and the most bytes of them that lived together."""

    def __init__(self, arena: Arena) -> None:
        self.arena, self.live, self.most = arena, 0, 0

    def write(self, nbytes: int) -> Allocation:
        block = self.arena.allocate(nbytes)
        block.memory[HEADER_BYTES:] = block.serial % 251
        self.live += -(-max(nbytes, 1) // 64) * 64
        self.most = max(self.most, self.live)
        return block

    def end(self, block: Allocation) -> None:
        assert (block.memory[HEADER_BYTES:] == block.serial % 251).all()
        self.live -= -(-max(block.nbytes, 1) // 64) * 64
        free(self.arena, block)


@pytest.mark.parametrize("sizes", [(100, 500_000), (50_000, 3 * MB)])
@pytest.mark.parametrize("order", ["first", "any"])
def test_long_churn_holds_the_most_that_lived_and_one_segment(
    directory: Path, sizes: tuple[int, int], order: str
) -> None:
    # given blocks of many sizes, which end in order or in none; some live long
    numbers = random.Random(0)
    churn = Churn(Arena(directory, "w", MB))
    alive: list[Allocation] = []
    long: list[Allocation] = []
    low, high = sizes
    # when
    for turn in range(800):
        block = churn.write(int(low * (high / low) ** numbers.random()))
        (long if turn % 50 == 0 else alive).append(block)
        while churn.live > 8 * MB:
            churn.end(alive.pop(0 if order == "first" else numbers.randrange(len(alive))))
        while len(long) > 10 or sum(each.nbytes for each in long) > 4 * MB:
            churn.end(long.pop(numbers.randrange(len(long))))
        # then, at every moment
        assert churn.arena.nbytes <= churn.most + MB
        if turn % 100 == 0:
            assert on_disk(directory) == churn.arena.nbytes
    for block in alive + long:
        churn.end(block)


def test_a_kernel_that_cannot_populate_or_punch(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given one before 5.14, whose pages must be touched
    monkeypatch.setattr(segment, "_POPULATE_WRITE", 9999)
    numbers, churn, alive = random.Random(0), Churn(Arena(directory, "w", MB)), []
    for _ in range(300):
        alive.append(churn.write(numbers.randint(1000, 900_000)))
        while churn.live > 4 * MB:
            churn.end(alive.pop(numbers.randrange(len(alive))))
        assert on_disk(directory) == churn.arena.nbytes <= churn.most + MB
    # when, too, no page can be given back
    monkeypatch.setattr(segment.mmap, "MADV_REMOVE", 9999)
    for _ in range(300):
        alive.append(churn.write(numbers.randint(1000, 900_000)))
        while churn.live > 4 * MB:
            churn.end(alive.pop(numbers.randrange(len(alive))))
        # then it takes more, and counts it
        assert on_disk(directory) == churn.arena.nbytes <= 2 * churn.most + MB


def test_memory_of_a_burst_goes_back(directory: Path) -> None:
    # given a moment in which much lived
    churn = Churn(Arena(directory, "w", MB))
    for block in [churn.write(700_000) for _ in range(40)]:
        churn.end(block)
    held = churn.arena.nbytes
    assert held > 20 * MB
    # when much less does for a while
    for _ in range(2000):
        churn.end(churn.write(200_000))
    # then
    assert on_disk(directory) == churn.arena.nbytes <= 3 * MB
    assert len(list(directory.glob("w*"))) <= 3


def test_segments_are_few(directory: Path) -> None:
    """A process may open a thousand files."""
    arena = Arena(directory, "w", 1 << 16)
    blocks = [arena.allocate(30_000) for _ in range(1500)]
    assert len(list(directory.glob("w*"))) < 300
    assert arena.nbytes <= 1500 * 30_080 * 1.05
    free(arena, *blocks)


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
    assert arena.nbytes <= 2 * previous.nbytes + 2 * MB
    assert on_disk(directory) == arena.nbytes


def test_freeing_what_is_not_there_any_more_does_nothing(directory: Path) -> None:
    arena = Arena(directory, "w", MB)
    block = arena.allocate(10)
    arena.free([99, block.serial + 1])
    free(arena, block)
    again = arena.allocate(10)
    free(arena, block)  # the one before
    assert (again.segment, again.start) == (block.segment, block.start)
    assert again.serial > block.serial
    assert arena.blocks == 1


def test_what_nobody_may_look_at_is_not_scanned_on_every_allocation(directory: Path) -> None:
    # given many blocks that were freed while a reader looks at each
    arena, mapper = Arena(directory, "w", MB), Mapper(directory)

    def work(views: int) -> int:
        """Return the calls made by allocations while this many freed blocks are locked."""
        blocks = [arena.allocate(1000) for _ in range(views)]
        held = [mapper.view(block.segment, block.start, block.serial, block.nbytes) for block in blocks]
        free(arena, *blocks)
        calls = 0

        def count(frame: object, event: str, arg: object) -> None:
            nonlocal calls
            calls += 1

        more = [arena.allocate(1000)]
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            more += [arena.allocate(1000) for _ in range(20)]
        finally:
            sys.setprofile(before)
        held.clear()
        free(arena, *more)
        return calls

    # then allocations do not try all of them
    assert work(200) < 2 * work(20)
    # and when they are let go, their memory is used before any other is asked for
    held = arena.nbytes
    assert [arena.allocate(50_000) for _ in range(3)]
    assert arena.nbytes == held


@settings(max_examples=40)
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
                block = arena.allocate(HEADER_BYTES + which * 400)
                block.memory[HEADER_BYTES:] = number
                blocks.append((number, block))
            elif what == "free" and blocks:
                free(arena, *(blocks.pop(which % len(blocks))[1] for _ in range(min(len(blocks), which % 3 + 1))))
            elif what == "look" and blocks:
                value, block = blocks[which % len(blocks)]
                look = mapper.private_view if which % 2 else mapper.view
                view = look(block.segment, block.start, block.serial, block.nbytes)
                views.append((value, view[HEADER_BYTES:]))
            elif what == "drop" and views:
                views.pop(which % len(views))
            # then, after every step
            assert all((view == value).all() for value, view in views)
            assert all((block.memory[HEADER_BYTES:] == value).all() for value, block in blocks)
        views.clear()
    finally:
        mapper.close()
        arena.close(unlink=True)
        shared.close()
