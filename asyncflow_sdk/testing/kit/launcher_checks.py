"""Checks of launchers: start, stop and kill workers of a real run."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator

from ...errors import ConfigError
from ...interfaces import Launcher, Placement, WorkerExit, WorkerHandle, WorkerSpec
from ...workflow import Logprobs, Run, Stage, serve
from ...workflow.processes.ranks import RankLauncher
from ...workflow.serialization import to_json
from ...workflow.specs import declare_task
from . import functions
from .check import DoesNotApply, checks, expect
from .lab import EngineThread, PlainLab

END_S = 60.0


class _Stand:
    """A served run, and workers started in it."""

    def __init__(self, lab: PlainLab, run: Run, launcher: Launcher) -> None:
        self.run, self.launcher, self._logs, self._count = run, launcher, lab.directory(), 0
        run.queue.declare("checked", needs=["x"], gives=["answer"])
        run.queue.declare("read", needs=["answer"])

    def start(self, function: Callable[..., object]) -> WorkerHandle:
        """Start a worker with this function."""
        stage = Stage(function, task="checked", needs=["x"], gives=["answer"], batch=1, concurrency=1)
        handle = self.launcher.start(self._spec(stage))
        expect(isinstance(handle, WorkerHandle), f"start() gave {handle!r}, no asyncflow_sdk.interfaces.WorkerHandle")
        return handle

    def start_ranks(self) -> WorkerHandle:
        """Start a reference of two connected ranks."""
        scores = Logprobs("echo-ranks", world_size=2)
        stage = Stage(scores, task="ranks", needs=["prompt_ids", "response_ids"], gives=["scores"])
        declare_task(self.run.queue, stage.declare())
        try:
            return RankLauncher(self.launcher, 2).start(self._spec(stage))
        except ConfigError as error:
            raise DoesNotApply(f"it starts no ranks: {error}") from None

    def _spec(self, stage: Stage) -> WorkerSpec:
        self._count += 1
        name = f"{stage.task}-{self._count}"
        return WorkerSpec(
            name=name,
            role=to_json(stage, "stage"),
            address=self.run.address,
            import_path=[entry for entry in sys.path if entry],
            placement=Placement(launcher="checked"),
            log=self._logs / f"{name}.log",
            group=name,
        )

    def put(self, rows: int = 4) -> None:
        """Add rows for the workers."""
        self.run.queue.put({"x": [float(row) for row in range(rows)]})

    def answers(self, rows: int = 4) -> list[int]:
        """Return the workers' answers once all rows have one."""
        found: list[int] = []
        while len(found) < rows:
            with self.run.queue.get("read", rows - len(found), timeout_s=END_S) as batch:
                found += batch.array("answer").tolist()
                batch.ack()
        return found


@contextlib.contextmanager
def _stand(lab: PlainLab) -> Iterator[_Stand]:
    launcher = lab.made()
    expect(isinstance(launcher, Launcher), f"the factory made {launcher!r}, no asyncflow_sdk.interfaces.Launcher")
    try:
        with serve(lab.directory()) as run:
            yield _Stand(lab, run, launcher)
    finally:
        launcher.close()


def _ended(handle: WorkerHandle, when: str) -> WorkerExit:

    def _wait() -> WorkerExit:
        try:
            return handle.wait()
        except Exception as error:  # counts as an end, and says nothing of it
            return WorkerExit(1, str(error))

    with contextlib.closing(EngineThread()) as thread:
        ending = thread.call(_wait, END_S, f"wait() {when}")
    expect(isinstance(ending, WorkerExit), f"wait() returned {ending!r}, no asyncflow_sdk.interfaces.WorkerExit")
    return ending


def _check_through(ending: WorkerExit, who: str) -> None:
    expect(ending.status == 0, f"{who} ended with status {ending.status}: {ending.text[-300:]}")


def works(lab: PlainLab) -> None:
    """Two started workers join the run, do their work, and end with the stream."""
    with _stand(lab) as stand:
        handles = [stand.start(functions.where) for _ in range(2)]
        stand.put()
        expect(len(stand.answers()) == 4, "rows were not answered")
        stand.run.queue.end()
        for handle in handles:
            _check_through(_ended(handle, "after the stream had ended"), "a worker that was through")


def failing(lab: PlainLab) -> None:
    """The end of a worker with failing work has a status other than 0, and the error."""
    with _stand(lab) as stand:
        handle = stand.start(functions.fails)
        stand.put(1)
        ending = _ended(handle, "after the work of its worker had raised")
        expect(ending.status != 0, "a worker whose work raised ended with status 0, as if it had been through")
        expect(
            functions.FAILURE in ending.text,
            f"the ending does not say what was raised; it says {ending.text[-300:]!r}",
        )


def stops(lab: PlainLab) -> None:
    """A worker waiting for rows ends when it is stopped; stop() and kill() may be called again."""
    with _stand(lab) as stand:
        handle = stand.start(functions.where)
        stand.put(1)
        stand.answers(1)
        handle.stop()
        handle.stop()
        _ended(handle, "after stop()")
        handle.stop()
        handle.kill()


def gives_back(lab: PlainLab) -> None:
    """The rows of a stopped and killed worker go to another worker."""
    with _stand(lab) as stand:
        first = stand.start(functions.sleeps)
        if first.pid == os.getpid():
            raise DoesNotApply("its workers are threads of this process, and nobody can end a thread")
        stand.put(1)
        while not stand.run.queue.status().rows["checked"]["leased"]:
            threading.Event().wait(0.02)
        first.stop()
        first.kill()
        _ended(first, "after stop() and kill()")
        stand.start(functions.where)
        expect(len(stand.answers(1)) == 1, "the row was not given to another worker")


def ranks(lab: PlainLab) -> None:
    """The ranks of one worker find each other, work, and end with the stream; they can be killed."""
    with _stand(lab) as stand:
        killed = stand.start_ranks()
        killed.kill()
        _ended(killed, "after kill() of its ranks")
        handle = stand.start_ranks()
        queue = stand.run.queue
        queue.declare("scored", needs=["scores"])
        queue.put({"prompt_ids": [[1]] * 4, "response_ids": [[2, 3]] * 4})
        queue.get("scored", 4, at_least=4, timeout_s=END_S).ack()
        queue.end()
        _check_through(_ended(handle, "after the stream of its ranks had ended"), "ranks that were through")


def refuses(lab: PlainLab) -> None:
    """A possible placement passes check(); an impossible one is refused with ConfigError, if at all."""
    launcher = lab.made()
    try:
        launcher.check(Placement(launcher="checked"))
        for impossible in ({"python": "/nowhere/python"}, {"gpus": (4096,)}):
            with contextlib.suppress(ConfigError):
                launcher.check(Placement(launcher="checked", **impossible))
    finally:
        launcher.close()


CHECKS = checks("launcher", {
    works: ("basic", (), "workers never join, and the run waits for them until its deadline",
        "start(): asyncflow_sdk.workflow.run_worker(order.config) in the worker's process, with its environment and"
        " import path"),
    failing: ("basic", ("works",),
        "a failed worker is not noticed, or its traceback is lost: the run stalls without a reason",
        "wait(): the status of run_worker's ending, and its text"),
    stops: ("basic", ("works",), "a run cannot end, or be scaled down: it waits for its workers",
        "stop(): end the worker at once, busy or not; a second call, or one after its end, does nothing"),
    gives_back: ("full", ("works", "stops"), "rows leased by a stopped worker are lost to the run",
        "stop(): end the process or thread, and with it the session with the queue"),
    ranks: ("full", ("works", "stops"),
        "a trainer of several processes waits for ever, or for ranks that another run holds",
        "start_ranks(): start all of them, or none; kill(): of one may end all"),
    refuses: ("full", (), "an impossible run starts, and its workers fail later, one after another",
        "check(): raise ConfigError for an impossible Placement, and for nothing else"),
})  # fmt: skip
