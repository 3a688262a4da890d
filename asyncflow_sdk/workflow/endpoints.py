"""Endpoints of a run: ``serve`` in its driver, ``connect`` in any other process.

with af.serve("runs/mine", address="tcp://0.0.0.0:7000") as run: ...             # the driver
with af.connect("tcp://127.0.0.1:7000") as run: ...                              # the same user, on the same host
with af.connect("tcp://10.0.0.1:7000", key="run.key") as run: ...                # any other client
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ConfigError, MemoryFull
from ..interfaces import OnFailure, Placement, QueueOptions, Sampler, TrackedRun
from ..memory import make_private_directory
from ..queue import Connection, QueueServer
from ..queue.journal_directory import JournalDirectory
from ..queue.listeners import Listeners
from ..types import Batch, Event
from ..types.config import LOCAL, Store
from ..types.defaults import CALL_S, CAPACITY_ROWS, KEEP_VERSIONS, MAX_STALENESS
from ..wire import MAX_BYTES, KeyPair, ensure_keys, generate_keys, is_loopback, save_keys
from .loops.event_sinks import EventSink, call_all
from .loops.trackers import Tracked, Trackers, make_trackers
from .plan.choices import find_policy
from .processes.worker_pool import Endpoint
from .run import Run
from .run_directory import JOURNAL, RunDirectory, advertised, find_address, write_addresses

if TYPE_CHECKING:
    from typing_extensions import Unpack

RUN_KEY = "run.key"


def serve(
    directory: str | Path | None = None,
    *,
    address: str | None = None,
    advertise: str | None = None,
    key: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    on_event: Callable[[Event], None] | None = None,
    on_step: Callable[[int, Callable[[], Batch]], None] | None = None,
    on_final: Callable[[int], None] | None = None,
    name: str = "driver",
    history: bool = False,
    durability: Literal["process", "host"] | None = None,
    store: str | Store = LOCAL,
    max_call_bytes: int = MAX_BYTES,
    samplers: Mapping[str, Callable[..., Sampler]] | None = None,
    on_failure: OnFailure = "stop",
    track: Tracked | Sequence[Tracked] = (),
    description: Mapping[str, Any] | None = None,
    sinks: Sequence[EventSink] = (),
    **limits: Unpack[QueueOptions],
) -> Run:
    """Serve a run from this process.

    ``directory``: the directory of the run and its logs; None: workers log to a temporary folder, removed on close
    unless a worker failed. A missing directory is made with mode 0700, whatever the umask. An existing one keeps its
    mode; new files in it are readable by their owner only.

    ``address``: a further address to listen at (``tcp://127.0.0.1:0`` picks a port); a local socket is always there.
    ``advertise``: name or IP address of this host for others; default: the host of ``address`` or, for all
    interfaces, the address on the default route. A tcp address has keys: ``server.key`` and ``run.key`` in
    ``directory``, made unless present. Clients of the same user on the same host find the key by themselves; others
    need a copy of ``run.key``. ``key``: another path for ``server.key``. ``insecure``: no keys; every process that
    reaches the address may read and change the run. ``max_call_bytes``: limit of one put or completion from there,
    and of all incomplete calls together, with their payload.

    ``limits``: those of ``QueueOptions``, by default ``max_staleness`` 1, ``capacity_rows`` 100,000,
    ``capacity_bytes`` half of the free bytes of the segments' file system, ``keep_versions`` 2. ``staleness_policy``
    may be a class of this process, which must be given again with a durable run. ``checkpoints``: rows of trained
    steps are kept until ``run.checkpoint`` covers them, so that another trainer can continue (``run.resume``) and
    each row is trained exactly once in the surviving lineage; all are kept before the first checkpoint. ``samplers``:
    samplers of this process by name, beside the installed ones. ``on_failure``: stop the run if a worker of this
    process has failed for good, or continue with the others of its role.

    ``durability``: acknowledged data survives the death of any process ("process"), or of the host, too ("host":
    writes wait for the disk). A journal is kept in ``directory``; a later ``serve`` of the same directory continues
    the run with its earlier limits, and living clients wait for it; ``run.recovered`` describes it. ``history``: keep
    the whole journal after the end, for ``replay``.

    ``store``: where columns stay: "local", "hosts", another installed kind, or a ``Store`` with options. A resumed
    run needs the same store. ``on_step`` with another store than "local" needs ``checkpoints``: rows stay until they
    are covered.

    ``on_event`` receives every event; ``on_step`` the number of each acknowledged step with a function that reads its
    rows, once, in any thread, at any time; ``on_final`` a number before a checkpoint makes the steps below it final:
    the checkpoint waits for it. A resumed durable run repeats ``on_step`` for the others. ``on_final`` is called in a
    thread of its own, all others and ``sinks`` in the server's thread. ``track``: trackers, as installed names,
    classes, either with options (("mine", {"project": "x"})), or ``Tracker`` objects; they need a directory.
    ``description``: the run's configuration for them, in JSON types.

    Raises ConfigError, also for a directory served by another process, or with the record of an ended run."""
    if unknown := limits.keys() - QueueOptions.__annotations__.keys():
        raise TypeError(f"serve() has no parameter {min(unknown)!r}")
    Placement(on_failure=on_failure)
    path = Path(directory) if directory is not None else None
    if path is not None:
        if not sinks:  # else their owner has begun the record
            RunDirectory(path).check_record(continues=True)
        make_private_directory(path)
    if durability not in (None, "process", "host"):
        raise ConfigError(f'durability is "process" or "host", not {durability!r}')
    if durability is not None and path is None:
        raise ConfigError(f'a run of durability "{durability}" needs a directory for its journal')
    if advertise is not None and not (address or "").startswith("tcp:"):
        raise ConfigError("advertise= is for a tcp address, which other hosts can reach")
    keys, files = _keys(path, address, key, insecure), _key_files(path, key)
    tracking = Trackers(make_trackers(track))
    if tracking and path is None:
        text = "trackers are opened with the directory of the run, and this one has none"
        raise ConfigError(f"{text}: serve(DIR, track=...)")
    receiving = [*([tracking] if tracking else []), *sinks]
    recording = [sink for sink in receiving if sink.records_steps]
    store = Store.of(store)
    if store.kind != LOCAL and (on_step is not None or recording) and not limits.get("checkpoints"):
        raise ConfigError(
            f"on_step reads rows after they were trained, and with store={store.kind!r} they may be gone from their host then:"
            " set checkpoints=True"
        )
    policy, own = find_policy(limits.get("staleness_policy", "wait"))
    listeners = Listeners(
        call_all([*(sink.event for sink in receiving), on_event]),
        call_all([*(sink.step for sink in recording), on_step]),
        call_all([*(sink.settle for sink in recording), on_final]),
    )
    journal = path / JOURNAL if path is not None and (durability or (path / JOURNAL).is_dir()) else None
    server = QueueServer(
        [address] if address else [],
        listeners,
        None if journal is None else JournalDirectory(journal.absolute(), durability, history),
        keys=keys,
        save_keys=(lambda new: save_keys(*files, new)) if files else (lambda new: None),
        insecure=insecure,
        max_call_bytes=max_call_bytes,
        samplers=samplers,
        policies=own,
        store=store,
    )
    try:
        far = None
        if address is not None and address.startswith("tcp:"):
            far = Endpoint(advertised(server.addresses[-1], advertise), insecure)
        run = Run(Connection(server.here, name), server, path, on_failure, trackers=tracking, far=far)
        room = os.statvfs(server.rows)
        chosen: dict[str, Any] = {
            "max_staleness": MAX_STALENESS,
            "capacity_rows": CAPACITY_ROWS,
            "capacity_bytes": max(room.f_bavail * room.f_frsize // 2, 1),
            "keep_versions": KEEP_VERSIONS,
            "home_silence_s": None if store.kind == LOCAL else store.silence_s,
            **{name: value for name, value in limits.items() if value is not None},
            "staleness_policy": policy,
        }
        if server.recovered is None:
            run.queue.configure(**chosen)
        if path is not None:
            try:
                write_addresses(path, server.addresses)
            except OSError as error:
                raise MemoryFull(f"no address file can be written in {path}: {error}. Free space there") from None
            shown = {"steps": chosen.get("steps"), "max_staleness": chosen["max_staleness"]}
            told = shown if description is None else description
            about = TrackedRun(directory=path, description=told, resumed=server.recovered is not None)
            tracking.start(about, run.report, call_all(sink.settle for sink in recording))
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
    timeout_s: float = CALL_S,
    logs: str | os.PathLike[str] | None = None,
) -> Run:
    """Connect to a run by its address or, on its own host, by its directory while it is served.

    ``key``: path of a copy of the run's ``run.key``, for a tcp address; the serving user needs none on the same host.
    ``insecure``: the run is served without keys. ``shared_memory`` False: send values and fetch weights over sockets
    even on the server's host. ``timeout_s``: limit of the wait for a server, which may start meanwhile: at an
    address, and for a directory with an unfinished durable run. ``logs``: a folder for the logs of workers started
    here; None: a temporary one, removed on close unless a worker failed.

    Raises ConfigError, AccessDenied, ServerLost, ProtocolError; at once for the directory of an ended run, or of one
    without durability whose server ended."""
    until = time.monotonic() + timeout_s
    where, known = find_run(address, key, insecure, timeout_s)
    left_s = max(until - time.monotonic(), 0.0)
    connection = Connection(where, name, key=known, insecure=insecure, shared_memory=shared_memory, timeout_s=left_s)
    return Run(connection, logs=Path(logs) if logs is not None else None)


def find_run(
    where: str | os.PathLike[str], key: str | os.PathLike[str] | None, insecure: bool, timeout_s: float
) -> tuple[str, str | os.PathLike[str] | None]:
    """Return the address of a run, given it or the run's directory, and its key file. Raises the errors of
    ``connect``."""
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


def _key_files(directory: Path | None, key: str | os.PathLike[str] | None) -> tuple[Path, Path] | None:
    """Return the paths of the server's keys and of the clients' key; None if they have no place."""
    server = Path(key) if key is not None else None if directory is None else directory / "server.key"
    return None if server is None else (server, (directory or server.parent) / RUN_KEY)


def _keys(
    directory: Path | None, address: str | None, key: str | os.PathLike[str] | None, insecure: bool
) -> KeyPair | None:
    """Return the server's keys for an address; None if it needs none."""
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
    files = _key_files(directory, key)
    if files:
        return ensure_keys(*files)
    return generate_keys() if is_loopback(address) else None  # clients on other hosts need a key file
