"""Boxes: a run of a tensor's elements, in row-major order, as pieces that are rectangles.

list(boxes(5, 9, (4, 4)))            # elements 5 to 13 of 16: the rest of row 1, row 2, the beginning of row 3
[(0, (1, 1), (1, 3)), (3, (2, 0), (1, 4)), (7, (3, 0), (1, 2))]
"""

from __future__ import annotations

import math
from collections.abc import Iterator

Box = tuple[int, tuple[int, ...], tuple[int, ...]]
"""The number of its first element within the run, where it begins in the tensor, and its shape."""


def boxes(start: int, count: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Of the elements from ``start`` to ``start + count`` of a tensor of ``shape``: at most twice as many as it has dimensions."""
    if len(shape) < 2:
        yield 0, (start,) * len(shape), (count,) * len(shape)
        return
    inner = math.prod(shape[1:])
    done = 0
    while done < count:
        row, column = divmod(start + done, inner)
        rows = 0 if column else (count - done) // inner
        if rows:
            yield done, (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
            done += rows * inner
            continue
        size = min(inner - column, count - done)
        for offset, begins, sizes in boxes(column, size, shape[1:]):
            yield done + offset, (row, *begins), (1, *sizes)
        done += size
