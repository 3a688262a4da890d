"""What a long and large run costs, counted in bytecodes and bytes of memory."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ledger_queue import LAST, PLAIN, REWARD, ROLLOUT, TOKENS, Queue, ids, packed, publishing

from asyncflow_sdk.errors import LeaseLost, SchemaError
from asyncflow_sdk.ledger import Ledger, TaskSpec
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types.tasks import SamplerSpec

pytestmark = pytest.mark.fast


def test_ended_rows_are_forgotten_and_their_ids_never_come_again() -> None:
    # given room for 8 rows, two rows that stay, and a task that nobody works for
    queue = Queue(PLAIN, TaskSpec(name="idle", needs=("prompt",), gives=("x",)), LAST, options={"initial_rows": 8})
    worker = queue.join("w")
    stale = None
    for _ in range(60):
        queue.put(5)
        lease = queue.lease(worker, "plain")
        stale = stale or lease
        queue.complete(worker, lease, drop=tuple(range(len(ids(lease)))))
    # then what was forgotten is not asked about
    assert sorted(queue.ended) == list(range(300))
    assert stale is not None
    with pytest.raises(LeaseLost):
        queue.complete(worker, stale)
    queue.put(1)
    assert ids(queue.lease(worker, "idle", 50)) == [300]


def test_a_group_is_forgotten_whole() -> None:
    # given a group with one row filtered by the trainer and one that a side task still has
    side = TaskSpec(name="side", needs=("prompt",), gives=("score",))
    train = TaskSpec(name="train", needs=("prompt",), batch_rows=2)
    queue = Queue(side, train, options={"initial_rows": 8})
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


# ---- costs


class Plain:
    """A ledger without anything around it, at time 0."""

    def __init__(self, *tasks: TaskSpec, **limits: Any) -> None:
        self.ledger, self.tickets = Ledger(), 0
        self.worker, self.other = (self.do(0, cmd.OpenSession(name=name)).session for name in ("worker", "other"))
        if limits:
            self.do(self.worker, cmd.Configure(**limits))
        for task in tasks:
            self.do(self.worker, cmd.Declare(task=task))

    def do(self, session: int, command: Any) -> Any:
        """The reply, or None if the request waits."""
        self.tickets += 1
        self.ledger.apply(session, command, 0.0, self.tickets)
        return next((reply for ticket, reply in self.ledger.drain().answers if ticket == self.tickets), None)

    def put(self, groups: int, size: int = 1, **more: Any) -> None:
        put = cmd.AddRows(groups=groups, group_size=size, columns={"prompt": TOKENS}, **more)
        assert isinstance(self.do(self.worker, put), cmd.PutDone)


def cost(turn: Callable[[], None]) -> tuple[int, int]:
    """Bytecodes run, and the most bytes of memory held at once, by one turn after a first one."""
    steps = 0

    def count(frame: Any, event: str, arg: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return count

    turn()
    gc.collect()
    before = sys.gettrace()
    sys.settrace(count)
    try:
        turn()
    finally:
        sys.settrace(before)
    tracemalloc.start()
    try:
        held, _ = tracemalloc.get_traced_memory()
        turn()
        return steps, tracemalloc.get_traced_memory()[1] - held
    finally:
        tracemalloc.stop()


def turns_beside(live: int) -> tuple[int, int]:
    """The cost of one turn of each task, beside so many rows."""
    train = TaskSpec(name="train", needs=("response", "reward"), batch_rows=1 << 17)
    plain = Plain(ROLLOUT, REWARD, train, max_staleness=0)
    for command in [*publishing(0), cmd.ReportLoaded(version=0)]:
        plain.do(plain.worker, command)
    plain.put(live // 8, 8)

    def turn() -> None:
        for task, gives in (("rollout", "response"), ("reward", "reward")):
            lease = plain.do(plain.worker, cmd.LeaseRows(task=task, count=16))
            for share in ((0, 1, 2), (3,), range(4, 16)):
                done = cmd.Complete(token=lease.token, columns={gives: TOKENS}, index=packed(*share))
                assert isinstance(plain.do(plain.worker, done), cmd.Completed)
        plain.do(plain.worker, cmd.LeaseRows(task="train", count=1))  # says why there is nothing
        plain.do(plain.worker, cmd.GetStatus())
        plain.ledger.tick(0.0)
        plain.ledger.next_deadline()

    return cost(turn)


def test_the_cost_of_a_command_does_not_follow_the_rows_alive() -> None:
    few, many = turns_beside(1_024), turns_beside(20_000)
    assert many[0] <= few[0] * 1.02
    assert many[1] < few[1] + 16_000  # not a byte for each of the others


def turns_of_choosing(ready: int) -> tuple[int, int]:
    """The cost of leases through samplers, priorities and a team, with so many rows ready."""
    sampler = SamplerSpec("length_bucketed", {"column": "prompt", "window": 64})
    plain = Plain(
        TaskSpec(name="plain", needs=("prompt",), gives=("answer",), sampler=sampler),
        TaskSpec(name="groups", needs=("prompt",), gives=("more",), sampler=SamplerSpec("whole_groups")),
        TaskSpec(name="ranks", needs=("prompt",), sampler=SamplerSpec("token_balanced", {"column": "prompt"})),
    )
    for priority in range(3):
        measures = {"prompt": (np.arange(ready // 6) % 97.0).tobytes()}
        plain.put(ready // 6, 2, priority=priority, measures=measures)

    def turn() -> None:
        for task in ("plain", "groups"):
            assert isinstance(plain.do(plain.worker, cmd.LeaseRows(task=task, count=16)), cmd.Leased)
        for rank in range(2):
            ask = cmd.LeaseRows(task="ranks", count=16, timeout_s=9, group="t", rank=rank, world_size=2)
            last = plain.do(plain.worker, ask)
        assert isinstance(last, cmd.Leased)

    return cost(turn)


def test_the_cost_of_choosing_does_not_follow_the_rows_that_are_ready() -> None:
    few, many = turns_of_choosing(1_200), turns_of_choosing(20_400)
    assert many[0] <= few[0] * 1.02
    assert many[1] < few[1] + 16_000


def turns_beside_others(leased: int, parked: int) -> int:
    """Bytecodes of what one worker does, beside rows that others lease one by one and requests that wait."""
    nobody = TaskSpec(name="nobody gives", needs=("missing",))
    plain = Plain(PLAIN, TaskSpec(name="other", needs=("answer",), gives=("more",)), LAST, nobody)
    plain.put(leased)
    for _ in range(leased):
        plain.do(plain.other, cmd.LeaseRows(task="plain", count=1))
    for _ in range(parked):
        assert plain.do(plain.other, cmd.LeaseRows(task="nobody gives", count=1, timeout_s=600)) is None

    def turn() -> None:
        plain.put(2)
        lease = plain.do(plain.worker, cmd.LeaseRows(task="plain", count=2))
        plain.do(plain.worker, cmd.Renew(token=lease.token))
        plain.do(plain.worker, cmd.GiveBack(token=lease.token, index=packed(0)))
        plain.do(plain.worker, cmd.Complete(token=lease.token, columns={"answer": TOKENS}, index=packed(1)))
        again = plain.do(plain.worker, cmd.LeaseRows(task="plain", count=2))
        plain.do(plain.worker, cmd.Complete(token=again.token, columns={}, filtered=packed(0)))
        for task, gives in (("other", {"more": TOKENS}), ("last", {})):
            got = plain.do(plain.worker, cmd.LeaseRows(task=task, count=2))
            assert isinstance(plain.do(plain.worker, cmd.Complete(token=got.token, columns=gives)), cmd.Completed)
        short = plain.do(0, cmd.OpenSession(name="short")).session
        plain.do(short, cmd.LeaseRows(task="nobody gives", count=1, timeout_s=9))
        plain.ledger.session_died(short, 0.0, "gone")
        plain.ledger.tick(0.0)
        plain.ledger.next_deadline()

    return cost(turn)[0]


def test_the_cost_of_a_command_does_not_follow_leases_and_waiting_requests() -> None:
    assert turns_beside_others(500, 500) <= turns_beside_others(8, 8) * 1.05  # a heap is swept at other times


def rank_beside(others: int) -> int:
    """Bytecodes of a lease by a group of two ranks, beside single leases, and requests of single ranks and clients."""
    plain = Plain(PLAIN, LAST)
    plain.put(8 * others + 64)
    for number in range(others):
        assert plain.do(plain.other, cmd.LeaseRows(task="plain", count=1)) is not None
        for group in (f"g{number}", ""):  # at a task without rows
            asks = cmd.LeaseRows(task="last", count=2, timeout_s=9, group=group, world_size=2 if group else 1)
            assert plain.do(plain.other, asks) is None

    def ask(task: str, rank: int) -> Any:
        command = cmd.LeaseRows(task=task, count=2, timeout_s=9, group="t", rank=rank, world_size=2)
        return plain.do(plain.worker, command)

    def turn() -> None:
        lease = ask("plain", 0) or ask("plain", 1)
        for rank in range(2):
            assert isinstance(plain.do(plain.worker, cmd.GiveBack(token=lease.token, rank=rank)), cmd.Done)
        assert ask("last", 0) is None

    return cost(turn)[0]


def test_the_cost_of_a_lease_by_a_rank_group_does_not_follow_other_leases_and_requests() -> None:
    assert rank_beside(300) <= rank_beside(6) * 1.05


@pytest.mark.parametrize(("groups", "size"), [(2, (1 << 63) - 1), (1, 1 << 40), (1 << 62, 1)])
def test_a_put_larger_than_the_queue_is_refused_before_its_rows_are_counted_one_by_one(
    groups: int, size: int
) -> None:
    plain = Plain(capacity_rows=1_000)
    put = cmd.AddRows(groups=groups, group_size=size, columns={"prompt": TOKENS})
    assert isinstance(plain.do(plain.worker, put), SchemaError)


def turns_beside_puts(waiting: int) -> int:
    """Bytecodes of what makes room for one put of many."""
    plain = Plain(TaskSpec(name="last", needs=("prompt",)), capacity_rows=8)
    plain.put(8)
    for _ in range(waiting):
        put = cmd.AddRows(groups=1, group_size=1, columns={"prompt": TOKENS}, timeout_s=9.0)
        assert plain.do(plain.other, put) is None

    def turn() -> None:
        lease = plain.do(plain.worker, cmd.LeaseRows(task="last", count=1))
        plain.do(plain.worker, cmd.Complete(token=lease.token, columns={}))
        assert plain.ledger.audit().live == 8

    return cost(turn)[0]


def test_room_for_one_put_does_not_try_all_that_wait() -> None:
    assert turns_beside_puts(100) <= turns_beside_puts(10) * 1.05


def load_beside(others: int) -> int:
    """The cost of a load, beside so many replicas that wait for the next version."""
    plain = Plain(ROLLOUT)
    for number in range(others):
        replica = plain.do(0, cmd.OpenSession(name=f"gen-{number}")).session
        assert plain.do(replica, cmd.AwaitVersion(after=0, timeout_s=60.0)) is None
    for command in publishing(0):
        plain.do(plain.worker, command)
    return cost(lambda: plain.do(plain.other, cmd.ReportLoaded(version=0)))[0]


def test_the_cost_of_a_load_does_not_follow_the_replicas_that_wait_for_the_next_version() -> None:
    assert load_beside(200) <= load_beside(2) * 1.02
