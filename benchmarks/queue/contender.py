"""What a contender implements. Each lives in its own module, imported only in an environment that has its library."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .samples import Columns

SPEEDUP = {"ours": 20, "ours-journal": 20, "ours-tcp": 20, "shm": 20, "zmq-tcp": 20, "peer": 1}
"""How much more work a contender gets than the peer, so that each is measured for a comparable time."""


@dataclass(frozen=True)
class Task:
    needs: tuple[str, ...]
    gives: tuple[str, ...] = ()


class Service(ABC):
    """The serving side, in the driver's process. A context manager."""

    @abstractmethod
    def start(self, tasks: dict[str, Task]) -> str:
        """Begin to serve. Returns what clients connect to."""

    @abstractmethod
    def end(self) -> None:
        """No further put: ``take`` returns None from here on, when nothing is left."""

    @abstractmethod
    def check(self, put: int) -> None:
        """Raise unless the books say that ``put`` rows came and all of them were used up, if there are books."""

    @abstractmethod
    def stop(self) -> None: ...

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Client(ABC):
    """One process's connection. ``part`` numbers repetitions, for those that keep them apart."""

    part = 0

    @abstractmethod
    def prepare(self, columns: Columns) -> Any:
        """The columns as this library takes them; not measured."""

    @abstractmethod
    def put(self, prepared: Any) -> None:
        """Add rows; they can be taken when this returns."""

    @abstractmethod
    def take(self, task: str, count: int, more: Callable[[], bool]) -> Any:
        """Rows of a task, waiting for some. None at the end: for those who cannot tell, when ``more`` is False."""

    @abstractmethod
    def finish(self, taken: Any, prepared: Any = None) -> None:
        """The last word on what was taken: write columns, acknowledge. It may leave with the next ``take``."""

    @abstractmethod
    def settle(self) -> None:
        """Send what has not left yet."""

    @abstractmethod
    def values(self, taken: Any) -> list[npt.NDArray[np.generic]]:
        """The values of each column taken, as arrays."""

    @abstractmethod
    def rows(self, taken: Any) -> int: ...

    def clear(self) -> None:
        """Forget what was used up, where that is not done by itself; not measured."""

    @abstractmethod
    def close(self) -> None: ...


_MODULES = {
    "ours": "ours", "ours-journal": "ours", "ours-tcp": "ours", "shm": "floor", "zmq-tcp": "floor", "peer": "peer",
}  # fmt: skip


def service(name: str) -> Service:
    return importlib.import_module(f".{_MODULES[name]}", __package__).service(name)  # type: ignore[no-any-return]


def client(name: str, address: str) -> Client:
    return importlib.import_module(f".{_MODULES[name]}", __package__).client(name, address)  # type: ignore[no-any-return]
