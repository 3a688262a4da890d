"""RunDirectory: the files that a run leaves for a resume, used by one process at a time.

workflow.json        the workflow as asked for; under "again", its constructor's arguments
prompts.safetensors  the data, unless it is a stream; evaluation.safetensors: the evaluation's
summary.json         the outcome
lock                 held while the run is run
checkpoints/         of the trainer
journal/             of the queue
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError
from ..interfaces import Placement
from ..memory import make_private_directory, private_opener
from ..queue import is_unfinished
from ..types import Batch
from .address import JOURNAL, check_unserved
from .events.event_file import EVENTS
from .events.step_files import STEP_FILE, read_batch, write_batch
from .serialization import Serializable, from_json, to_json

OF_RUNS = ("address", "advertise", "on_failure", "stall_timeout_s")
OF_ROLES = ("replicas", "world_size", *(each.name for each in dataclasses.fields(Placement)))
"""Arguments of a workflow, and of its rollouts, stages and trainer, that may change when it is resumed."""


class RunDirectory:
    """The directory at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check_record(self, *, continues: bool, trained: bool = False) -> None:
        """Raise ConfigError if a run here would overwrite the record of another one, or if a server of
        this host serves the directory. Writes nothing. ``continues``: an unfinished durable run goes
        on. ``trained``: a record without a trained step may be overwritten."""
        if is_unfinished(self.path / JOURNAL):  # a live server holds its lock
            if not continues:
                verb = "resume" if (self.path / "workflow.json").exists() else "serve"
                raise ConfigError(
                    f"{self.path} already holds a run that is not over: continue it by `asyncflow {verb} {self.path}`,"
                    " or choose another directory"
                )
            return
        check_unserved(self.path)
        with self.writable():
            recorded = any((self.path / "steps").glob(STEP_FILE)) if trained else (self.path / EVENTS).exists()
        if recorded:
            raise ConfigError(
                f"{self.path} already holds a run, which has ended; choose another directory, or move it away"
            )

    def write_description(
        self, description: dict[str, Any], resumable: Serializable | None, data: Batch | None,
        held_out: Batch | None = None,
    ) -> None:  # fmt: skip
        """Write workflow.json and, for a ``resumable`` workflow, its arguments and ``data``; None:
        its arguments name the function of its prompts. ``held_out``: prompts of its evaluation.
        Raises ConfigError if another process could not make it again."""
        if resumable is not None:
            if data is not None:
                resumable.init_args.pop("prompts", None)
                self._keep("prompts.safetensors", data)
            if held_out is not None:
                resumable.init_args["evaluate"].init_args.pop("prompts")
                self._keep("evaluation.safetensors", held_out)
            description["again"] = {"path": own_path(), "workflow": to_json(resumable, "")}
        _write_json(self.path / "workflow.json", description)

    def read_workflow(self, changes: Mapping[str, Any]) -> Any:
        """Make the workflow of this directory again, with other values by dotted key. Raises
        ConfigError."""
        directory = self.path
        try:
            described = msgspec.json.decode((directory / "workflow.json").read_bytes(), type=dict[str, Any])
        except (OSError, ValueError) as error:
            raise ConfigError(f"{directory} holds no run: {error}") from None
        how = described.get("again")
        if how is None:
            raise ConfigError(f"{directory} cannot be resumed: that run was started without checkpoint=")
        if not isinstance(how, dict) or not isinstance(how.get("path"), list) or "workflow" not in how:
            raise ConfigError(f"{directory} holds no workflow: its workflow.json is not what was written")
        sys.path += [entry for entry in how["path"] if entry not in sys.path]
        data: dict[str, Any] = {}
        try:
            if "prompts" not in how["workflow"]:
                data["prompts"] = dict(read_batch(directory / "prompts.safetensors"))
            if how["workflow"].get("evaluate") is not None:
                held_out = dict(read_batch(directory / "evaluation.safetensors"))
                data["evaluate"] = from_json(how["workflow"].pop("evaluate"), prompts=held_out)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"the prompts of {directory} cannot be read: {error}") from None
        for name, value in changes.items():
            _change(how["workflow"], name, value)
        try:
            return from_json(how["workflow"], **data)
        except TypeError as error:  # arguments of another version of the SDK
            raise ConfigError(f"{directory} holds a workflow that cannot be made again: {error}") from error

    def _keep(self, name: str, data: Batch) -> None:
        """Write data, unless it is there."""
        if not (self.path / name).exists():
            write_batch(self.path / name, data)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json atomically. Raises OSError."""
        _write_json(self.path / "summary.json", summary)

    def read_summary(self) -> dict[str, Any]:
        """Return the outcome; empty if the run did not end."""
        try:
            return msgspec.json.decode((self.path / "summary.json").read_bytes(), type=dict[str, Any])
        except (OSError, ValueError):
            return {}

    @contextlib.contextmanager
    def writable(self) -> Iterator[None]:
        """Raise ConfigError for an OSError in this block."""
        try:
            yield
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be the directory of a run: {error.strerror or error}") from None

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of the directory. Raises ConfigError if another process holds it."""
        with self.writable():
            make_private_directory(self.path)
            lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                who = os.pread(lock, 20, 0).decode(errors="replace").strip() or "another process"
                raise ConfigError(f"{self.path} is being run by process {who}; wait for it, or end it") from None
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(lock)


def _change(workflow: Any, name: str, value: Any) -> None:
    """Change a value of a workflow in JSON. Raises ConfigError."""
    *path, last = name.split(".")
    known = OF_ROLES if path else OF_RUNS
    if last not in known:
        raise ConfigError(f"{name} cannot change when a run is resumed; these can: {', '.join(known)}")
    at = workflow
    for part in path:
        try:
            at = at[int(part) if isinstance(at, list) else part]
        except (LookupError, ValueError, TypeError):
            at = None
    if not isinstance(at, dict):
        raise ConfigError(f"{name}: the workflow has nothing at {'.'.join(path)}")
    at[last] = to_json(value, name)


def own_path() -> list[str]:
    """Return the folders of this process's import path outside its interpreter: the user's modules."""
    homes = tuple({os.path.abspath(home) for home in (sys.prefix, sys.base_prefix)})
    entries = (os.path.abspath(entry or ".") for entry in sys.path)
    return [entry for entry in entries if not entry.startswith(homes)]


def _write_json(path: Path, data: Any) -> None:
    """Write indented JSON atomically. Raises OSError."""
    part = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with open(part, "wb", opener=private_opener) as file:
            file.write(msgspec.json.format(msgspec.json.encode(data), indent=2))
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
