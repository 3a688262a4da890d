"""ensure_unit: start a storage unit on this host, unless there is one. The unit outlives its starter.

Workers of one host may start at the same time: a lock on a file beside the unit's directory decides
which of them starts it, and the others wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from ..errors import DeadlineExceeded
from ..wire import RunKey

START_S = 120.0
"""Limit of the wait for a unit to start: it imports the SDK first, on a host that may be busy."""
PROGRAM = ("-m", "asyncflow_sdk.queue.unit_process")
_PAUSE_S = 0.1


class UnitConfig(msgspec.Struct, frozen=True):
    """A unit to start. ``address``: of the run. ``name``: of its home; "": a name of this host. ``key``,
    ``insecure``, ``listen``: see ``StorageUnit``."""

    address: str
    name: str = ""
    key: RunKey | None = None
    insecure: bool = False
    listen: str | None = None


def ensure_unit(
    run: str,
    config: UnitConfig,
    is_open: Callable[[], bool],
    *,
    program: Sequence[str] = PROGRAM,
    timeout_s: float = START_S,
) -> None:
    """Return once ``is_open`` is true. Else start a unit first, in a session of its own, detached from
    this process. Raises DeadlineExceeded, with the end of the unit's output; the errors of
    ``is_open``."""
    until = time.monotonic() + timeout_s
    log = unit_log(run)
    with _locked(log.with_suffix(".lock"), run, until):
        if is_open():
            return
        with open(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as output:
            process = subprocess.Popen(
                [sys.executable, *program],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # the key, which a command line would show
            process.stdin.write(msgspec.json.encode(config))
        while not is_open():
            status = process.poll()
            if status is not None or time.monotonic() >= until:
                why = "did not open its home" if status is None else f"ended with {status}"
                if status is None:
                    process.kill()
                    process.wait()
                raise DeadlineExceeded(f"the storage unit of this host {why}; its log, {log}, ends: {_end(log)}")
            time.sleep(_PAUSE_S)


def unit_log(run: str) -> Path:
    """Return the path of the output of a run's unit on this host. The lock has the suffix ".lock"."""
    return Path(tempfile.gettempdir()) / f"asyncflow-{os.getuid()}-{run}-unit.log"


def remove_unit_log(run: str) -> None:
    """Remove the files left by ``ensure_unit``, once the run has ended."""
    for path in (unit_log(run), unit_log(run).with_suffix(".lock")):
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def _locked(path: Path, run: str, until: float) -> Iterator[None]:
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise DeadlineExceeded(
                        f"another process is starting the storage unit of run {run} on this host, and is not done in"
                        f" time; it holds {path}"
                    ) from None
                time.sleep(_PAUSE_S)
        yield
    finally:
        os.close(lock)


def _end(log: Path) -> str:
    with contextlib.suppress(OSError):
        return log.read_text(errors="replace")[-500:].strip()
    return ""
