"""The rows of the table: what is measured, of whom, and which figure of it counts."""

from __future__ import annotations

import statistics as st
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Version = dict[str, float]


@dataclass(frozen=True)
class Part:
    """``ours``, ``peer``, ``limit``: contenders. ``less``: the smaller the better, so that a ratio says how often ours fits
    in the other's."""

    work: str
    unit: str
    ours: str
    peer: str | None
    limit: str | None
    value: Callable[[Version], float]
    less: bool = False

    @property
    def contenders(self) -> list[str]:
        return [name for name in (self.ours, self.peer, self.limit) if name is not None]

    def measured(self, results: list[dict[str, Any]]) -> float:
        """The median over all versions of all rounds."""
        return st.median(self.value(version) for result in results for version in result["versions"])


def of_memcpy(version: Version) -> float:
    return version["copy_s"] / version["seconds"]


def trainer_held(version: Version) -> float:
    return version["held_s"] / version["copy_s"]


def generation_held(version: Version) -> float:
    return version["swap_s"] / version["copy_s"]


WHOLE = "publish → in the replica's parameters"
PARTS = [
    Part(f"{WHOLE}, verified (peer: Gloo, buckets of 64 MB)", "of memcpy", "shm", "gloo", "floor-shm", of_memcpy),
    Part(f"{WHOLE}, verified (peer: Gloo, by tensor)", "of memcpy", "shm", "gloo-tensors", "floor-shm", of_memcpy),
    Part(f"{WHOLE}, verified (peer: safetensors, tmpfs)", "of memcpy", "shm", "safetensors", "floor-shm", of_memcpy),
    Part(f"{WHOLE}, verified (peer: Ray's store)", "of memcpy", "shm", "ray", "floor-shm", of_memcpy),
    Part(f"{WHOLE}, nothing hashed (peer: Ray's store)", "of memcpy", "shm-bare", "ray", "floor-shm-bare", of_memcpy),
    Part(f"{WHOLE}, verified (limit: staged whole)", "of memcpy", "shm", None, "floor-staged", of_memcpy),
    Part(
        f"{WHOLE}, nothing hashed (limit: staged whole)",
        "of memcpy",
        "shm-bare",
        None,
        "floor-staged-bare",
        of_memcpy,
    ),
    Part("the trainer is held (peer: Gloo)", "memcpys", "shm", "gloo", None, trainer_held, less=True),
    Part("the trainer is held (peer: Ray's store)", "memcpys", "shm", "ray", None, trainer_held, less=True),
    Part("generation is held (peer: Gloo)", "memcpys", "shm", "gloo", None, generation_held, less=True),
    Part("generation is held (peer: safetensors)", "memcpys", "shm", "safetensors", None, generation_held, less=True),
    Part(f"{WHOLE}, over tcp (peer: Gloo)", "of memcpy", "tcp", "gloo", "floor-tcp", of_memcpy),
    Part(f"{WHOLE}, through files on tmpfs (peer: safetensors)", "of memcpy", "file", "safetensors", None, of_memcpy),
]
