"""A full file system is an error, and its message names remedies."""

import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_disk import on_disk, small_disk

from asyncflow_sdk.errors import MemoryFull, ServerLost
from asyncflow_sdk.memory import HEADER_BYTES, Allocation, Arena

MB = 1 << 20


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    with small_disk(tmp_path / "disk", 4, inodes=12) as disk:
        yield disk.path


def free(arena: Arena, *blocks: Allocation) -> None:
    arena.free([block.serial for block in blocks])


def test_a_full_file_system_is_an_error_that_says_what_to_do(tiny: Path) -> None:
    # given
    arena = Arena(tiny, "w", MB)
    kept = [arena.allocate(900_000) for _ in range(3)]
    for block in kept:
        block.memory[HEADER_BYTES:] = 7
    # when
    with pytest.raises(MemoryFull, match=r"no room for \d+ more bytes.*--shm-size"):
        arena.allocate(2 * MB)
    # then nothing is left of the attempt, and what was there is as it was
    assert on_disk(tiny) == arena.nbytes <= 3 * MB
    assert all((block.memory[HEADER_BYTES:] == 7).all() for block in kept)
    # and there is room again as soon as something is freed
    free(arena, kept[0])
    again = arena.allocate(900_000)
    assert (again.segment, again.start) == (kept[0].segment, kept[0].start)


def test_a_block_beyond_all_memory_is_refused_before_a_table_of_its_pages_is_made(tmp_path: Path) -> None:
    tracemalloc.start()
    with pytest.raises(MemoryFull):
        Arena(tmp_path, "w", MB).allocate(1 << 42)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MB


def test_free_ranges_make_room_for_a_larger_block(tiny: Path) -> None:
    # given a file system full of blocks, of which every other one is freed
    arena = Arena(tiny, "w", MB)
    blocks = [arena.allocate(200_000) for _ in range(18)]
    for block in blocks:
        block.memory[HEADER_BYTES:] = 7
    free(arena, *blocks[::2])
    # when / then: what was free in pieces is there in one
    assert len(arena.allocate(1_300_000).memory) == 1_300_000
    assert on_disk(tiny) == arena.nbytes <= 4 * MB
    assert all((block.memory[HEADER_BYTES:] == 7).all() for block in blocks[1::2])


def test_no_inode_is_no_room_either(tiny: Path) -> None:
    for number in range(20):
        try:
            (tiny / f"file{number}").touch()
        except OSError:
            break
    with pytest.raises(MemoryFull, match="no room"):
        Arena(tiny, "w", 1 << 16).allocate(10)


def test_a_block_larger_than_the_file_system_is_refused_at_once(tiny: Path) -> None:
    # given
    arena = Arena(tiny, "w", MB)
    block = arena.allocate(1000)
    # when
    with pytest.raises(MemoryFull, match="no room for 5368709120 more bytes"):
        arena.allocate(5 << 30)
    # then nothing was tried: the others' room is as it was, and smaller ones go on
    assert arena.nbytes <= 2 * MB
    free(arena, block)
    assert len(arena.allocate(2_000_000).memory) == 2_000_000


def test_a_directory_that_is_gone_is_an_error_of_the_sdk_also_where_a_file_has_room(tmp_path: Path) -> None:
    # given an arena with free ranges, the pages of which are returned
    arena, nbytes = Arena(tmp_path / "run", "s1-", 1 << 20), 1 << 15
    (tmp_path / "run").mkdir()
    blocks = [arena.allocate(nbytes) for _ in range(256)]
    free(arena, *[block for number, block in enumerate(blocks) if number % 16])
    arena.shrink()
    # when
    shutil.rmtree(tmp_path / "run")
    # then
    with pytest.raises(ServerLost, match="is gone"):
        [arena.allocate(nbytes) for _ in range(256)]
    # and it goes on once that is there again
    (tmp_path / "run").mkdir()
    assert (tmp_path / "run" / arena.allocate(nbytes).segment).exists()
    arena.close(unlink=True)
