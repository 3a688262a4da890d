"""RunDirectory: the files that a run leaves for a resume, used by one process at a time.

workflow.json        the workflow as asked for; under "again", its constructor's arguments
prompts.safetensors  the data, unless it is a stream; evaluation.safetensors: the evaluation's
summary.json         the outcome
lock                 held while the run is run
checkpoints/         of the trainer
journal/             of the queue
address              one address a line, while the run is served
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import socket
import sys
import time
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError, ServerLost
from ..interfaces import Placement
from ..memory import make_private_directory, private_opener
from ..plugins import import_name
from ..queue import is_unfinished
from ..queue.journal_directory import JournalDirectory
from ..types import Batch
from ..types.defaults import GROUP_SIZE
from ..wire import LOOPBACK, RETRY_S, own_address, probe
from .checkpoint import newest
from .loops.record_files import EVENTS, STEP_FILE, read_batch, write_batch
from .model_folder import steps_in
from .serialization import MAP, NAME, TYPE, Serializable, differences, from_json, to_json

ADDRESSES = "address"
JOURNAL = "journal"
PLACES = (
    "address", "advertise", "max_failed", "on_failure", "stall_timeout_s", "timeout_s", "replicas", "world_size",
    *(each.name for each in dataclasses.fields(Placement)),
)  # fmt: skip
"""Arguments of a workflow, and of its rollouts, stages and trainer, without effect on a resumed queue."""
_ORDER = "a run goes on with the order of its prompts"
_STATE = "the checkpoint has the weights and the optimizer's state of this one"
_ROWS = "the record of the run has its columns and tokens"
FIXED = {
    "prompts": _ORDER, "seed": _ORDER, "checkpoint": "without it there is nothing to go on from",
    "store": "the record reads its rows", "evaluate": "its scores could not be compared",
    "train.engine": _STATE, "train.model": _STATE, "train.model_revision": _STATE, "train.dtype": _STATE,
    "train.freeze": _STATE, "train.critic": _STATE, "train.algorithm.0": _STATE,
    "rollout.model": _STATE, "rollout.model_revision": _STATE, "rollout.tokenizer": _ROWS, "rollout.prompt": _ROWS,
    "rollout.task": _ROWS, "rollout.prefix": _ROWS,
}  # fmt: skip
"""Arguments fixed in a run, and why; also of each of several rollouts."""


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """Training from ``step`` on with changed arguments, by name: the old and the new value. ``prompts``: number of
    prompts trained before. ``checkpoint``: the one to go on from."""

    step: int
    prompts: int
    checkpoint: str
    changes: dict[str, list[Any]]

    def __str__(self) -> str:
        listed = ", ".join(f"{name} {old!r} to {new!r}" for name, (old, new) in self.changes.items())
        where = f"from step {self.step} on, after {self.checkpoint}"
        return f"{where}, with other arguments: {listed}" if listed else where


class _Again(msgspec.Struct):
    """The arguments to make a workflow again, and the import path of its modules."""

    path: list[str]
    workflow: dict[str, Any]


class _WorkflowRecord(msgspec.Struct):
    """What a resume reads of workflow.json."""

    again: _Again | None = None
    legs: list[Leg] = []


class RunDirectory:
    """The directory at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check_record(self, *, continues: bool, trained: bool = False) -> None:
        """Raise ConfigError if a run here would overwrite the record of another one, or if a server of this host
        serves the directory. Writes nothing. ``continues``: an unfinished durable run goes on. ``trained``: a record
        without a trained step may be overwritten."""
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
        self, description: dict[str, Any], resumable: Serializable | None, data: bool, legs: Sequence[Leg] = ()
    ) -> None:
        """Write workflow.json and, for a ``resumable`` workflow, its arguments. ``data``: True if its prompts are
        data and no function. Raises ConfigError if another process could not make it again."""
        if resumable is not None:
            arguments = arguments_of(resumable, data)
            description |= {"again": {"path": own_path(), "workflow": arguments}, "legs": legs}
        _write(self.path / "workflow.json", _json(description))

    def legs(self) -> list[Leg]:
        """Return the legs of the run after the first, in order."""
        return self._described().legs

    def changes_to(self, workflow: Serializable, data: bool) -> dict[str, list[Any]]:
        """Return the arguments of a workflow that differ from the recorded ones and need a new queue: old and new
        values by name. ``data``: True if its prompts are data. Raises ConfigError for the fixed ones."""
        old = self._again().workflow
        found = list(differences(old, arguments_of(workflow, data)))
        found = [each for each in found if not set(each[0].split(".")) & set(PLACES)]
        for name, before, after in found:
            plain = ".".join(part for number, part in enumerate(name.split(".")) if number != 1 or not part.isdigit())
            why = next((why for fixed, why in FIXED.items() if f"{plain}.".startswith(f"{fixed}.")), "")
            why = why or _STATE * (plain in ("rollout", "train"))
            if why:
                raise ConfigError(f"{name} cannot change in a run, here from {before!r} to {after!r}: {why}")
        return {name: [before, after] for name, before, after in found}

    @property
    def queue_is_over(self) -> bool:
        """True if the queue of the run is gone and a checkpoint is there, as after a failed export."""
        return not is_unfinished(self.path / JOURNAL) and bool(steps_in(self.path / "checkpoints"))

    def begin_leg(self, changes: dict[str, list[Any]], steps: int) -> Leg:
        """Discard the queue of the run, whose rows are generated anew, and return the leg that goes on from its
        newest intact checkpoint. Raises ConfigError."""
        legs, (manifest, path) = self.legs(), newest(self.path / "checkpoints")
        if changes and steps <= manifest.step:
            raise ConfigError(f"steps={steps}: {manifest.step} steps are trained already; say steps= a larger number")
        workflow = self._again().workflow
        rollout = workflow["rollout"][0] if isinstance(workflow["rollout"], list) else workflow["rollout"]
        before = legs[-1].step if legs else 0
        prompts = (manifest.step - before) * workflow["batch_size"] // rollout.get("group_size", GROUP_SIZE)
        _discard_queue(self.path / JOURNAL, workflow["checkpoint"].get("history", False))
        for step in (self.path / "steps").glob(STEP_FILE):
            if int(step.stem) >= manifest.step:
                step.unlink()
        prompts += legs[-1].prompts if legs else 0
        return Leg(step=manifest.step, prompts=prompts, checkpoint=path.name, changes=changes)

    def _again(self) -> _Again:
        """Return the parts to make a workflow again."""
        how = self._described().again
        if how is None:
            raise ConfigError(f"{self.path} cannot be resumed: that run was started without checkpoint=")
        return how

    def _described(self) -> _WorkflowRecord:
        try:
            return msgspec.json.decode((self.path / "workflow.json").read_bytes(), type=_WorkflowRecord)
        except msgspec.ValidationError:
            text = f"{self.path} holds no workflow: its workflow.json is not what was written"
            raise ConfigError(text) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path} holds no run: {error}") from None

    def read_workflow(self, changes: Mapping[str, Any]) -> Any:
        """Make the workflow of this directory again, with other values by dotted key. Raises ConfigError."""
        directory = self.path
        how = self._again()
        sys.path += [entry for entry in how.path if entry not in sys.path]
        data: dict[str, Any] = {}
        try:
            if "prompts" not in how.workflow:
                data["prompts"] = dict(read_batch(directory / "prompts.safetensors"))
            if how.workflow.get("evaluate") is not None:
                held_out = dict(read_batch(directory / "evaluation.safetensors"))
                data["evaluate"] = from_json(how.workflow.pop("evaluate"), prompts=held_out)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"the prompts of {directory} cannot be read: {error}") from None
        for name, value in changes.items():
            _change(how.workflow, name, value)
        try:
            return from_json(how.workflow, **data)
        except TypeError as error:  # arguments of another version of the SDK, or unknown ones of ``changes``
            raise ConfigError(f"{directory} holds a workflow that cannot be made again: {error}") from error

    def keep(self, data: Batch | None, held_out: Batch | None) -> None:
        """Write the prompts of a run and those of its evaluation, as far as they are not there. Columns not needed
        before are added. Raises ConfigError if other prompts are there."""
        for name, given in (("prompts", data), ("evaluation", held_out)):
            if given is None:
                continue
            path = self.path / f"{name}.safetensors"
            kept = read_batch(path) if path.exists() else Batch(given.ids, given.groups, {})
            old, new = _content(kept), _content(given)
            if kept.rows != given.rows or any(old[each] != new[each] for each in old.keys() & new.keys()):
                raise ConfigError(f"{path} has other data than this workflow; {FIXED['prompts']}")
            if new.keys() - old.keys():
                write_batch(path, Batch(given.ids, given.groups, {**kept.columns, **given.columns}))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json atomically. Raises OSError."""
        _write(self.path / "summary.json", _json(summary))

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


def _content(data: Batch) -> dict[str, Any]:
    """Return the columns of a batch, to compare them."""
    return {
        n: (str(c.spec), c.values.tobytes(), c.offsets is None or c.offsets.tobytes())
        for n, c in data.columns.items()
    }


def _change(workflow: Any, name: str, value: Any) -> None:
    """Change a value of a workflow in JSON. Raises ConfigError."""
    *path, last = name.split(".")
    at = workflow
    for part in path:
        try:
            at = at[int(part)] if isinstance(at, list) else _inside(at, part)
        except (LookupError, ValueError, TypeError):
            at = None
        at = at.get(MAP, at) if isinstance(at, dict) else at
    if not isinstance(at, dict):
        raise ConfigError(f"{name}: the workflow has nothing at {'.'.join(path)}")
    function = isinstance(value, str) and (last in ("reward", "agent") or NAME in (at.get(last) or ()))
    at[last] = {NAME: value} if function else to_json(value, name)


def _inside(at: dict[str, Any], name: str) -> Any:
    """Return the argument ``name`` of an object in JSON; a new one with its defaults if it was left out."""
    if at.get(name) is None and TYPE in at:
        made = typing.get_type_hints(import_name(at[TYPE]).__init__)[name]
        kinds = [each for each in typing.get_args(made) if isinstance(each, type) and each is not type(None)]
        at[name] = to_json(kinds[0](), name)
    return at[name]


def arguments_of(workflow: Serializable, data: bool) -> Any:
    """Return the arguments of a workflow in JSON, without prompts that are ``data`` and those of its evaluation.
    Raises ConfigError."""
    if data:
        workflow.init_args.pop("prompts", None)
        workflow.init_args.pop("rename", None)  # the data kept has the new names
    if workflow.init_args.get("evaluate") is not None:
        workflow.init_args["evaluate"].init_args.pop("prompts", None)
    return to_json(workflow, "")


def _discard_queue(path: Path, history: bool) -> None:
    """Remove the journal of a run, and the memory of its rows. Raises ConfigError if a server serves it."""
    if is_unfinished(path):
        journal = JournalDirectory(path, None, history)
        journal.shared_directory().close()
        journal.close(over=True)


def own_path() -> list[str]:
    """Return the folders of this process's import path outside its interpreter: the user's modules."""
    homes = tuple({os.path.abspath(home) for home in (sys.prefix, sys.base_prefix)})
    entries = (os.path.abspath(entry or ".") for entry in sys.path)
    return [entry for entry in entries if not entry.startswith(homes)]


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically, readable by its owner only. Raises OSError."""
    part = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with open(part, "wb", opener=private_opener) as file:
            file.write(content)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _json(data: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(data), indent=2)


# ---- the addresses at which a run is served


def write_addresses(directory: Path, addresses: list[str]) -> None:
    """Write the addresses of a run; an inproc address is left out. Raises OSError if the disk is full."""
    if not _holds(directory, addresses):  # else left by a server of the same run that was killed
        _write(directory / ADDRESSES, _text(addresses).encode())


def remove_addresses(directory: Path, addresses: list[str]) -> None:
    """Remove these addresses of a run. Addresses of another server stay."""
    if _holds(directory, addresses):
        (directory / ADDRESSES).unlink(missing_ok=True)


def _holds(directory: Path, addresses: list[str]) -> bool:
    with contextlib.suppress(OSError):
        return (directory / ADDRESSES).read_text() == _text(addresses)
    return False


def _text(addresses: list[str]) -> str:
    return "".join(f"{address}\n" for address in addresses if not address.startswith("inproc:"))


def advertised(address: str, advertise: str | None = None) -> str:
    """Return the tcp address at which other hosts reach a server: with ``advertise`` as its host, or with its own; of
    a server on all interfaces, the one of the default route, or the host's name."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if advertise is None and host not in ("0.0.0.0", "[::]", "*"):
        return address
    own = advertise or own_address(address)
    own = socket.gethostname() if own == LOOPBACK and advertise is None else own
    return f"tcp://{f'[{own}]' if ':' in own.strip('[]') and '[' not in own else own}:{port}"


def find_address(directory: Path, timeout_s: float) -> str:
    """Return the address of a directory's run.

    Waits up to ``timeout_s`` for the next server of an unfinished durable run. Raises ConfigError for a directory
    without a served run, ServerLost if nobody listens any more."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            return _served_at(directory)
        except (ConfigError, ServerLost) as error:
            if not is_unfinished(directory / JOURNAL):
                raise
            if time.monotonic() >= until:
                raise ServerLost(
                    f"{error}. Its journal holds a durable run that is not over; nobody served {directory} again in"
                    f" {timeout_s:.1f} s of waiting"
                ) from None
        time.sleep(RETRY_S)


def check_unserved(directory: Path) -> None:
    """Raise ConfigError if a server of this host answers at an address of the directory."""
    try:
        addresses = (directory / ADDRESSES).read_text().split()
    except (OSError, ValueError):
        return
    for address in addresses:
        with contextlib.suppress(ServerLost):
            if address.startswith("ipc:"):  # a port may be another program's by now
                probe(address)
                raise ConfigError(f"{directory} is being served at {address}; connect to it, or end its server")


def _served_at(directory: Path) -> str:
    """Return the first address with a server. Raises ConfigError, ServerLost."""
    try:
        addresses = (directory / ADDRESSES).read_text().split()
    except FileNotFoundError:
        raise ConfigError(
            f"{directory} is not being served: it has no file {ADDRESSES!r}; has its run ended?"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{directory / ADDRESSES} cannot be read: {error.strerror}; is it another user's run?"
        ) from None
    lost: ServerLost | None = None
    for address in addresses:  # one's own host's socket comes first
        try:
            probe(address)
        except ServerLost as error:
            lost = lost or error
        else:
            return address
    raise lost or ConfigError(f"{directory / ADDRESSES} names no address")
