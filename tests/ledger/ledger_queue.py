"""A ledger with its clock and its usual tasks, for tests that read given / when / then."""

from __future__ import annotations

from typing import Any

import numpy as np
from checked_ledger import CheckedLedger

from asyncflow_sdk.errors import AsyncFlowError, WriteOnceError
from asyncflow_sdk.ledger import TaskSpec, unpack_ids
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types import ColumnSpec

TEXT = ColumnSpec("text", "uint8")
TOKENS = ColumnSpec("ragged", "int64")
NUMBER = ColumnSpec("fixed", "float32")

ROLLOUT = TaskSpec(name="rollout", needs=("prompt",), gives=("response",), lease_s=10, admits=True)
REWARD = TaskSpec(name="reward", needs=("response",), gives=("reward",), lease_s=10)
TRAIN = TaskSpec(name="train", needs=("response", "reward"), batch_rows=4, lease_s=100)
PLAIN = TaskSpec(name="plain", needs=("prompt",), gives=("answer",), lease_s=10)
LAST = TaskSpec(name="last", needs=("answer",), lease_s=10)


class Queue(CheckedLedger):
    """``do`` returns the reply or raises the error; None means that the request waits. ``options``: of the checked ledger.
    ``sampler``, ``policy``: what every name of one stands for. ``limits``: of the run."""

    def __init__(
        self, *tasks: TaskSpec, options: Any = None, sampler: Any = None, policy: Any = None, **limits: Any
    ) -> None:
        made = dict(options or {})
        if sampler is not None:
            made["make_sampler"] = lambda spec: sampler(**spec.options)
        if policy is not None:
            made["make_policy"] = lambda spec: policy
        super().__init__(**made)
        self.admin = self.join("admin")
        for command in [cmd.Configure(**limits), *(cmd.Declare(task=task) for task in tasks)]:
            self.do(self.admin, command)

    def do(self, session: int, command: Any) -> Any:
        answer = self.send(session, command)
        if isinstance(answer, AsyncFlowError):
            raise answer
        return answer

    def put(
        self, groups: int, size: int = 1, *, wait: float = 0.0, key: str = "", priority: int = 0, **columns: Any
    ) -> Any:
        columns = columns or {"prompt": TEXT}
        put = cmd.AddRows(groups=groups, group_size=size, columns=columns, timeout_s=wait, key=key, priority=priority)
        return self.do(self.admin, put)

    def lease(self, session: int, task: str, count: int = 100, wait: float = 0.0, **more: Any) -> Any:
        return self.do(session, cmd.LeaseRows(task=task, count=count, timeout_s=wait, **more))

    def complete(self, session: int, lease: cmd.Leased, *at: int, drop: tuple[int, ...] = (), **columns: Any) -> Any:
        columns = columns or dict.fromkeys(self.tasks[lease.task].gives, TOKENS)
        index, dropped = (packed(*rows) if rows else None for rows in (at, drop))
        command = cmd.Complete(token=lease.token, columns=columns, index=index, filtered=dropped, rank=lease.rank)
        return self.do(session, command)

    def publish(self, version: int) -> None:
        """By the admin, who is the publisher from then on."""
        self.send(self.admin, cmd.OpenPublisher())  # refused if it is
        for command in publishing(version)[1:3]:
            self.do(self.admin, command)

    def free_publisher(self) -> None:
        for session in list(self.sessions):
            self.send(session, cmd.ClosePublisher())

    def publish_due(self) -> bool:
        """Restore or publish what the next step needs, by the admin. Returns True if a version was published."""
        cut = self.send(self.admin, cmd.GetTrainingPosition())
        number = 0 if self.version < 0 else cut.version
        if self.version >= number:
            return False
        self.free_publisher()
        if cut.restore >= 0:
            assert self.send(self.admin, cmd.ReportRestored(version=cut.restore)) == cmd.Done()
        opened, _, published, closed = [self.send(self.admin, command) for command in publishing(number)]
        assert isinstance(opened, cmd.Publisher), opened
        assert closed == cmd.Done()
        return isinstance(published, cmd.PublishReply)

    def take_turn(self, task: TaskSpec) -> bool:
        """Do what a worker of a task does next, by the admin. Returns True if it made progress."""
        published = task.batch_rows is not None and self.publish_due()
        got = self.send(self.admin, cmd.LeaseRows(task=task.name, count=4))
        if isinstance(got, cmd.LoadFirst):
            return bool(self.send(self.admin, cmd.ReportLoaded(version=got.version)) == cmd.Done())
        if not isinstance(got, cmd.Leased):
            return published
        columns = dict.fromkeys(task.gives, TOKENS)
        done = self.send(self.admin, cmd.Complete(token=got.token, columns=columns))
        if isinstance(done, WriteOnceError):  # rows that came with what this task would write
            done = self.send(self.admin, cmd.GiveBack(token=got.token, blame=True))
        assert isinstance(done, cmd.Completed | cmd.Done), done
        return True

    def load(self, session: int, version: int, *, own: bool = False) -> None:
        self.do(session, cmd.ReportLoaded(version=version, own=own))


def publishing(version: int) -> list[Any]:
    """The commands of a session of one rank that publishes a version and lets others publish after it."""
    published = cmd.Publish(version=version, part=part(version))
    return [cmd.OpenPublisher(), cmd.Announce(version=version), published, cmd.ClosePublisher()]


def part(version: int, rank: int = 0, *, outlives: bool = True, nbytes: int = 0) -> cmd.VersionPart:
    """What a rank publishes of a version."""
    return cmd.VersionPart(
        manifest=b"m%d.%d" % (version, rank), transport="shm", where=b"", root=f"r{version}.{rank}", nbytes=nbytes,
        outlives=outlives,
    )  # fmt: skip


def packed(*at: int) -> bytes:
    return np.array(at, "<i4").tobytes()


def ids(lease: cmd.Leased) -> list[int]:
    return list(unpack_ids(lease.ids).tolist())


def running(*, batch: int = 4, **limits: Any) -> tuple[Queue, int, int, int]:
    """A run with version 0 loaded: (queue, replica, judge, trainer)."""
    train = TaskSpec(name="train", needs=("response", "reward"), batch_rows=batch, lease_s=100)
    queue = Queue(ROLLOUT, REWARD, train, **limits)
    replica, judge, trainer = queue.join("gen-0"), queue.join("judge-0"), queue.join("train-0")
    queue.publish(0)
    queue.load(replica, 0)
    return queue, replica, judge, trainer


def produce(queue: Queue, replica: int, judge: int, count: int) -> None:
    """Generate and score ``count`` rows."""
    queue.complete(replica, queue.lease(replica, "rollout", count))
    queue.complete(judge, queue.lease(judge, "reward", count))
