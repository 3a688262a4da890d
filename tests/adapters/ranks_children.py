"""One of two ranks: it says what each call of Ranks came to, and what parts of a given up step did."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from children import outcome, say
from waiting import until

from asyncflow_sdk.errors import SchemaError
from asyncflow_torch.ranks import Ranks
from asyncflow_torch.sharded_files import FileParts, Reader, write_together


def be(rank: int, port: int) -> None:
    """Have the environment of a rank."""
    place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})


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


def another(ranks: Ranks) -> object:
    return "went on"


def one_of_two(folder: str, rank: int, dies_: int, ports: list[int]) -> None:
    """Say what each call came to, and another one after it. The rank ``dies_`` ends in the last call;
    rank 0 in the first of all."""
    os.chdir(folder)
    os.environ["DIES"] = str(dies_)
    plan: list[list[Callable[[Ranks], object]]] = [[words, refused, written, failed], [full], [hangs], [dies]]
    for number, calls in enumerate([[dies]] if dies_ == 0 else plan):
        Path(f"{number}-{rank}").touch()
        until(Path(f"{number}-{1 - rank}").exists, "the other rank")  # how long one takes to start counts for nobody
        be(rank, ports[number])
        ranks = Ranks.join("cpu", timeout_s=3 if hangs in calls else 600)
        for call in calls:
            say([outcome(ranks.calling(each.__name__)(each), ranks) for each in (call, another)])
        ranks.close()


def gives_up_parts(model: str, rank: int, port: int, rows_file: str) -> None:
    """Train on the first rows of a file, and try the second ones: those of one rank cannot be trained."""
    from asyncflow_fsdp.engine import FsdpEngine

    be(rank, port)
    engine = FsdpEngine(model, learning_rate=1e-3, threads=1)
    rows, bad_rows = np.load(rows_file, allow_pickle=True)

    def ask(call: Callable[..., object], *arguments: object) -> None:
        found = outcome(call, *arguments)
        say(found if isinstance(found, str) else "went on")

    for gives_up, call in ((0, lambda: engine.accumulate(rows)), (1, engine.end_step)):
        engine.begin_step(1)
        engine.accumulate(rows)
        ask(engine.abort_step if rank == gives_up else call)
        ask(engine.abort_step)  # the step is over on both
    engine.begin_step(2)
    ask(engine.accumulate, bad_rows)
    engine.begin_step(3)
    engine.accumulate(rows)
    say(engine.end_step().metrics)
    engine.close()
