"""Checkpoints: the state of a training engine on disk, each complete or absent.

point = run.resume()                                # at the start of one's own loop
if point.path is not None:
    engine.load(point.path)
if point.version is not None:
    weights.publish(point.version, engine.named_weights(), untrained=engine.untrained)
for step in run.consumer("train", batch_size=256):
    ...
    step.ack()
    if step.index % 50 == 49:
        run.checkpoint(engine.save)

checkpoints/step-000050/manifest.json   the next step, its version, and each file with size and digest
checkpoints/step-000050/engine/         the files written by ``save``
checkpoints/.step-000050-PID/           being written; a killed trainer's is removed by the next trainer
checkpoints/lost-step-000060/           discarded by a resume; removed by the next checkpoint
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from .._version import __version__
from ..errors import ConfigError, MemoryFull
from ..ledger import commands as cmd
from ..memory import make_private_directory, sync_directory
from ..queue import QueueClient
from ..types.validation import check_least
from .loops.event_sinks import WorkerLog
from .model_folder import steps_in
from .processes.ranks import RankCommunicator

FORMAT = 1
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BLOCK = 4 << 20


class File(msgspec.Struct, frozen=True):
    nbytes: int
    digest: str


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """``step``: the next step to train, which trains ``version``. ``rows_put``: the prompt cursor, in rows.
    ``world_size``: number of ranks that wrote it; 0: unknown. ``digest``: of the other fields."""

    format: int
    sdk: str
    step: int
    version: int
    rows_put: int
    files: dict[str, File]
    world_size: int = 0
    digest: str = ""


class ResumePoint(NamedTuple):
    """The point where training continues. ``path``: the argument for ``load``; None: from the start. ``step``: leased
    next. ``version``: publish the engine's weights under this number before; None: they are current."""

    path: Path | None
    step: int
    version: int | None


class Damaged(Exception):
    """Raised when a checkpoint differs from the written one; says how."""


class Checkpoints:
    """The checkpoints of one run, for its one trainer. ``keep``: number of newest checkpoints kept; rows are kept for
    the oldest of them. ``ranks``: of a trainer with several, which make the same calls at the same time in a
    directory visible to all. ``reshards``: the engine loads what another number of ranks has saved. Not
    thread-safe."""

    def __init__(
        self,
        queue: QueueClient,
        directory: Path,
        keep: int = 2,
        ranks: RankCommunicator | None = None,
        *,
        reshards: bool = True,
    ) -> None:
        check_least(1, keep=keep)
        self._queue, self.directory, self._keep, self._reshards = queue, directory, keep, reshards
        self._ranks, self._log = ranks or RankCommunicator(), WorkerLog(queue.connection)

    def resume(self) -> ResumePoint:
        """Continue from the newest intact checkpoint; from the start without any. Raises ConfigError if rows that
        must be trained again are gone."""
        found = self._ranks.by_first(
            "where training goes on", lambda: msgspec.json.encode(self._resume(), enc_hook=str)
        )
        path, step, version = msgspec.json.decode(found, type=tuple[str | None, int, int | None])
        return ResumePoint(None if path is None else Path(path), step, version)

    def _resume(self) -> ResumePoint:
        cut = self._cut()
        for left in self.directory.glob(".step-*"):
            shutil.rmtree(left, ignore_errors=True)
        for step in reversed(steps_in(self.directory)):
            if step < cut.covered:
                break
            try:
                manifest = check(self._path(step))
            except Damaged as error:
                self._log.note(f"{self._path(step)} cannot be gone on from: {error}", "error")
                continue
            if refused := self._refused(manifest):
                raise ConfigError(f"{self._path(step)} {refused}: resume with train.world_size={manifest.world_size}")
            try:
                reply = self._queue.send(cmd.Resume(step=step, version=manifest.version))
            except ConfigError as error:
                self._log.note(f"{self._path(step)} cannot be gone on from: {error}", "error")
                continue
            return self._went_on(self._path(step) / "engine", reply)
        if cut.covered:
            raise ConfigError(
                f"{self.directory} holds no checkpoint that is whole and goes on with step {cut.covered} or a"
                f" later one; the rows of the steps before {cut.covered} have ended, so that training cannot begin"
                " anew either"
            )
        return self._went_on(None, self._queue.send(cmd.Resume(step=0)))

    def save(self, save: Callable[[Path], None], *, last: bool = False) -> Path:
        """Save the engine's state after the last acknowledged step by ``save``. ``last``: no step follows, so none
        will be trained again. Raises MemoryFull if the disk is full, ConfigError after a rollback until the trainer
        has loaded its version, and the errors of ``save``; then nothing has changed."""
        self._ranks.all_gather("the acknowledgement of a step")
        cut = self._cut()
        path = self._path(cut.step)
        again = self._ranks.by_first("a checkpoint", lambda: self._there(cut, last))
        if not again:
            self._write(path, save, cut)
        if self._ranks.first:
            self._count(cut, path, last)
        return path / "engine"

    def at(self, step: int) -> Path:
        """Return the engine's intact state before ``step``. Raises Damaged."""
        if refused := self._refused(check(self._path(step))):
            raise Damaged(refused)
        return self._path(step) / "engine"

    def _refused(self, manifest: CheckpointManifest) -> str:
        """Return the reason why the engine cannot load an intact checkpoint; "" if it can."""
        size = self._ranks.world_size
        if self._reshards or manifest.world_size in (0, size):
            return ""
        return f"was saved by {manifest.world_size} ranks, and its engine loads it in as many only, not in {size}"

    def _there(self, cut: cmd.TrainingPosition, last: bool) -> bytes:
        """Return b"there" if the last checkpoint need not be written again."""
        if cut.restore >= 0:  # the engine still has weights that were given up
            raise ConfigError(
                "no checkpoint can be made: the run was rolled back, and the trainer has not loaded version"
                f" {cut.restore} yet"
            )
        return b"there" * (last and cut.step in steps_in(self.directory))

    def _count(self, cut: cmd.TrainingPosition, path: Path, last: bool) -> None:
        """Register a checkpoint, and release older ones."""
        steps = [step for step in steps_in(self.directory) if step <= cut.step][-self._keep :]
        covers = cut.step if last else steps[0] if len(steps) == self._keep else cut.covered
        self._queue.send(cmd.AddCheckpoint(step=cut.step, covers=max(covers, cut.covered), version=cut.version))
        for old in [self._path(step) for step in steps_in(self.directory) if step < steps[0]]:
            shutil.rmtree(old, ignore_errors=True)
        for lost in self.directory.glob("lost-step-*"):
            shutil.rmtree(lost, ignore_errors=True)

    def _went_on(self, path: Path | None, reply: cmd.Resumed) -> ResumePoint:
        for step in steps_in(self.directory):
            if step > reply.step:  # of steps that will be trained again: it is not of this line any more
                aside = self.directory / f"lost-{self._path(step).name}"
                shutil.rmtree(aside, ignore_errors=True)
                self._path(step).rename(aside)
        if path is not None or reply.again:
            where = f"from {path}" if path is not None else "anew, since there is no checkpoint"
            text = f"training goes on with step {reply.step} {where}; {reply.again} rows are trained again"
            self._log.note(text, "info")
        first = reply.version < 0 and reply.step == 0
        return ResumePoint(path, reply.step, 0 if first else reply.version if reply.publish else None)

    def _cut(self) -> cmd.TrainingPosition:
        cut: cmd.TrainingPosition = self._queue.send(cmd.GetTrainingPosition())
        if not cut.checkpoints:
            raise ConfigError(
                "this run keeps no rows that a trainer could go on with; serve it with checkpoints=True"
            )
        return cut

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"

    def _write(self, path: Path, save: Callable[[Path], None], cut: cmd.TrainingPosition) -> None:
        """Write a checkpoint atomically, also if the host dies. Each of several ranks writes its part in the same
        directory, and the first one the rest. Raises MemoryFull, and the errors of ``save``."""

        def begin() -> bytes:
            made = path.with_name(f".{path.name}-{os.getpid()}")
            shutil.rmtree(made, ignore_errors=True)
            for each in (made.parent, made, made / "engine"):
                make_private_directory(each)
            return made.name.encode()

        ranks, what = self._ranks, f"checkpoint of step {cut.step}"
        part = path.with_name(ranks.by_first(f"the folder for the {what}", begin).decode())
        engine = part / "engine"
        try:
            with ranks.all_or_none(f"the {what}"):
                save(engine)
            if not ranks.first:
                return
            manifest = CheckpointManifest(
                format=FORMAT,
                sdk=__version__,
                step=cut.step,
                version=cut.version,
                rows_put=cut.put,
                files=_synced(engine),
                world_size=ranks.world_size,
            )
            manifest = msgspec.structs.replace(manifest, digest=_digest_of(manifest))
            with (part / "manifest.json").open("wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
                file.flush()
                os.fsync(file.fileno())
            sync_directory(part)
            if path.exists():  # of a trainer that died before it could say so
                shutil.rmtree(path)
            part.rename(path)
            sync_directory(path.parent)
        except BaseException as error:
            if ranks.first:
                shutil.rmtree(part, ignore_errors=True)
            if _is_full(error):
                text = f"no room for a checkpoint in {path.parent}: {error}; the one before counts"
                raise MemoryFull(text) from error
            raise


def check(path: Path) -> CheckpointManifest:
    """Return the manifest of an intact checkpoint. Raises Damaged."""
    try:
        manifest = msgspec.json.decode((path / "manifest.json").read_bytes(), type=CheckpointManifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Damaged(f"its manifest cannot be read: {error}") from None
    if manifest.format != FORMAT:
        raise Damaged(f"its format is {manifest.format}, and this is {FORMAT}")
    if _digest_of(manifest) != manifest.digest:
        raise Damaged("its manifest is not what was written")
    if path.name != f"step-{manifest.step:06d}":
        raise Damaged(f"it is of step {manifest.step}")
    for name, file in manifest.files.items():
        try:
            nbytes = (path / "engine" / name).stat().st_size
            found = _digest(path / "engine" / name) if nbytes == file.nbytes else ""
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error.strerror}") from None
        if nbytes != file.nbytes:
            raise Damaged(f"{name} has {nbytes} of {file.nbytes} bytes")
        if found != file.digest:
            raise Damaged(f"{name} has other bytes than were written")
    return manifest


def newest(directory: Path) -> tuple[CheckpointManifest, Path]:
    """Return the newest intact checkpoint of a run, and its path. Raises ConfigError without one."""
    for step in reversed(steps_in(directory)):
        path = directory / f"step-{step:06d}"
        with contextlib.suppress(Damaged):
            return check(path), path
    raise ConfigError(f"{directory} holds no intact checkpoint to go on from")


def _synced(directory: Path) -> dict[str, File]:
    """Sync all files below a directory to the disk, and return them."""
    files: dict[str, File] = {}
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            sync_directory(path)
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[str(path.relative_to(directory))] = File(path.stat().st_size, _digest(path))
    sync_directory(directory)
    return files


def _digest(path: Path) -> str:
    total = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total.update(block)
    return total.hexdigest()


def _digest_of(manifest: CheckpointManifest) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(msgspec.structs.replace(manifest, digest="")))


def _is_full(error: BaseException) -> bool:
    """True if a disk was full: some libraries report no errno, but a text."""
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    return any(os.strerror(number).lower() in str(error).lower() for number in FULL)
