"""One of two ranks that tests of Ranks ask, one thing after another. It says of each what it found, and what a call after it finds."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from children import say
from waiting import until

from asyncflow_sdk.errors import SchemaError
from asyncflow_torch.ranks import Ranks
from asyncflow_torch.sharded_files import FileParts, Reader, write_together


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def words(ranks: Ranks) -> object:
    return ranks.gather({"rank": ranks.rank, "text": "ü" * ranks.rank, "odd": [None, float("inf")]})


def refused(ranks: Ranks) -> object:
    if ranks.rank == 1:
        ranks.together(lambda: (_ for _ in ()).throw(SchemaError("rows 7 are odd")))
    return ranks.together(lambda: ranks.rank)


def write(ranks: Ranks, name: str, fails: bool = False) -> Path:
    """A file of two tensors, one of each rank."""

    def pieces() -> Iterator[Any]:
        if fails:
            raise OSError(28, "no space left")
        yield f"of {ranks.rank}", torch.full((300,), float(ranks.rank)), 0

    kinds = {f"of {rank}": (torch.float32, (300,)) for rank in range(ranks.size)}
    write_together(Path(name), FileParts(kinds, pieces()), ranks, bucket_bytes=64)
    return Path(name)


def written(ranks: Ranks) -> object:
    with Reader(write(ranks, "file.safetensors")) as file:
        return [file.whole(f"of {rank}").unique().tolist() for rank in range(ranks.size)]


def full(ranks: Ranks) -> None:
    """Rank 1 cannot write its part."""
    write(ranks, "full.safetensors", fails=ranks.rank == 1)


def failed(ranks: Ranks) -> None:
    """Rank 1 fails while the other is in a collective."""
    if ranks.rank == 1:
        raise MemoryError("no room for gradients")
    dist.all_reduce(torch.ones(3))


def hangs(ranks: Ranks) -> None:
    if ranks.rank == 1:
        until(Path("enough").exists, "the other rank's patience")
        return
    try:
        dist.all_reduce(torch.ones(3))
    finally:
        Path("enough").touch()


def dies(ranks: Ranks) -> None:
    ranks.gather(ranks.rank)  # both have joined
    if ranks.rank == int(os.environ["DIES"]):
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
    say(said)


def one_of_two(folder: str, rank: int, dies_: int, ports: list[int]) -> None:
    """The rank ``dies_`` ends in the last call; rank 0 does so in the first of all."""
    os.chdir(folder)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "DIES": str(dies_)}
    plan: list[list[Callable[[Ranks], object]]] = [[words, refused, written, failed], [full], [hangs], [dies]]
    for number, calls in enumerate([[dies]] if dies_ == 0 else plan):
        Path(f"{number}-{rank}").touch()
        until(Path(f"{number}-{1 - rank}").exists, "the other rank")  # how long one takes to start counts for nobody
        os.environ["MASTER_PORT"] = str(ports[number])
        ranks = Ranks.join("cpu", timeout_s=3 if hangs in calls else 600)
        for call in calls:
            ask(ranks, call)
        ranks.close()
