"""What runs on a host: ``python -m benchmarks.hosts.drive MODULE ROLE JSON``, in the environment of the contender.

``MODULE`` has the roles ``serve``, ``produce`` and ``consume``. A role gets a ``Job``, calls ``ready`` once everything else is
there, and then works. Results go to the pipe that was the standard output; what libraries print goes to the errors.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Job:
    """``server``, ``own``, ``producer``: IP addresses, of the server, this host and the producer of this pair. ``pair``: its
    number. ``batches``: of each pair; each has ``rows`` of ``width`` bytes. ``folder``: seen by all. ``store``: of a run of ours."""

    server: str
    own: str
    producer: str
    pair: int
    pairs: int
    batches: int
    rows: int
    width: int
    folder: str
    store: str

    @property
    def batch_bytes(self) -> int:
        return self.rows * self.width

    def values(self) -> npt.NDArray[np.uint8]:
        """A batch."""
        return np.random.default_rng(0).integers(0, 256, (self.rows, self.width), dtype=np.uint8)


def ready() -> None:
    """Wait for the other hosts, or, when all is sent, for the consumers."""
    _say("ready")
    sys.stdin.readline()


def receive(batches: Iterator[int]) -> None:
    """Receive batches, each of so many bytes, and say how long it took."""
    ready()
    began, nbytes = time.monotonic(), sum(batches)
    _say(json.dumps({"bytes": nbytes, "seconds": time.monotonic() - began}))


def _say(text: str) -> None:
    os.write(3, text.encode() + b"\n")


def main() -> None:
    warnings.filterwarnings("ignore")
    os.dup2(1, 3, inheritable=False)
    os.dup2(2, 1)
    module, role, job = sys.argv[1:]
    getattr(importlib.import_module(f"benchmarks.hosts.{module}"), role)(Job(**json.loads(job)))


if __name__ == "__main__":
    main()
