"""Serving a run, and connecting to one.

with af.serve("runs/mine", address="tcp://0.0.0.0:7000") as run: ...             # the driver
with af.connect("tcp://127.0.0.1:7000") as run: ...                              # the same user, on the same host
with af.connect("tcp://10.0.0.1:7000", key="run.key") as run: ...                # anybody else
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError, MemoryFull
from ..interfaces import OnFailure, Sampler, TrackedRun, check_on_failure
from ..memory import make_private_directory
from ..queue import Connection, QueueServer
from ..types import Batch, Event
from ..wire import MAX_BYTES, KeyPair, ensure_keys, generate_keys, is_loopback
from .address import JOURNAL, find_address, write_addresses
from .policy import Policy, find_policy
from .run import Run
from .tracking import Tracked, Tracking, trackers_of

RUN_KEY = "run.key"


def serve(
    directory: str | Path | None = None,
    *,
    address: str | None = None,
    key: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    on_event: Callable[[Event], None] | None = None,
    on_step: Callable[[int, Callable[[], Batch]], None] | None = None,
    on_final: Callable[[int], None] | None = None,
    name: str = "driver",
    max_staleness: int = 1,
    capacity_rows: int = 100_000,
    capacity_bytes: int | None = None,
    steps: int | None = None,
    keep_versions: int = 2,
    max_swapping: int = 0,
    quorum: int = 0,
    checkpoints: bool = False,
    history: bool = False,
    durability: Literal["process", "host"] | None = None,
    max_call_bytes: int = MAX_BYTES,
    samplers: Mapping[str, Callable[..., Sampler]] | None = None,
    on_failure: OnFailure = "stop",
    staleness_policy: Policy = "wait",
    trackers: Tracked | Sequence[Tracked] = (),
    description: Mapping[str, Any] | None = None,
) -> Run:
    """Serve a run from this process. ``directory``: where workers log; None: they log to a temporary folder, removed on close unless
    a worker failed. ``address``: also listen there
    (``tcp://127.0.0.1:0`` picks a port); a socket of the run is always there. ``capacity_bytes``: of payload alive
    at once; by default half of what is free where the segments lie.

    A tcp address is served with keys: ``server.key`` and ``run.key`` in ``directory``, made there unless they are. Clients
    of the same user on the same host find the key by themselves; others get a copy of ``run.key``. ``key``: another path
    for ``server.key``. ``insecure``: without keys; every process that reaches the address may read and change the run.
    ``max_call_bytes``: most that a client there may put or complete in one call, and most payload of all calls together
    that have not arrived whole.

    A ``directory`` that is not there is made with mode 0700, whatever the umask. One that is there keeps its mode, and
    what the run writes into it is readable by its owner alone.

    ``keep_versions``: so many versions of the weights, the newest, can be fetched and rolled back to. ``max_swapping``: so many
    replicas load one at once (0: all). ``quorum``: so many must have it staged before any loads it (0: none).

    ``checkpoints``: rows of trained steps live until ``run.checkpoint`` covers them, so that a trainer can go on after another
    died (``run.resume``) and no row is trained twice, or never, in what survives. Until the first one all of them are kept.

    ``on_event``: hears of every event. ``on_step``: is given the number of each acknowledged step and a function that reads
    its rows, once, in any thread, however late. ``on_final``: called with a number before a checkpoint makes the steps below it final; of a
    durable run that comes back, ``on_step`` hears of the others again. All are called in the server's thread.

    ``history``: the journal of the whole run is kept, also when it is over, for ``replay``.

    ``samplers``: those of this process by name, beside the installed ones. ``on_failure``: whether the run stops when a
    worker started here has failed for good, or goes on while one of its role is left.

    ``trackers``: those that are to hear of the run: names of installed ones, classes, either with options (("mine", {"project": "x"})),
    or ``Tracker`` objects; they need a directory. ``description``: what they are told of it, as JSON holds it.

    ``max_staleness``: versions that a trained token may be old. ``staleness_policy``: what becomes of rows that take long:
    "wait", "drop", "count", or another; see ``Staleness``. A class of this process is handed over again by whoever
    goes on with a durable run.

    ``durability``: what was acknowledged survives the kill of any process ("process"), or of the host too ("host",
    which waits for the disk): a journal is kept in ``directory``, and whoever serves the same directory again goes on
    where that run died, with the limits it had; clients that still live just wait for it. ``run.recovered`` tells what
    was found. Raises ConfigError, also while another process serves it.
    """
    check_on_failure(on_failure)
    path = Path(directory) if directory is not None else None
    if path is not None:
        make_private_directory(path)
    if durability not in (None, "process", "host"):
        raise ConfigError(f'durability is "process" or "host", not {durability!r}')
    if durability is not None and path is None:
        raise ConfigError(f'a run of durability "{durability}" needs a directory for its journal')
    journal = path / JOURNAL if path is not None and (durability or (path / JOURNAL).is_dir()) else None
    keys = _keys(path, address, key, insecure)
    made = trackers_of(trackers)
    if made and path is None:
        raise ConfigError(
            "trackers are opened with the directory of the run, and this one has none: serve(DIR, trackers=...)"
        )
    tracking = Tracking(made) if made else None
    policy, own = find_policy(staleness_policy)
    server = QueueServer(
        [address] if address else [], on_event=_both(on_event, tracking), on_step=on_step, on_final=on_final, journal=journal, durability=durability,
        keys=keys, insecure=insecure, max_call_bytes=max_call_bytes, samplers=samplers, policies=own, history=history,
    )  # fmt: skip
    try:
        run = Run(Connection(server.here, name), server, path, on_failure)
        if capacity_bytes is None:
            room = os.statvfs(server.rows)
            capacity_bytes = max(room.f_bavail * room.f_frsize // 2, 1)
        if server.recovered is None:
            run.queue.configure(
                max_staleness=max_staleness, capacity_rows=capacity_rows, capacity_bytes=capacity_bytes, steps=steps,
                keep_versions=keep_versions, max_swapping=max_swapping, quorum=quorum,
                staleness_policy=policy, checkpoints=checkpoints or None,
            )  # fmt: skip
        if path is not None:
            try:
                write_addresses(path, server.addresses)
            except OSError as error:
                raise MemoryFull(f"no address file can be written in {path}: {error}. Free space there") from None
        if tracking is not None and path is not None:
            limits = {"steps": steps, "max_staleness": max_staleness}
            about = TrackedRun(
                directory=path, description=limits if description is None else description,
                resumed=server.recovered is not None,
            )  # fmt: skip
            run._track(tracking, about)
    except BaseException:
        server.close()
        raise
    return run


def connect(
    address: str | os.PathLike[str],
    *,
    key: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    shared_memory: bool = True,
    name: str = "client",
    timeout_s: float = 30.0,
    logs: str | os.PathLike[str] | None = None,
) -> Run:
    """Connect to a run: by its address or, on its own host, by its directory while it is served.

    ``key``: the path of a copy of the run's ``run.key``, which a tcp address asks for. The user who serves the run needs
    none on the same host. ``insecure``: the run is served without keys.
    ``shared_memory`` False: send values over the socket even where the server's memory is in sight, as it is done
    anyway from another host. ``timeout_s``: the longest it waits for a server, which may start meanwhile: at an
    address, and for a directory whose durable run is not over. ``logs``: a folder for the logs of workers started from here;
    None: a temporary folder, removed on close unless a worker failed. Raises ConfigError, AccessDenied, ServerLost,
    ProtocolError; at once for the directory of a run that is over, or whose server ended and kept nothing.
    """
    until = time.monotonic() + timeout_s
    where, known = _find(address, key, insecure, timeout_s)
    connection = Connection(
        where, name, key=known, insecure=insecure, shared_memory=shared_memory,
        timeout_s=max(until - time.monotonic(), 0.0),
    )  # fmt: skip
    return Run(connection, logs=Path(logs) if logs is not None else None)


def _find(
    where: str | os.PathLike[str], key: str | os.PathLike[str] | None, insecure: bool, timeout_s: float
) -> tuple[str, str | os.PathLike[str] | None]:
    """The address of a run, given that or its directory, and the key file for it."""
    text = os.fspath(where)
    if "://" in text:
        return text, key
    path = Path(text)
    if not text or not path.is_dir():
        raise ConfigError(f"{text} is neither an address (tcp://..., ipc://...) nor the directory of a run")
    address = find_address(path, timeout_s)
    own = path / RUN_KEY
    if key is None and not insecure and address.startswith("tcp:") and own.is_file():
        key = own
    return address, key


def _both(one: Callable[[Event], None] | None, other: Tracking | None) -> Callable[[Event], None] | None:
    if one is None or other is None:
        return one or other

    def hear(event: Event) -> None:
        other(event)
        one(event)

    return hear


def _keys(
    directory: Path | None, address: str | None, key: str | os.PathLike[str] | None, insecure: bool
) -> KeyPair | None:
    """The keys to serve an address with; None for one that needs none."""
    tcp = address is not None and address.startswith("tcp:")
    if key is not None and not tcp:
        raise ConfigError(
            f"key= is for a tcp address; {address or 'the socket of a run'} is on this host and needs none"
        )
    if insecure and not tcp:
        raise ConfigError(
            f"insecure=True is for a tcp address; {address or 'the socket of a run'} has no keys to leave out"
        )
    if insecure and key is not None:
        raise ConfigError("give key= or insecure=True, which serves without keys")
    if address is None or not tcp or insecure:
        return None
    if key is not None:
        return ensure_keys(Path(key), (directory or Path(key).parent) / RUN_KEY)
    if directory is not None:
        return ensure_keys(directory / "server.key", directory / RUN_KEY)
    return generate_keys() if is_loopback(address) else None  # whoever is on another host needs a file with the key
