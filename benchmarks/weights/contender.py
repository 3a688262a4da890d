"""What a contender implements. Each lives in its own module, imported only in an environment that has its library.

All of them copy into the same parameters, in one process for the trainer and one for the replica.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod

from .model import Parameters


class Trainer(ABC):
    """Has the parameters. ``start`` is called once, before the replica is made."""

    @abstractmethod
    def start(self, parameters: Parameters) -> str:
        """Returns what the replica connects to."""

    def meet(self) -> None:
        """Called while the replica is being made, for those who must both be there."""

    @abstractmethod
    def publish(self, version: int) -> None:
        """Send the parameters. Returns when training may change them again."""

    def settle(self) -> None:
        """Wait until nothing is under way; not measured."""

    @abstractmethod
    def close(self) -> None: ...


class Replica(ABC):
    """Has parameters of its own, which ``start`` is given."""

    @abstractmethod
    def start(self, parameters: Parameters, address: str) -> None: ...

    @abstractmethod
    def take(self, version: int) -> float:
        """Wait for the version, copy it into the parameters. Returns when it is there, and for how many seconds nothing could
        have been generated."""

    @abstractmethod
    def close(self) -> None: ...


MODULES = {
    "shm": "ours", "shm-bare": "ours", "tcp": "ours", "tcp-bare": "ours", "file": "ours",
    "gloo": "gloo", "gloo-tensors": "gloo", "safetensors": "files", "safetensors-load": "files", "ray": "rays",
    "floor-shm": "floor", "floor-shm-bare": "floor", "floor-staged": "floor",
    "floor-staged-bare": "floor", "floor-tcp": "floor",
}  # fmt: skip
"""Contenders by name; ``bare``: without digests."""


def trainer(name: str) -> Trainer:
    return importlib.import_module(f".{MODULES[name]}", __package__).trainer(name)  # type: ignore[no-any-return]


def replica(name: str) -> Replica:
    return importlib.import_module(f".{MODULES[name]}", __package__).replica(name)  # type: ignore[no-any-return]
