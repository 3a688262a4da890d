"""Trainers of the checkpoints' tests: they die, or their disk is full, while they write one."""

import errno
import os
import resource
import signal
import time
from pathlib import Path

from children import hear, say

import asyncflow_sdk as af
from asyncflow_sdk.errors import MemoryFull


def write_and_hang(directory: str) -> None:
    """Get half of a checkpoint done, and wait to be killed."""

    def save(path: Path) -> None:
        (path / "weights").write_bytes(b"w" * 1000)
        say("writes")
        hear()

    with af.connect(directory) as run:
        run.checkpoint(save, directory=Path(directory) / "checkpoints")


def write_and_be_killed_at_the_end(directory: str) -> None:
    """Die when the checkpoint is there and nobody was told."""
    from asyncflow_sdk.workflow import checkpoint

    write = checkpoint.write

    def then_die(*arguments: object, **more: object) -> None:
        write(*arguments, **more)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.write = then_die  # type: ignore[assignment]
    with af.connect(directory) as run:
        run.checkpoint(lambda path: (path / "weights").write_text("8"), directory=Path(directory) / "checkpoints")


def write_on_a_full_disk(directory: str, in_words: bool) -> None:
    """No file may be longer than a megabyte. Say what came of a checkpoint, and what is left of it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def save(path: Path) -> None:
        (path / "small").write_bytes(b"s" * 1000)
        if in_words:
            raise RuntimeError(f"I/O error: {os.strerror(errno.ENOSPC)} (os error 28)")
        (path / "weights").write_bytes(bytes(4 << 20))

    with af.connect(directory) as run:
        try:
            run.checkpoint(save, directory=Path(directory) / "checkpoints")
        except MemoryFull as full:
            say([str(full), sorted(each.name for each in (Path(directory) / "checkpoints").iterdir())])
    hear()


def serve_and_wait(directory: str) -> None:
    """Serve a run until it is told to end."""
    with af.serve(directory, checkpoints=True) as run:
        say(run.address)
        hear()


def serve_until_killed(directory: str, prompts: int) -> None:
    """Serve a run with rows for a trainer; or the same once more."""
    import numpy as np

    with af.serve(directory, durability="process", checkpoints=True) as run:
        if run.recovered is None:
            run.queue.declare("train", needs=["x"], batch_rows=4)
            run.queue.put({"x": np.arange(float(prompts))}, key="all")
            run.queue.end()
        say(run.address)
        hear()


def train_until_killed(directory: str, every: int) -> None:
    """One's own loop: weights are the numbers they were trained with, in order. Says each step, and makes as many as it is told to."""
    from asyncflow_sdk.wire import client

    client.RESEND_S = 0.1
    seen: list[float] = []
    with af.connect(directory, name="trainer") as run:
        where = Path(directory) / "checkpoints"
        point = run.resume(directory=where)
        if point.path is not None:
            seen = [float(line) for line in (point.path / "seen").read_text().split()]
        say(["resumed", point.step, len(seen)])

        def save(path: Path) -> None:
            (path / "seen").write_text("\n".join(map(str, seen)))

        for step in run.consumer("train"):
            hear()
            time.sleep(0.03)  # there is time to die in it
            seen += step.array("x").tolist()
            step.ack()
            say(["step", step.index, seen])
            if (step.index + 1) % every == 0:
                run.checkpoint(save, directory=where)
        run.checkpoint(save, directory=where, keep=1)
        say(["done", len(seen), seen])
    hear()
