"""Launcher: what starts workers, and where: in processes of this host, in threads, on a cluster.

    class Slurm(af.Launcher):                                # a user's own
        def start(self, order: af.WorkerOrder) -> af.WorkerHandle:
            return Job(submit(f"srun {sys.executable} -m mine.worker", stdin=order.config))

In the worker's process ``asyncflow_sdk.run_worker(config)`` does the rest. Whatever a launcher starts is supervised in
the same way: started again when it dies, with back-off and a limit, and named when it fails for good.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from ..errors import ConfigError
from ..types.typed import check_fields

OnFailure = Literal["stop", "continue"]
FATAL_STATUS = 3
"""Of a worker whose error would come again: it is not started again."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a worker runs: its interpreter (of an environment that has the SDK and the engine), and variables
    added to its environment. ``max_restarts``: how often it is started again after dying.

    ``launcher``: what starts it, found through the hook. ``cpus``, ``gpus``: those of its host that it may use; () leaves
    them. ``on_failure``: whether the run stops or goes on when it has failed for good; None: as the workflow says.
    """

    python: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 3
    launcher: str = "process"
    cpus: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    on_failure: OnFailure | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        odd = [name for name, value in self.env.items() if not name or "=" in name or "\0" in name + value]
        if odd:
            raise ConfigError(f"env has {odd[0]!r}, which no environment can: names have no '=', and nothing a NUL")
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts must be 0 or more, not {self.max_restarts}")
        if self.on_failure is not None:
            check_on_failure(self.on_failure)
        for name in ("cpus", "gpus"):
            numbers = getattr(self, name)
            if any(type(n) is not int or n < 0 for n in numbers) or len(set(numbers)) < len(numbers):
                raise ConfigError(f"{name} are different numbers from 0, as [0, 1], not {list(numbers)}")


def check_on_failure(on_failure: str) -> None:
    """Raises ConfigError unless it is one."""
    if on_failure not in get_args(OnFailure):
        raise ConfigError(f"on_failure is one of {', '.join(get_args(OnFailure))}, not {on_failure!r}")


@dataclass(frozen=True, kw_only=True)
class WorkerOrder:
    """A worker to be started. ``config``: what ``run_worker`` takes, in the worker's process; it may hold a key, so it goes
    where no one else can read it. ``log``: a file on the driver's host for what the worker prints, where that can be had."""

    name: str
    config: bytes
    place: Place
    log: Path


@dataclass(frozen=True)
class WorkerEnding:
    """How a worker ended. ``status``: 0, it was through; 3, with an error that would come again; -N, killed by signal N; any
    other, with an error. ``text``: its traceback, or what else there is to say."""

    status: int
    text: str = ""

    @property
    def comes_again(self) -> bool:
        """Whether starting it again would end in the same way."""
        return self.status == FATAL_STATUS


class WorkerHandle(abc.ABC):
    """One start of a worker. ``pid``, ``host``: of its process as they are there; 0 and "" where nobody knows. All methods
    are called from any thread."""

    pid: int = 0
    host: str = ""

    @abc.abstractmethod
    def wait(self) -> WorkerEnding:
        """Block until the worker, and what it started, has ended. Called once; may raise, which counts as an end."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Ask it to end at once; what it holds goes back to the queue. Does not wait. Idempotent, also after its end."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End it without asking; where that cannot be, ``wait`` returns all the same. Idempotent, also after its end."""


class Launcher(abc.ABC):
    """Starts workers. Made without arguments by its plugin's factory, once for each run that asks for it by name. A worker
    ends with its driver, however that ends: it is for the launcher to see to."""

    ranks: bool = False
    """Whether it can start the ranks of one trainer: processes of the driver's host, each with the environment of its place. They
    find each other at an address of this host that is in it."""

    def check(self, place: Place) -> None:
        """Raises ConfigError for what cannot be had: called for each place before a worker is started there. Optional."""

    @abc.abstractmethod
    def start(self, order: WorkerOrder) -> WorkerHandle:
        """Start a worker, and return as soon as it can be waited for. Raises ConfigError; whatever it raises when a worker is
        to be started again ends that worker for good. Called from any thread, for different workers at the same time."""

    def close(self) -> None:
        """Free what the launcher holds; every worker has ended. Optional."""
