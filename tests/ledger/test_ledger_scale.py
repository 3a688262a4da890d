"""What a long and large run costs, by counts; and that a replay goes the same way."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledger_queue import (
    LAST,
    NUMBER,
    PLAIN,
    REWARD,
    ROLLOUT,
    TEXT,
    TOKENS,
    TRAIN,
    Queue,
    ids,
    packed,
    running,
)

from asyncflow_sdk.errors import (
    LeaseLost,
)
from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.ledger.commands import SamplerSpec
from asyncflow_sdk.ledger.ready import ReadyQueue
from asyncflow_sdk.ledger.rows import READY, Rows
from asyncflow_sdk.types import ColumnSpec


def test_ended_rows_are_forgotten_and_their_ids_never_come_again() -> None:
    # given room for 8 rows, two rows that stay, and a ready queue that nobody looks into
    queue = Queue(PLAIN, TaskSpec(name="idle", needs=("prompt",), gives=("x",)), LAST, capacity=8)
    worker = queue.join("w")
    seen: set[int] = set()
    stale = None
    for _ in range(60):
        put = queue.put(5)
        seen |= set(range(put.first, put.first + put.count))
        lease = queue.lease(worker, "plain")
        stale = stale or lease
        queue.complete(worker, lease, drop=tuple(range(len(ids(lease)))))
    # then every id was new, the arrays stayed small, and what was forgotten is not asked about
    assert seen == set(range(300))
    assert queue.ledger.rows.base > 200
    assert len(queue.ledger.rows.state) <= 32
    assert sorted(queue.ended) == list(range(300))
    assert stale is not None
    with pytest.raises(LeaseLost):
        queue.complete(worker, stale)
    queue.put(1)
    assert ids(queue.lease(worker, "idle", 50)) == [300]


def test_a_group_is_forgotten_whole() -> None:
    # given a group with one row filtered by the trainer and one that a side task still has
    side = TaskSpec(name="side", needs=("prompt",), gives=("score",))
    queue = Queue(side, TaskSpec(name="train", needs=("prompt",), batch_rows=2), capacity=8)
    worker, trainer = queue.join("w"), queue.join("t")
    queue.put(1, 2)
    late = queue.lease(worker, "side")
    queue.complete(trainer, queue.lease(trainer, "train"), drop=(0,))
    # when the arrays move, and that row is dropped then
    for _ in range(10):
        queue.put(1, 2)
        queue.complete(trainer, queue.lease(trainer, "train"))
    queue.complete(worker, late, 1, drop=(0,))
    # then it was trained all the same, and nothing else ended with it
    assert queue.audit().filtered == 1
    assert queue.audit().consumed == 1
    assert sorted(queue.ended) == [0, 1]


def test_groups_are_taken_whole_and_never_more_than_there_is_room_for() -> None:
    rows = Rows(4096)
    rows.add_task("t")
    queue = ReadyQueue(rows, "t")
    rows.task("t", "state")[:] = READY
    queue.push(rows.add(3, 4))
    assert [len(queue.take_groups(count, room)) for count, room in ((9, 3), (1, 9), (9, 5), (9, 9))] == [0, 4, 4, 4]
    queue.push(rows.add(5, 300))  # more than a chunk
    assert len(queue.take_groups(10**6, 1000)) == 900
    assert len(queue.take_groups(10**6, 10**6)) == 600


def calls_and_rows(live: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Calls made, and rows looked at in ready queues, by one turn of each task with ``live`` rows there."""
    queue, replica, judge, _ = running(batch=1 << 17, max_staleness=0)
    queue.put(live // 8, 8)
    looked = []
    is_ready = ReadyQueue.is_ready
    monkeypatch.setattr(ReadyQueue, "is_ready", lambda self, ids: (looked.append(len(ids)), is_ready(self, ids))[1])
    live_ids = Rows.live_ids
    monkeypatch.setattr(Rows, "live_ids", lambda self: (looked.append(self.count), live_ids(self))[1])
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def turn(session: int, task: str, columns: dict[str, ColumnSpec]) -> None:
        queue.ledger.apply(session, cmd.Lease(task=task, count=16), 0.0, 0)
        lease = queue.ledger.drain().answers[0][1]
        assert len(ids(lease)) == 16
        for part in ((0, 1, 2), (3,)):
            done = cmd.Complete(token=lease.token, columns=columns, index=packed(*part))
            queue.ledger.apply(session, done, 0.0, 0)
        queue.ledger.apply(
            session, cmd.Complete(token=lease.token, columns=columns, index=packed(*range(4, 16))), 0.0, 0
        )
        queue.ledger.drain()

    turn(replica, "rollout", {"response": TOKENS})  # what is made on first use is made
    turn(judge, "reward", {"reward": NUMBER})
    looked.clear()
    gc.collect()
    gc.disable()  # what others left to be collected is no call of these
    sys.setprofile(count)
    try:
        turn(replica, "rollout", {"response": TOKENS})
        turn(judge, "reward", {"reward": NUMBER})
        queue.ledger.apply(judge, cmd.Lease(task="train", count=1), 0.0, 0)  # says why there is nothing
        queue.ledger.apply(judge, cmd.GetStatus(), 0.0, 0)
        queue.ledger.drain()
        queue.ledger.tick(0.0)
        queue.ledger.next_deadline()
    finally:
        sys.setprofile(None)
        gc.enable()
        monkeypatch.undo()
    return calls, sum(looked)


def test_the_cost_of_a_command_does_not_follow_the_rows_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    few_calls, few_rows = calls_and_rows(1_024, monkeypatch)
    many_calls, many_rows = calls_and_rows(50_000, monkeypatch)
    assert many_calls == few_calls
    assert many_rows == few_rows < 4_096


def work_beside(leased: int, parked: int) -> int:
    """Bytecodes run for what one worker does, beside rows that others lease one by one and requests that wait."""
    spec = TaskSpec(name="plain", needs=("prompt",), gives=("answer",), lease_s=600)
    queue = Queue(spec, TaskSpec(name="other", needs=("answer",), gives=("more",)), LAST)
    ledger, worker, others = queue.ledger, queue.join("w"), queue.join("others")
    steps = tickets = 0

    def do(session: int, command: Any) -> Any:
        nonlocal tickets
        tickets += 1
        ledger.apply(session, command, 0.0, 10**6 + tickets)
        answers = ledger.drain().answers
        return answers[0][1] if answers else None

    def count(frame: Any, event: str, arg: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return count

    def turn() -> None:
        for _ in range(4):
            put = do(worker, cmd.Put(groups=2, group_size=1, columns={"prompt": TOKENS}))
            assert isinstance(put, cmd.PutDone)
            lease = do(worker, cmd.Lease(task="plain", count=2))
            do(worker, cmd.Renew(token=lease.token))
            do(worker, cmd.GiveBack(token=lease.token, index=packed(0)))
            do(worker, cmd.Complete(token=lease.token, columns={"answer": TOKENS}, index=packed(1)))
            again = do(worker, cmd.Lease(task="plain", count=2))
            do(worker, cmd.Complete(token=again.token, columns={"answer": TOKENS}, filtered=packed(0)))
            for task in ("other", "last"):
                got = do(worker, cmd.Lease(task=task, count=2))
                do(worker, cmd.Complete(token=got.token, columns={"more": TOKENS} if task == "other" else {}))
            session = do(0, cmd.Join(name="short"))
            do(session.session, cmd.Lease(task="nobody gives", count=1, timeout_s=9))
            ledger.session_died(session.session, 0.0, "gone")
            ledger.drain()
            ledger.tick(0.0)
            ledger.next_deadline()

    turn()
    do(others, cmd.Put(groups=leased, group_size=1, columns={"prompt": TOKENS}))
    for _ in range(leased):
        do(others, cmd.Lease(task="plain", count=1))
    do(others, cmd.Declare(task=TaskSpec(name="nobody gives", needs=("missing",))))
    for _ in range(parked):
        assert do(others, cmd.Lease(task="nobody gives", count=1, timeout_s=600)) is None
    turn()
    before = sys.gettrace()
    sys.settrace(count)
    try:
        turn()
    finally:
        sys.settrace(before)
    assert len(ledger.leases) == leased
    assert len(ledger.parked) == parked
    return steps


def work_of_choosing(ready: int) -> int:
    """Bytecodes run for leases through samplers, priorities and a team, with so many rows ready."""
    sampler = SamplerSpec("length_bucketed", {"column": "prompt", "window": 64})
    tasks = [
        TaskSpec(name="plain", needs=("prompt",), gives=("answer",), sampler=sampler),
        TaskSpec(name="groups", needs=("prompt",), gives=("more",), sampler=SamplerSpec("whole_groups")),
        TaskSpec(name="ranks", needs=("prompt",), sampler=SamplerSpec("token_balanced", {"column": "prompt"})),
    ]
    queue = Queue(*tasks)
    ledger, worker = queue.ledger, queue.join("w")
    steps = 0

    def count(frame: Any, event: str, arg: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return count

    def turn(ticket: int) -> None:
        for number, task in enumerate(("plain", "groups")):
            ledger.apply(worker, cmd.Lease(task=task, count=16), 0.0, ticket + number)
        for rank in range(2):
            ask = cmd.Lease(task="ranks", count=16, timeout_s=9, team="t", rank=rank, world_size=2)
            ledger.apply(worker, ask, 0.0, ticket + 4 + rank)
        assert len([a for _, a in ledger.drain().answers if isinstance(a, cmd.Leased)]) == 4

    for priority in range(3):
        measures = {"prompt": (np.arange(ready // 6) % 97.0).tobytes()}
        put = cmd.Put(
            groups=ready // 6, group_size=2, columns={"prompt": TOKENS}, priority=priority, measures=measures
        )
        ledger.apply(worker, put, 0.0, 1)
    ledger.drain()
    turn(10)
    before = sys.gettrace()
    sys.settrace(count)
    try:
        turn(20)
    finally:
        sys.settrace(before)
    return steps


def test_the_cost_of_choosing_does_not_follow_the_rows_that_are_ready() -> None:
    assert work_of_choosing(60_000) <= work_of_choosing(1_200) * 1.02


def test_the_cost_of_a_command_does_not_follow_leases_and_waiting_requests() -> None:
    few = work_beside(8, 8)
    many = work_beside(2_000, 2_000)
    assert many <= few * 1.05  # a heap is swept at other times


def test_room_for_one_put_does_not_try_all_that_wait() -> None:
    # given a full queue, and many puts that wait
    queue = Queue(TaskSpec(name="last", needs=("prompt",)), capacity_rows=2)
    worker = queue.join("w")
    queue.put(2)
    for _ in range(50):
        queue.ask(worker, cmd.Put(groups=1, group_size=1, columns={"prompt": TEXT}, timeout_s=9.0))
    tried = []
    put = queue.ledger._handlers[cmd.Put]
    queue.ledger._handlers[cmd.Put] = lambda *what: (tried.append(1), put(*what))[1]
    # when a row goes
    queue.complete(worker, queue.lease(worker, "last", 1))
    # then one came in, and the next one waits on
    assert queue.audit().live == 2
    assert len(tried) <= 3


def wakings() -> str:
    """The order in which one command wakes requests that wait at different places."""
    queue = Queue(ROLLOUT, REWARD, TRAIN, PLAIN, LAST, capacity_rows=4)
    for task in ("train", "last", "reward"):
        queue.ask(queue.admin, cmd.Lease(task=task, count=1, timeout_s=9))
    queue.ask(queue.admin, cmd.AwaitVersion(after=0, timeout_s=9))
    queue.ask(queue.admin, cmd.Wanted(timeout_s=9))
    queue.ledger.apply(queue.admin, cmd.End(), 0.0, 99)
    return str([ticket for ticket, _ in queue.ledger.drain().answers])


def test_a_replay_wakes_requests_in_the_same_order() -> None:
    code = "import test_ledger_scale; print(test_ledger_scale.wakings())"
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent, env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert run.stdout.strip() == wakings()
