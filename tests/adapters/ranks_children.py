"""One of the ranks that tests of Ranks ask: ``python ranks_children.py WHAT``. It says what it found as a line of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from asyncflow_sdk.errors import SchemaError
from asyncflow_torch.ranks import Ranks
from asyncflow_torch.sharded_files import Reader, write_together


def words(ranks: Ranks) -> object:
    return ranks.gather({"rank": ranks.rank, "text": "ü" * ranks.rank, "odd": [None, float("inf")]})


def one_refuses(ranks: Ranks) -> object:
    """And all go on after it."""

    def look() -> int:
        if ranks.rank == 1:
            raise SchemaError("rows 7 are odd")
        return ranks.rank

    found = []
    try:
        with ranks.calling("first"):
            ranks.together(look)
    except SchemaError as error:
        found.append(str(error))
    with ranks.calling("second"):
        found.append(ranks.together(lambda: ranks.rank))
    return found


def one_fails(ranks: Ranks) -> object:
    """In the middle of a call, while the others are in a collective."""
    with ranks.calling("third"):
        if ranks.rank == 1:
            raise MemoryError("no room for gradients")
        dist.all_reduce(torch.ones(3))
    return None


def one_dies(ranks: Ranks) -> object:
    with ranks.calling("fourth"):
        if ranks.rank == int(os.environ["DIES"]):
            os._exit(3)
        dist.all_reduce(torch.ones(3))
    return None


def one_hangs(ranks: Ranks) -> object:
    with ranks.calling("fifth"):
        if ranks.rank == 1:
            print(json.dumps("asleep"), flush=True)
            time.sleep(600)
        dist.all_reduce(torch.ones(3))
    return None


def one_cannot_write(ranks: Ranks) -> object:
    """A file of two tensors, one of each rank. Rank 0 comes late."""
    path = Path(os.environ["FOLDER"]) / "file.safetensors"

    def pieces() -> Iterator[tuple[str, torch.Tensor, int]]:
        if ranks.rank == 1 and "full" in os.environ["FOLDER"]:
            raise OSError(28, "no space left")
        yield f"of {ranks.rank}", torch.full((300,), float(ranks.rank)), 0

    time.sleep(0.5 * ranks.first)
    kinds = {f"of {rank}": (torch.float32, (300,)) for rank in range(ranks.size)}
    with ranks.calling("save"):
        write_together(path, kinds, pieces(), ranks, bucket_bytes=64)
        with Reader(path) as file:
            return [file.whole(name).unique().tolist() for name in kinds]


def meet(folder: Path) -> None:
    """Wait until every rank has come so far: how long one takes to start is nothing that others are to wait for."""
    (folder / os.environ["RANK"]).touch()
    while len(list(folder.iterdir())) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)


def main() -> None:
    meet(Path(os.environ["MET"]))
    ranks = Ranks.join("cpu", timeout_s=float(os.environ.get("TIMEOUT_S", "60")))
    again = None
    try:
        found = globals()[sys.argv[1]](ranks)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        try:
            with ranks.calling("another"):
                again = "went on"
        except Exception as error:
            again = str(error)
    print(json.dumps([found, again]), flush=True)
    if told := os.environ.get("TOLD"):  # who failed lives on until another has heard of it
        while ranks.rank and not Path(told).exists():
            time.sleep(0.01)
        Path(told).touch()
    ranks.close()


if __name__ == "__main__":
    main()
