"""Launcher: starts workers in processes of this host, in threads, or on a cluster.

    class Slurm(Launcher):                                   # a user's own
        def start(self, spec: WorkerSpec) -> WorkerHandle:
            return Job(submit(f"srun {sys.executable} -m mine.worker", stdin=spec.config))

In the worker's process ``asyncflow_sdk.workflow.run_worker(config)`` does the rest. Workers of every launcher are
supervised alike: restarted when they die, with back-off and a limit, and reported by name when they fail for good.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..errors import ConfigError
from ..types.config import Checkpoint, Sampling, Weights
from ..types.validation import check_fields, check_least

OnFailure = Literal["stop", "continue"]
FATAL_STATUS = 3
"""Exit status of a worker whose error would recur. The supervisor does not restart it."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where and how a worker runs.

    ``python``: interpreter of an environment with the SDK and the engine. ``env``: variables added to the worker's
    environment. ``max_restarts``: restarts after a death, at most. ``launcher``: registered name of the launcher;
    ``launcher_options``: its options, in JSON types. ``hosts``: names for the launcher, as ``ssh`` takes them;
    replicas take turns on them, ranks are divided into equal blocks. (): the launcher chooses. ``cpus``, ``gpus``:
    numbers of each host's CPUs and GPUs for the worker; () restricts nothing. ``on_failure``: stop the run or
    continue it once the worker has failed for good; None: the workflow's setting.
    """

    python: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 3
    launcher: str = "process"
    launcher_options: Mapping[str, Any] = field(default_factory=dict)
    hosts: Sequence[str] = ()
    cpus: Sequence[int] = ()
    gpus: Sequence[int] = ()
    on_failure: OnFailure | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("cpus", "gpus", "hosts"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for host in self.hosts:
            if not host or host.startswith("-") or not host.isprintable() or " " in host:
                raise ConfigError(f"hosts are names or addresses of hosts, as ssh takes them, not {host!r}")
        odd = [name for name, value in self.env.items() if not name or "=" in name or "\0" in name + value]
        if odd:
            raise ConfigError(f"env has {odd[0]!r}: names need a character and have no '=', and neither has a NUL")
        check_least(0, max_restarts=self.max_restarts)
        for name in ("cpus", "gpus"):
            numbers = getattr(self, name)
            if any(type(n) is not int or n < 0 for n in numbers) or len(set(numbers)) < len(numbers):
                raise ConfigError(f"{name} must be different numbers from 0, as [0, 1], not {list(numbers)}")

    @property
    def elsewhere(self) -> bool:
        """True if the worker may find other packages than this process."""
        return self.python is not None or bool(self.hosts)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings of a run for one worker, beside its Rollout, Stage or Train.

    ``weights``: how versions are published and loaded; None: as the worker's own say. ``swap``: the
    policy chosen for a rollout; "": its own. ``needs_first``: a rollout waits for the first
    published version. ``export``: folder for the final model; "": none. ``checkpoint``: how often
    the trainer saves; ``checkpoints``: their folder; "": none are made. ``samplings``: a rollout's, of rows of
    other partitions than its own. ``save_steps``: a model folder is written every so many steps into ``models``;
    the newest ``save_total_limit`` stay; None: none, and all. ``prompt_limit``: most tokens of a prompt, its last.
    """

    weights: Weights | None = None
    swap: str = ""
    needs_first: bool = False
    export: str = ""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    checkpoints: str = ""
    samplings: Mapping[str, Sampling] = field(default_factory=dict)
    models: str = ""
    save_steps: int | None = None
    save_total_limit: int | None = None
    prompt_limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """One worker: its work, its run, and its place. Its process decodes this very object.

    ``role``: the Rollout, Stage or Train as plain data. ``address``, ``key``, ``insecure``: how the worker connects
    to the run. ``import_path``: folders to import the user's modules from. ``plugins``: environment variables with
    the driver's choice of plugins. ``rank`` of ``world_size``: of a worker of several processes; ``group``: their
    name in the queue. ``host``: the one of its placement's hosts to run on; "": the launcher chooses. ``log``: a file
    on the driver's host for the worker's output, if the launcher can collect it.
    """

    name: str
    role: Mapping[str, Any]
    settings: WorkerSettings = WorkerSettings()
    address: str
    key: Mapping[str, str] | None = field(default=None, repr=False)
    insecure: bool = False
    import_path: Sequence[str] = ()
    plugins: Mapping[str, str] = field(default_factory=dict)
    rank: int = 0
    world_size: int = 1
    group: str = ""
    host: str = ""
    placement: Placement
    log: Path

    @property
    def config(self) -> bytes:
        """The argument of ``run_worker`` in the worker's process: this spec as one line of JSON. It
        may hold a key, so keep it out of command lines and of files readable by others."""
        return msgspec.json.encode(self, enc_hook=str)

    @classmethod
    def decoded(cls, config: bytes) -> WorkerSpec:
        """Decode ``config``. Raises msgspec.ValidationError."""
        return msgspec.json.decode(config, type=cls, dec_hook=lambda kind, value: kind(value))


@dataclass(frozen=True)
class WorkerExit:
    """The end of a worker. ``status``: 0: finished; 3: an error to recur after a restart; -N: killed by signal N;
    other: an error. ``text``: its cause in the first line, empty if unknown, then its traceback or log."""

    status: int
    text: str = ""

    @property
    def fatal(self) -> bool:
        """True if a restart would end with the same error."""
        return self.status == FATAL_STATUS


class WorkerHandle(abc.ABC):
    """One start of a worker. ``pid``, ``host``: its process, as numbered on its own host; 0 and ""
    if unknown. Methods are called from any thread."""

    pid: int = 0
    host: str = ""

    @abc.abstractmethod
    def wait(self) -> WorkerExit:
        """Block until the worker and its children have ended. Called once. An exception counts as an end with an
        error."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Ask the worker to end at once; its leases return to the queue. Does not wait. Idempotent, also after its
        end."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End the worker by force; ``wait`` returns even where this is impossible. Idempotent, also after its end."""


class Launcher(abc.ABC):
    """Starts workers. Made by its plugin's factory, once for each run and ``launcher_options``. It must end its
    workers when the driver ends, however the driver ends. If its AdapterSpec declares ``can={"hosts": "many"}``, its
    workers get the address of the run for other hosts, with a key, if the run has one."""

    def check(self, placement: Placement) -> None:
        """Raise ConfigError for an impossible placement. Called before a worker starts there. Optional."""

    def check_ranks(self, placement: Placement, world_size: int) -> None:
        """As ``check``, for a worker of several ranks, with the ``cpus`` and ``gpus`` of all. Default: ``check``."""
        self.check(placement)

    @abc.abstractmethod
    def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Start a worker and return as soon as its handle can be waited for. Raises ConfigError. Any exception during
        a restart ends the worker for good. Called from any thread, for different workers at the same time."""

    def start_ranks(self, specs: Sequence[WorkerSpec]) -> Sequence[WorkerHandle]:
        """Start all ranks of one worker, or none. Return a handle for each. The ranks find each other through the
        run. Raises as ``start``. Default: ``start`` each of them."""
        handles: list[WorkerHandle] = []
        try:
            handles.extend(self.start(spec) for spec in specs)
        except BaseException:
            for handle in handles:
                handle.kill()
                handle.wait()
            raise
        return handles

    def close(self) -> None:
        """Free the launcher's resources. Called after every worker has ended. Optional."""
