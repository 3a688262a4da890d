"""One of two ranks that tests of Ranks ask, one thing after another: ``python ranks_children.py FOLDER DIES``. It prints a line of
JSON for each: what it found, and what a call after it says."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncflow_sdk.errors import SchemaError
from asyncflow_torch.ranks import Ranks
from asyncflow_torch.sharded_files import Reader, write_together

FOLDER, DIES, RANK = Path(sys.argv[1]), int(sys.argv[2]), int(os.environ["RANK"])


def words(ranks: Ranks) -> object:
    return ranks.gather({"rank": ranks.rank, "text": "ü" * ranks.rank, "odd": [None, float("inf")]})


def refused(ranks: Ranks) -> object:
    if ranks.rank == 1:
        ranks.together(lambda: (_ for _ in ()).throw(SchemaError("rows 7 are odd")))
    return ranks.together(lambda: ranks.rank)


def written(ranks: Ranks) -> object:
    """A file of two tensors, one of each rank."""
    path = FOLDER / "file.safetensors"
    pieces = iter([(f"of {ranks.rank}", torch.full((300,), float(ranks.rank)), 0)])
    kinds = {f"of {rank}": (torch.float32, (300,)) for rank in range(ranks.size)}
    write_together(path, kinds, pieces, ranks, bucket_bytes=64)
    with Reader(path) as file:
        return [file.whole(name).unique().tolist() for name in kinds]


def full(ranks: Ranks) -> None:
    """Rank 1 cannot write its part."""

    def pieces() -> Iterator[Any]:
        if ranks.rank == 1:
            raise OSError(28, "no space left")
        yield "of 0", torch.zeros(300), 0

    kinds = {f"of {rank}": (torch.float32, (300,)) for rank in range(ranks.size)}
    write_together(FOLDER / "full.safetensors", kinds, pieces(), ranks, bucket_bytes=64)


def failed(ranks: Ranks) -> None:
    """Rank 1 fails while the other is in a collective."""
    if ranks.rank == 1:
        raise MemoryError("no room for gradients")
    dist.all_reduce(torch.ones(3))


def hangs(ranks: Ranks) -> None:
    if ranks.rank == 1:
        while not (FOLDER / "enough").exists():
            time.sleep(0.01)
        return
    try:
        dist.all_reduce(torch.ones(3))
    finally:
        (FOLDER / "enough").touch()


def dies(ranks: Ranks) -> None:
    if ranks.rank == DIES:
        os._exit(3)
    dist.all_reduce(torch.ones(3))


def ask(ranks: Ranks, work: Callable[[Ranks], object]) -> None:
    """Say what a call comes to, and then another."""
    said: list[Any] = []
    for name, what in ((work.__name__, lambda: work(ranks)), ("another", lambda: "went on")):
        try:
            with ranks.calling(name):
                said.append(what())
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    print(json.dumps(said), flush=True)


def main() -> None:
    for number, calls in enumerate(
        [[dies]] if DIES == 0 else [[words, refused, written, failed], [full], [hangs], [dies]]
    ):
        (FOLDER / f"{number}-{RANK}").touch()
        while not (FOLDER / f"{number}-{1 - RANK}").exists():  # how long one takes to start counts for nobody
            time.sleep(0.01)
        os.environ["MASTER_PORT"] = sys.argv[3 + number]
        ranks = Ranks.join("cpu", timeout_s=3 if hangs in calls else 600)
        for call in calls:
            ask(ranks, call)
        ranks.close()


if __name__ == "__main__":
    main()
