"""Silence costs leases, never mappings: memory is used again only after its last reader let go, or died."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from children import Child
from memory_children import digest, read, read_and_fork, view_at_exit

from asyncflow_sdk.errors import LeaseLost
from asyncflow_sdk.memory import Allocation, Arena, Mapper, SharedDirectory

SEGMENT = 1 << 16


@pytest.fixture
def directory() -> Iterator[Path]:
    shared = SharedDirectory(Path("/dev/shm"))
    yield shared.path
    shared.close()


def write(arena: Arena, value: int, nbytes: int = 40_000) -> Allocation:
    """A block of random bytes; two of the default size do not fit into one segment."""
    block = arena.allocate(nbytes)
    block.memory[:] = np.random.default_rng(value).integers(0, 256, nbytes, np.uint8)
    return block


def place(block: Allocation) -> tuple[str, int, int, int]:
    return block.segment, block.generation, block.start, block.stop


def churn(arena: Arena, times: int = 50) -> set[str]:
    """Write and free; returns the segments used."""
    used = set()
    for value in range(times):
        block = write(arena, 1000 + value)
        used.add(block.segment)
        arena.free(block.segment, block.generation)
    return used


def files_open_on(segment: Path) -> int:
    """Descriptors of this process for a segment."""
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return links.count(str(segment))


def test_a_segment_is_used_again_when_nobody_reads_it(directory: Path) -> None:
    # given
    arena = Arena(directory, "w", SEGMENT)
    # when
    used = churn(arena)
    # then
    assert len(used) == 1
    assert arena.nbytes == SEGMENT


def test_a_frozen_reader_keeps_its_view_for_ever(directory: Path) -> None:
    # given a reader in another process, frozen while it holds a view
    arena = Arena(directory, "w", SEGMENT)
    block = write(arena, 1)
    with Child(read, str(directory), place(block)) as reader:
        assert reader.hear() == digest(block.memory)
        reader.stop()
        # when the rows end and the writer goes on for long
        arena.free(block.segment, block.generation)
        used = churn(arena)
        # then what the reader sees has not changed
        assert block.segment not in used
        reader.resume()
        reader.say("again")
        assert reader.hear() == digest(np.random.default_rng(1).integers(0, 256, 40_000, np.uint8))
        assert arena.nbytes == 2 * SEGMENT


def test_a_killed_reader_holds_nothing(directory: Path) -> None:
    # given
    arena = Arena(directory, "w", SEGMENT)
    block = write(arena, 1)
    with Child(read, str(directory), place(block)) as reader:
        reader.hear()
        arena.free(block.segment, block.generation)
        assert block.segment not in churn(arena)
        # when
        reader.kill()
        # then its segment is used again
        arena.allocate(40_000)  # the other one is taken
        assert arena.allocate(40_000).segment == block.segment
        assert arena.nbytes == 2 * SEGMENT


def test_a_late_reader_finds_another_generation_and_not_other_data(directory: Path) -> None:
    # given a block that was freed and whose segment was used again
    arena, mapper = Arena(directory, "w", SEGMENT), Mapper(directory)
    block = write(arena, 1)
    arena.free(block.segment, block.generation)
    again = write(arena, 2)
    assert again.segment == block.segment
    # when / then
    for look in (mapper.view, mapper.private):
        with pytest.raises(LeaseLost, match="used again"):
            look(*place(block))
    assert digest(mapper.view(*place(again))) == digest(again.memory)
    # and a refused reader holds nothing up
    arena.free(again.segment, again.generation)
    assert churn(arena) == {block.segment}


def test_a_segment_that_is_gone_or_too_short_is_no_view(directory: Path) -> None:
    arena, mapper = Arena(directory, "w", SEGMENT), Mapper(directory)
    block = write(arena, 1)
    with pytest.raises(LeaseLost, match="is gone"):
        mapper.view("w99", 1, 0, 10)
    with pytest.raises(LeaseLost, match="no segment name"):
        mapper.view("../w1", 1, 0, 10)
    with pytest.raises(LeaseLost, match="bytes, not"):
        mapper.view(block.segment, block.generation, 0, SEGMENT + 1)


def test_a_view_collected_while_another_is_made_does_not_unlock_it(directory: Path) -> None:
    # given a view that only the garbage collector can free, which comes after any number of allocations
    arena, mapper = Arena(directory, "w", SEGMENT), Mapper(directory)
    block = write(arena, 1)
    before = gc.get_threshold()
    gc.freeze()  # what other tests left need not be looked through each time
    for allocations in range(1, 40):
        gc.collect()
        gc.disable()
        cycle: list[object] = [mapper.view(*place(block))]
        cycle.append(cycle)
        del cycle
        gc.set_threshold(allocations)
        # when
        gc.enable()
        try:
            held = mapper.view(*place(block))
        finally:
            gc.set_threshold(*before)
        gc.collect()
        # then the segment cannot be used again below the new view
        assert not arena._segments[block.segment].renew()
        del held
    gc.unfreeze()


def test_views_outlive_their_mapper_and_then_let_go(directory: Path) -> None:
    # given a view whose mapper is closed
    arena, mapper = Arena(directory, "w", SEGMENT), Mapper(directory)
    block = write(arena, 1)
    view = mapper.view(*place(block))[10:20]
    mapper.close()
    arena.free(block.segment, block.generation)
    assert block.segment not in churn(arena)
    assert files_open_on(directory / block.segment) > 2
    # when the last view goes
    assert view.tolist() == np.random.default_rng(1).integers(0, 256, 40_000, np.uint8)[10:20].tolist()
    del view
    # then no file stays open and the segment is used again
    assert files_open_on(directory / block.segment) == 2  # the writer's
    arena.allocate(40_000)
    assert arena.allocate(40_000).segment == block.segment


def test_a_forked_child_neither_unlocks_nor_maps_nor_writes(directory: Path) -> None:
    # given a reader that forks: one child drops the view, one tries to use memory
    arena = Arena(directory, "w", SEGMENT)
    block = write(arena, 1)
    with Child(read_and_fork, str(directory), place(block)) as reader:
        assert reader.hear() == [0, 3]  # all three attempts are refused by name
        # when
        arena.free(block.segment, block.generation)
        assert block.segment not in churn(arena)
        # then the parent's view is as it was
        reader.say("look")
        assert reader.hear() is True


def test_an_interpreter_may_end_with_views_in_hand(directory: Path) -> None:
    block = write(Arena(directory, "w", SEGMENT), 1)
    with Child(view_at_exit, str(directory), place(block)) as reader:
        assert reader.wait() == 0
        assert reader.errors() == ""


def test_threads_that_take_and_drop_views_leave_no_lock_behind(directory: Path) -> None:
    # given several threads over the same few segments
    arena, mapper = Arena(directory, "w", SEGMENT), Mapper(directory)
    blocks = [write(arena, value) for value in range(4)]
    wrong: list[object] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(300):
            value = int(random.integers(4))
            look = (mapper.view, mapper.private)[int(random.integers(2))]
            view = look(*place(blocks[value]))
            if view[17] != blocks[value].memory[17]:
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # when all is freed
    for block in blocks:
        arena.free(block.segment, block.generation)
    # then every segment can be used again
    assert wrong == []
    assert all(segment.renew() for segment in arena._segments.values())
