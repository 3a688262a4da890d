"""Tensors are writable and lie in shared memory; writing changes neither the block nor numpy views."""

from pathlib import Path

import numpy as np
import pytest
import torch

from asyncflow_sdk.memory import Allocation, Arena, Mapper
from asyncflow_sdk.types import to_torch

HEADER = 64  # the first 16 bytes are the arena's; values begin at the next line


def stored(directory: Path) -> tuple[Arena, Mapper, Allocation]:
    """A block of several pages that does not begin on one."""
    arena, mapper = Arena(directory, "w", 1 << 16), Mapper(directory)
    arena.allocate(100)
    block = arena.allocate(HEADER + 20_000)
    block.memory[HEADER:].view(np.float32)[:] = np.arange(5000)
    return arena, mapper, block


def place(block: Allocation) -> tuple[str, int, int, int]:
    return block.segment, block.start, block.serial, block.nbytes


def mapping_of(address: int) -> tuple[str, str]:
    """Permissions and file of the mapping an address lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= address < high:
            return line.split()[1], line.split(maxsplit=5)[-1]
    raise AssertionError("mapped nowhere")


def test_numpy_views_are_read_only_and_lie_in_the_segment(directory: Path) -> None:
    _, mapper, block = stored(directory)
    view = mapper.view(*place(block))
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True
    assert mapping_of(view.ctypes.data) == ("r--s", str(directory / block.segment))


def test_torch_memory_lies_in_a_private_mapping_of_the_segment(directory: Path) -> None:
    _, mapper, block = stored(directory)
    tensor = to_torch(mapper.private_view(*place(block), skip=HEADER).view(np.float32))
    assert mapping_of(tensor.data_ptr()) == ("rw-p", str(directory / block.segment))


def test_writing_in_place_reaches_nobody(directory: Path) -> None:
    # given numpy and torch over the same stored values
    _, mapper, block = stored(directory)
    view = mapper.view(*place(block))[HEADER:].view(np.float32)
    first, second = (to_torch(mapper.private_view(*place(block), skip=HEADER).view(np.float32)) for _ in range(2))
    # when torch works in place, on some pages and on all
    first[1000:1010].mul_(-1)
    second.zero_()
    # then each sees its own
    assert np.array_equal(view, np.arange(5000, dtype=np.float32))
    assert np.array_equal(block.memory[HEADER:].view(np.float32), view)
    assert first[1000:1012].tolist() == [*range(-1000, -1010, -1), 1010, 1011]
    assert float(second.sum()) == 0.0


@pytest.mark.parametrize("derive", [lambda t: t[17:], lambda t: t.view(torch.uint8)[4:8], lambda t: t.numpy()[3:9]])
def test_whatever_is_derived_from_a_tensor_holds_the_segment(directory: Path, derive: object) -> None:
    # given only something derived from a tensor
    arena, mapper, block = stored(directory)
    derived = derive(to_torch(mapper.private_view(*place(block), skip=HEADER).view(np.float32)))  # type: ignore[operator]
    # when its memory is wanted
    arena.free([block.serial])
    # then it is not used again before that is gone
    taken = [arena.allocate(block.nbytes) for _ in range(2)]
    assert block.start not in [each.start for each in taken]
    del derived
    assert arena.allocate(block.nbytes).start == block.start


def test_a_mapping_in_use_outlives_its_file_and_its_mapper(directory: Path) -> None:
    # given a reader at work in a segment whose file goes
    arena, mapper, block = stored(directory)
    other = Arena(directory, "v").allocate(100)
    with mapper.mapped(block.segment, block.start + block.nbytes) as mapped:
        (directory / block.segment).unlink()
        # when another segment is mapped, and the mapper is closed
        mapper.view(*place(other))
        mapper.close()
        # then
        mapped.check(block.start, block.serial)
    assert bytes(mapped.bytes[block.start :][HEADER : block.nbytes]) == bytes(block.memory[HEADER:])
    # and it goes with its last user
    assert mapped.fd < 0
    arena.close(unlink=False)
