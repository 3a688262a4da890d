"""Memory is reused only after its last reader has released it, or died."""

import gc
import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import Child, hear, say

from asyncflow_sdk.errors import AsyncFlowError, LeaseLost
from asyncflow_sdk.memory import HEADER_BYTES, Allocation, Arena, Mapper
from asyncflow_sdk.memory.segment import try_lock

SEGMENT = 1 << 16


def write(arena: Arena, value: int, nbytes: int = 40_000) -> Allocation:
    """A block of random bytes."""
    block = arena.allocate(nbytes)
    block.memory[HEADER_BYTES:] = payload(value, nbytes)
    return block


def payload(value: int, nbytes: int = 40_000) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(value).integers(0, 256, nbytes - HEADER_BYTES, np.uint8)


def place(block: Allocation) -> tuple[str, int, int, int]:
    return block.segment, block.start, block.serial, block.nbytes


def where(block: Allocation) -> tuple[str, int]:
    return block.segment, block.start


def churn(arena: Arena, times: int = 50) -> set[tuple[str, int]]:
    """Write and free; returns the places used."""
    used = set()
    for value in range(times):
        block = write(arena, 1000 + value)
        used.add(where(block))
        arena.free([block.serial])
    return used


def unread(directory: Path, block: Allocation) -> bool:
    """True if no process has a lock on a block."""
    fd = os.open(directory / block.segment, os.O_RDWR)
    try:
        return try_lock(fd, block.start, block.start + block.nbytes, exclusive=True)
    finally:
        os.close(fd)


def files_open_on(segment: Path) -> int:
    """Descriptors of this process for a segment."""
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return links.count(str(segment))


def test_a_range_is_used_again_when_nobody_reads_it(directory: Path) -> None:
    # given
    arena = Arena(directory, "w", SEGMENT)
    # when
    used = churn(arena)
    # then
    assert len(used) == 1
    assert arena.nbytes <= SEGMENT


def digest(view: Any) -> str:
    return hashlib.sha256(view).hexdigest()


def read(directory: str, place: list[Any]) -> None:
    """Hold a view; say its digest now, and again whenever told to."""
    view = Mapper(Path(directory)).view(*place)
    say(digest(view))
    while hear() == "again":
        say(digest(view))


def test_a_frozen_reader_keeps_its_view_for_ever(directory: Path) -> None:
    # given a reader in another process, frozen while it holds a view
    arena = Arena(directory, "w", SEGMENT)
    block = write(arena, 1)
    with Child(read, str(directory), place(block)) as reader:
        before = digest(block.memory)
        assert reader.hear() == before
        reader.stop()
        # when the rows end and the writer goes on for long
        arena.free([block.serial])
        used = churn(arena)
        # then what the reader sees has not changed
        assert where(block) not in used
        reader.resume()
        reader.say("again")
        assert reader.hear() == before
        assert arena.nbytes <= 2 * SEGMENT


def test_a_killed_reader_holds_nothing(directory: Path) -> None:
    # given
    arena = Arena(directory, "w", SEGMENT)
    block = write(arena, 1)
    with Child(read, str(directory), place(block)) as reader:
        reader.hear()
        arena.free([block.serial])
        assert where(block) not in churn(arena)
        # when
        reader.kill()
        # then its range is used again
        assert where(block) in {where(arena.allocate(40_000)), where(arena.allocate(40_000))}
        assert arena.nbytes <= 2 * SEGMENT


def test_a_late_reader_finds_another_serial_and_not_other_data(directory: Path) -> None:
    # given a block that was freed and whose segment was used again
    arena, mapper = Arena(directory, "w", SEGMENT), Mapper(directory)
    block = write(arena, 1)
    arena.free([block.serial])
    again = write(arena, 2)
    assert where(again) == where(block)
    # when / then
    for look in (mapper.view, mapper.private_view):
        with pytest.raises(LeaseLost, match="used again"):
            look(*place(block))
    assert digest(mapper.view(*place(again))) == digest(again.memory)
    # and a refused reader holds nothing up
    arena.free([again.serial])
    assert churn(arena) == {where(block)}


def test_blocks_freed_together_are_gone_together(directory: Path) -> None:
    # given blocks side by side, of which one is looked at
    arena, mapper = Arena(directory, "w", SEGMENT), Mapper(directory)
    blocks = [write(arena, value, 1000) for value in range(10)]
    held = mapper.view(*place(blocks[6]))
    before = digest(held)
    # when
    arena.free([block.serial for block in blocks])
    # then nobody else finds any, though nothing else was written there yet
    for block in [*blocks[:6], *blocks[7:]]:
        with pytest.raises(LeaseLost, match="used again"):
            mapper.view(*place(block))
    assert mapper.view(*place(blocks[6]))[16:].tobytes() == held[16:].tobytes()
    # and their memory is used again around the one
    again = [write(arena, 100 + value, 1000) for value in range(9)]
    assert sorted(map(where, again)) == sorted(where(block) for block in blocks if block is not blocks[6])
    assert digest(held) == before
    del held
    assert where(write(arena, 200, 1000)) == where(blocks[6])


def test_a_segment_that_is_gone_or_too_short_is_no_view(directory: Path) -> None:
    arena, mapper = Arena(directory, "w", SEGMENT), Mapper(directory)
    block = write(arena, 1)
    with pytest.raises(LeaseLost, match="is gone"):
        mapper.view("w99", 0, 1, 10)
    with pytest.raises(LeaseLost, match="no segment name"):
        mapper.view("../w1", 0, 1, 10)
    with pytest.raises(LeaseLost, match="bytes, not"):
        mapper.view(block.segment, block.start, block.serial, SEGMENT + 1)


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
        # then the block cannot be used again below the new view
        assert not unread(directory, block)
        del held
    gc.unfreeze()


def test_views_outlive_their_mapper_and_then_let_go(directory: Path) -> None:
    # given a view whose mapper is closed
    arena, mapper = Arena(directory, "w", SEGMENT), Mapper(directory)
    block = write(arena, 1)
    view = mapper.view(*place(block))[HEADER_BYTES + 100 : HEADER_BYTES + 110]
    mapper.close()
    arena.free([block.serial])
    assert where(block) not in churn(arena)
    assert files_open_on(directory / block.segment) > 2
    # when the last view goes
    assert view.tolist() == payload(1)[100:110].tolist()
    del view
    # then no file stays open and the range is used again
    assert files_open_on(directory / block.segment) == 2  # the writer's
    assert where(block) in {where(arena.allocate(40_000)), where(arena.allocate(40_000))}


def read_and_fork(directory: str, place: list[Any]) -> None:
    """Hold a view; fork a child that lets its copy of the view go, and one that tries to read and write."""
    mapper, arena = Mapper(Path(directory)), Arena(Path(directory), "forked")
    arena.allocate(10)
    view = mapper.view(*place)
    before = digest(view)
    if not (first := os.fork()):
        del view
        os._exit(0)
    if not (second := os.fork()):
        for attempt in (lambda: mapper.view(*place), lambda: mapper.private_view(*place), lambda: arena.allocate(1)):
            with pytest.raises(AsyncFlowError, match=r"fork\(\)"):
                attempt()
        mapper.close()
        os._exit(3)
    say([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (first, second)])
    hear()
    say(digest(view) == before)


def test_a_forked_child_neither_unlocks_nor_maps_nor_writes(directory: Path) -> None:
    # given a reader that forks: one child drops the view, one tries to use memory
    arena = Arena(directory, "w", SEGMENT)
    block = write(arena, 1)
    with Child(read_and_fork, str(directory), place(block)) as reader:
        assert reader.hear() == [0, 3]  # all three attempts are refused by name
        # when
        arena.free([block.serial])
        assert where(block) not in churn(arena)
        # then the parent's view is as it was
        reader.say("look")
        assert reader.hear() is True


def view_at_exit(directory: str, place: list[Any]) -> None:
    """End as an interpreter that still holds views, a closed mapper's too."""
    global kept
    closed = Mapper(Path(directory))
    kept = (closed.view(*place), Mapper(Path(directory)).view(*place), closed)
    closed.close()


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
            look = (mapper.view, mapper.private_view)[int(random.integers(2))]
            view = look(*place(blocks[value]))
            if view[17] != blocks[value].memory[17]:
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # then every block can be used again
    assert wrong == []
    assert all(unread(directory, block) for block in blocks)
