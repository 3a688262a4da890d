"""Blocks trimmed or renewed in place, and mappings reused."""

import gc
import mmap
from pathlib import Path

import numpy as np
import pytest
from small_disk import on_disk

from asyncflow_sdk.errors import LeaseLost
from asyncflow_sdk.memory import HEADER_BYTES, Allocation, Arena, Mapper, PrivateMaps
from asyncflow_sdk.memory import mapper as mapping

pytestmark = pytest.mark.fast

MB = 1 << 20


def place(block: Allocation) -> tuple[str, int, int, int]:
    return block.segment, block.start, block.serial, block.nbytes


def test_what_lies_behind_a_trimmed_block_is_free(directory: Path) -> None:
    # given
    arena = Arena(directory, "w", MB)
    block = arena.allocate(MB // 2)
    # when
    arena.trim(block, 1000)
    # then
    assert block.nbytes == 1000
    behind = arena.allocate(MB // 2 - 1024)
    assert (behind.segment, behind.start) == (block.segment, block.start + 1024)
    block.memory[HEADER_BYTES:] = 1
    behind.memory[HEADER_BYTES:] = 2
    assert set(Mapper(directory).view(*place(block))[HEADER_BYTES:]) == {1}
    # and with the block, the whole range is
    arena.free([block.serial, behind.serial])
    assert arena.allocate(MB // 2).start == block.start


@pytest.mark.parametrize("nbytes", [1, 64, 1000, 1024])
def test_a_block_is_trimmed_to_what_is_used_and_no_less(directory: Path, nbytes: int) -> None:
    arena = Arena(directory, "w", MB)
    block = arena.allocate(1024)
    arena.trim(block, nbytes)
    arena.trim(block, nbytes)
    assert block.nbytes == nbytes
    assert arena.allocate(64).start == max(-(-nbytes // 64), 1) * 64


def test_a_renewed_block_is_another_one_with_the_same_bytes(directory: Path) -> None:
    # given
    arena, mapper = Arena(directory, "w", MB), Mapper(directory)
    block = arena.allocate(5000)
    block.memory[HEADER_BYTES:] = 7
    old = place(block)
    view = mapper.view(*old)
    # when somebody reads it, it stays
    assert not arena.renew(block)
    assert place(block) == old
    # and when nobody does, it is gone
    del view
    assert arena.renew(block)
    assert block.serial != old[2]
    with pytest.raises(LeaseLost):
        mapper.view(*old)
    assert set(mapper.view(*place(block))[HEADER_BYTES:]) == {7}
    arena.free([old[2]])  # a serial that is not there any more
    assert arena.blocks == 1
    arena.free([block.serial])
    assert arena.blocks == 0


def test_what_is_free_goes_back_when_it_is_settled(directory: Path) -> None:
    arena = Arena(directory, "w", MB)
    blocks = [arena.allocate(4 * MB) for _ in range(5)]
    arena.free([block.serial for block in blocks[1:]])
    assert arena.nbytes == 20 * MB
    arena.shrink()
    assert arena.nbytes <= 5 * MB
    assert on_disk(directory) == arena.nbytes


def taken(mapper: Mapper, maps: PrivateMaps, block: Allocation) -> np.ndarray:  # type: ignore[type-arg]
    return mapper.private_view(*place(block), skip=HEADER_BYTES, maps=maps)


def test_a_mapping_that_nobody_wrote_into_shows_the_next_block_in_its_place(directory: Path) -> None:
    # given
    arena, mapper, maps = Arena(directory, "w", MB), Mapper(directory), PrivateMaps()
    block, address = arena.allocate(MB // 2), 0
    for number in range(1, 10):
        block.memory[HEADER_BYTES:] = number
        # when
        view = taken(mapper, maps, block)
        # then
        assert set(view) == {number}
        assert address in (0, view.ctypes.data)
        address = view.ctypes.data
        assert not arena.renew(block)  # it holds the block as any view does
        del view
        assert arena.renew(block)


def mappings(directory: Path, block: Allocation) -> int:
    """Mappings that this process has of the segment of a block."""
    name = str(directory / block.segment)
    return sum(line.rstrip().split(" (deleted)")[0].endswith(name) for line in Path("/proc/self/maps").open())


def test_mappings_keep_no_memory_of_segments_that_are_gone(directory: Path) -> None:
    # given idle mappings of a writer that has ended, and of one that goes on
    mapper, maps = Mapper(directory), PrivateMaps()
    ended, goes_on = Arena(directory, "w1-", MB), Arena(directory, "w2-", MB)
    gone, there = (arena.allocate(MB // 2) for arena in (ended, goes_on))
    for block in (gone, there):
        taken(mapper, maps, block)
    before = mappings(directory, gone), mappings(directory, there)
    # when
    ended.close(unlink=True)
    maps.prune()
    # then
    assert mappings(directory, gone) == before[0] - 1
    assert mappings(directory, there) == before[1]
    view = taken(mapper, maps, there)
    maps.close()
    del view
    gc.collect()
    assert mappings(directory, there) == before[1] - 1


def test_a_kernel_that_cannot_get_pages_ahead_gets_them_as_they_are_read(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "_POPULATE_READ", 9999)
    arena, mapper = Arena(directory, "w", MB), Mapper(directory)
    block = arena.allocate(3 * mmap.PAGESIZE)
    block.memory[HEADER_BYTES:] = 3
    assert set(taken(mapper, PrivateMaps(), block)) == {3}
