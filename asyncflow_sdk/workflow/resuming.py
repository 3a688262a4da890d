"""Resuming a run: what its directory holds for that, and one process at a time.

workflow.json        what was asked for; under "again", all that the workflow is made of
prompts.safetensors  the data
lock                 held while the run is run
checkpoints/         of the trainer
journal/             of the queue
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import ConfigError
from ..memory import make_private_directory, private_opener
from .describing import from_json, to_json
from .recorder import read_batch, write_batch

if TYPE_CHECKING:
    from .workflow import Workflow


def write_description(workflow: Workflow, directory: Path) -> None:
    """Raises ConfigError for what another process could not make again, where that is wanted."""
    described = workflow.describe()
    if workflow.checkpoint is not None:
        workflow.asked.pop("prompts", None)
        described["again"] = {"path": own_path(), "workflow": to_json(workflow, "")}
        write_batch(directory / "prompts.safetensors", workflow.data)
    write_whole(directory / "workflow.json", described)


def write_whole(path: Path, data: Any) -> None:
    """JSON as people read it, whole or not there, whatever dies meanwhile. Raises OSError."""
    part = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with open(part, "wb", opener=private_opener) as file:
            file.write(msgspec.json.format(msgspec.json.encode(data), indent=2))
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def again(directory: Path) -> Workflow:
    """The workflow of a run directory. Raises ConfigError."""
    from .workflow import Workflow

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
    try:
        data = read_batch(directory / "prompts.safetensors")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the prompts of {directory} cannot be read: {error}") from None
    try:
        workflow = from_json(how["workflow"], prompts=dict(data))
    except TypeError as error:  # other arguments than this SDK's constructors have
        raise ConfigError(f"{directory} holds a workflow that cannot be made again: {error}") from error
    if not isinstance(workflow, Workflow):
        raise ConfigError(f"{directory} holds no workflow")
    return workflow


def read_summary(directory: Path) -> dict[str, Any]:
    """How a run ended; empty when it did not."""
    try:
        return msgspec.json.decode((directory / "summary.json").read_bytes(), type=dict[str, Any])
    except (OSError, ValueError):
        return {}


def own_path() -> list[str]:
    """Where this process imports the user's modules from; an interpreter's own packages are its own."""
    homes = tuple({os.path.abspath(home) for home in (sys.prefix, sys.base_prefix)})
    entries = (os.path.abspath(entry or ".") for entry in sys.path)
    return [entry for entry in entries if not entry.startswith(homes)]


@contextlib.contextmanager
def writable(directory: Path) -> Iterator[None]:
    """Raises ConfigError for what the operating system refuses in here."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{directory} cannot be the directory of a run: {error.strerror or error}") from None


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """This process runs what is in a directory. Raises ConfigError while another does."""
    with writable(directory):
        make_private_directory(directory)
        lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            who = os.pread(lock, 20, 0).decode(errors="replace").strip() or "another process"
            raise ConfigError(f"{directory} is being run by process {who}; wait for it, or end it") from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(lock)
