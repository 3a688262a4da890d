"""One of two ranks that train steps in parts, of which some are given up by one rank. It says what each came to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from children import say

from asyncflow_fsdp.engine import FsdpEngine
from asyncflow_sdk.testing.kit.rank_files import read_batch


def one_of_two(model: str, rank: int, port: int, part: str, bad: str) -> None:
    """``part``, ``bad``: files of this rank's rows; those of one rank cannot be trained."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    engine = FsdpEngine(model, learning_rate=1e-3, threads=1)
    rows, bad_rows = read_batch(Path(part)), read_batch(Path(bad))

    def ask(call: Callable[[], object]) -> None:
        try:
            call()
            say("went on")
        except Exception as error:
            say(f"{type(error).__name__}: {error}")

    for gives_up, call in ((0, lambda: engine.accumulate(rows)), (1, engine.end_step)):
        engine.begin_step(1)
        engine.accumulate(rows)
        ask(engine.abort_step if rank == gives_up else call)
        ask(engine.abort_step)  # the step is over on both
    engine.begin_step(2)
    ask(lambda: engine.accumulate(bad_rows))
    engine.begin_step(3)
    engine.accumulate(rows)
    say(engine.end_step().metrics)
    engine.close()
