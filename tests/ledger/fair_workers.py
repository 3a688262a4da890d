"""Workers that take fair turns at a ledger: from any state they bring a run to its end, or it is a deadlock."""

from __future__ import annotations

from typing import Any

from ledger_queue import TOKENS, Queue, publishing

from asyncflow_sdk.errors import AsyncFlowError, Ended, WriteOnceError
from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd


class FairWorkers:
    """A feeder, and a worker of each task."""

    def __init__(self, queue: Queue, tasks: list[TaskSpec], group_size: int) -> None:
        self.queue, self.tasks, self.group_size = queue, tasks, group_size
        self._sessions: dict[str, int] = {}

    def turns(self) -> bool:
        """One turn of each. Returns True if any got anywhere."""
        return any([self._feed(), *(self.turn(task) for task in self.tasks if task.name in self.queue.tasks)])

    def turn(self, task: TaskSpec) -> bool:
        published = task.batch_rows is not None and self._publish_what_is_due(task.name)
        return self._work(task) or published

    def _send(self, role: str, command: Any) -> Any:
        if self._sessions.get(role) not in self.queue.sessions:
            self._sessions[role] = self.queue.join(f"fair {role}")
        return self.queue.send(self._sessions[role], command)

    def _feed(self) -> bool:
        put = cmd.AddRows(groups=1, group_size=self.group_size, columns={"prompt": TOKENS})
        wanted = isinstance(self._send("feeder", cmd.AwaitRowsWanted()), cmd.RowsWanted)
        return wanted and isinstance(self._send("feeder", put), cmd.PutDone)

    def _publish_what_is_due(self, role: str) -> bool:
        cut, current = self._send(role, cmd.GetTrainingPosition()), self.queue.version
        number = 0 if current < 0 else cut.version
        if current >= number:
            return False
        self.queue.free_publisher()
        if cut.restore >= 0:
            assert self._send(role, cmd.ReportRestored(version=cut.restore)) == cmd.Done()
        opened, _, published, closed = [self._send(role, command) for command in publishing(number)]
        assert isinstance(opened, cmd.Publisher), opened
        assert closed == cmd.Done()
        return isinstance(published, cmd.PublishReply)

    def _work(self, task: TaskSpec) -> bool:
        got = self._send(task.name, cmd.LeaseRows(task=task.name, count=4))
        if isinstance(got, cmd.LoadFirst):
            return self._send(task.name, cmd.ReportLoaded(version=got.version)) == cmd.Done()
        if not isinstance(got, cmd.Leased):
            return False
        done = self._send(task.name, cmd.Complete(token=got.token, columns=dict.fromkeys(task.gives, TOKENS)))
        if isinstance(done, WriteOnceError):  # rows that came with what this task would write
            done = self._send(task.name, cmd.GiveBack(token=got.token, blame=True))
        assert isinstance(done, cmd.Completed | cmd.Done), done
        return True

    def _cover(self) -> bool:
        """Make a checkpoint of all that is acknowledged. Returns True if it makes anything final."""
        cut = self._send("admin", cmd.GetTrainingPosition())
        due = cut.checkpoints and cut.step > cut.covered
        return due and self._send("admin", cmd.AddCheckpoint(step=cut.step, covers=cut.step)) == cmd.Done()

    def finish(self, rounds: int = 400) -> None:
        """Bring the run to its end. Fails if it cannot be brought there."""
        queue = self.queue
        declared = [self._send("admin", cmd.Declare(task=task)) for task in self.tasks]
        give_up = any(isinstance(reply, AsyncFlowError) for reply in declared)
        status = queue.status()
        unlimited = status.step < 0 or status.steps is None
        for count in range(rounds):
            if give_up or (unlimited and count == 2):
                self._send("admin", cmd.End(cancel=give_up))
                give_up = unlimited = False
            if not queue.live and queue.status().over:
                break
            if self.turns() or self._cover():
                continue
            deadline = queue.next_deadline()
            if deadline is not None:
                queue.at(max(deadline, queue.now))
            else:
                assert not queue.status().over, f"deadlock: {queue.status()}"
                self._send("admin", cmd.End())
        assert not queue.live, f"no end in {rounds} rounds: {queue.status()}"
        queue.check()
        for task in queue.tasks:
            assert isinstance(self._send("admin", cmd.LeaseRows(task=task, count=1)), Ended)
