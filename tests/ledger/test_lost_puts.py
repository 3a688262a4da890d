"""Whatever is lost of puts with keys, and whenever: the same puts again make the queue what it was, group by group."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_queue import LAST, PLAIN, TEXT, Queue, ids, running

from asyncflow_sdk.errors import SchemaError
from asyncflow_sdk.interfaces.store import HomeOffer
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.ledger import unpack_ids
from asyncflow_sdk.types.tasks import TaskSpec

pytestmark = pytest.mark.fast


def put(queue: Queue, key: str, groups: int, size: int) -> cmd.PutDone:
    digest = key[-1].encode() * 16
    command = cmd.AddRows(groups=groups, group_size=size, columns={"prompt": TEXT}, key=key, digest=digest)
    reply: cmd.PutDone = queue.do(queue.admin, command)
    return reply


def lose(queue: Queue, rows: list[int]) -> None:
    queue.lose(*rows)


@settings(max_examples=25)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=4),
    initial_rows=st.sampled_from([4, 1024]),  # rows that ended are forgotten early, or late
    data=st.data(),
)
def test_the_same_puts_again_after_losses_make_every_group_live_once(
    sizes: list[tuple[int, int]], initial_rows: int, data: st.DataObject
) -> None:
    queue = Queue(PLAIN, LAST, options={"initial_rows": initial_rows})
    puts = {chr(ord("a") + at): size for at, size in enumerate(sizes)}
    where: dict[int, tuple[str, int]] = {}  # row → its put and group

    def put_all() -> None:
        lost = {name: {g for k, g in where.values() if k == name} for name in puts}
        live = set(queue.live)
        for key, (groups, size) in puts.items():
            there = {g for row, (k, g) in where.items() if k == key and row in live}
            missing = sorted(set(range(groups)) - there)
            reply = put(queue, key, groups, size)
            assert reply.again == (not missing)
            if missing:
                assert reply.count == len(missing) * size
                assert unpack_ids(reply.groups).tolist() == (missing if lost[key] else [])
                where.update({reply.first + at: (key, missing[at // size]) for at in range(reply.count)})

    put_all()
    for _ in range(data.draw(st.integers(1, 4), "losses")):
        live = sorted(queue.live)
        gone = sorted(data.draw(st.sets(st.sampled_from(live), max_size=6), "lost")) if live else []
        lose(queue, gone)
        named = [
            (where[row], letter.key, letter.place + (row - letter.first) // puts[letter.key][1])
            for letter in queue.do(queue.admin, cmd.GetFailed(count=1000)).groups
            for row in range(letter.first, letter.first + letter.rows)
        ]
        assert all(told == (key, group) for told, key, group in named)
        assert len(named) == queue.audit().failed
        if data.draw(st.booleans(), "put again"):
            put_all()
    put_all()

    live = Counter(where[row] for row in queue.live)
    assert live == {(key, group): size for key, (groups, size) in puts.items() for group in range(groups)}
    assert queue.audit().balanced


@settings(max_examples=25)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4),
    initial_rows=st.sampled_from([4, 1024]),
    data=st.data(),
)
def test_the_same_puts_again_after_lost_homes_make_every_group_live_once(
    sizes: list[tuple[int, int]], initial_rows: int, data: st.DataObject
) -> None:
    queue = Queue(PLAIN, LAST, options={"initial_rows": initial_rows})
    for name in "ab":
        queue.do(queue.join(name), cmd.OpenHome(offer=HomeOffer(store="hosts", name=name, identity=name)))
    puts = {chr(ord("a") + at): size for at, size in enumerate(sizes)}
    where: dict[int, tuple[str, int]] = {}  # row → its put and group

    def put_all() -> None:
        for key, (groups, size) in puts.items():
            there = {where[row][1] for row in queue.live if where[row][0] == key}
            missing = sorted(set(range(groups)) - there)
            reply = put(queue, key, groups, size)
            assert reply.again == (not missing)
            if missing:
                assert reply.count == len(missing) * size
                where.update({reply.first + at: (key, missing[at // size]) for at in range(reply.count)})

    put_all()
    for _ in range(data.draw(st.integers(1, 5), "losses")):
        lease = queue.send(queue.admin, cmd.LeaseRows(task="plain", count=data.draw(st.integers(1, 6), "made")))
        if isinstance(lease, cmd.Leased):
            queue.complete(queue.admin, lease)
        number = data.draw(st.sampled_from([1, 2]), "home")
        queue.do(queue.admin, cmd.EvictHome(home=number, epoch=queue.homes[number].epoch))
        name = queue.homes[number].name
        queue.do(queue.join(name), cmd.OpenHome(offer=HomeOffer(store="hosts", name=name, identity=name)))
        for letter in queue.do(queue.admin, cmd.GetFailed(count=1000)).groups:
            for row in range(letter.first, letter.first + letter.rows):
                told = letter.place + (row - letter.first) // puts[letter.key][1]
                assert where[row] == (letter.key, told)
        if data.draw(st.booleans(), "put again"):
            put_all()
    put_all()

    live = Counter(where[row] for row in queue.live)
    assert live == {(key, group): size for key, (groups, size) in puts.items() for group in range(groups)}
    queue.check()


def test_a_lost_put_waits_for_room_only_as_large_as_what_it_lacks() -> None:
    queue = Queue(PLAIN, capacity_rows=4)
    put(queue, "a", 4, 1)
    lose(queue, [1])
    assert queue.put(1).count == 1  # another one has its place
    ticket = queue.ask(
        queue.admin,
        cmd.AddRows(groups=4, group_size=1, columns={"prompt": TEXT}, key="a", digest=b"a" * 16, timeout_s=9.0),
    )
    assert ticket not in queue.answers
    queue.at(9.0)
    assert "1 more rows do not fit: the queue has 4 of 4 rows" in str(queue.answers[ticket])


def test_rows_of_a_step_that_was_trained_do_not_come_again() -> None:
    # given rows that are trained, and that another task has still to do
    queue, replica, judge, trainer = running(batch=2)
    queue.do(queue.admin, cmd.Declare(task=TaskSpec(name="log", needs=("reward",))))
    put(queue, "a", 1, 2)
    queue.complete(replica, queue.lease(replica, "rollout"))
    queue.complete(judge, queue.lease(judge, "reward"))
    step = queue.lease(trainer, "train")
    queue.complete(trainer, step)
    # when their payload is lost
    lose(queue, ids(step))
    # then they are named, and not trained twice
    (letter,) = queue.do(queue.admin, cmd.GetFailed()).groups
    assert (letter.key, letter.first, letter.rows) == ("a", 0, 2)
    assert put(queue, "a", 1, 2).again


def test_a_step_that_failed_whole_comes_again_with_its_puts() -> None:
    # given two full steps, of which the later is acknowledged
    queue, replica, judge, trainer = running(batch=4, max_staleness=2)
    for key in "ab":
        put(queue, key, 2, 2)
        queue.complete(replica, queue.lease(replica, "rollout"))
        queue.complete(judge, queue.lease(judge, "reward"))
    queue.lease(trainer, "train")
    queue.complete(trainer, queue.lease(trainer, "train"))
    # when a row of the earlier is lost
    lose(queue, [0])
    # then all of it comes again
    again = put(queue, "a", 2, 2)
    assert (again.count, again.again) == (4, False)
    assert put(queue, "b", 2, 2).again


def test_a_key_whose_rows_came_again_is_forgotten_when_all_of_them_are_through() -> None:
    queue = Queue(PLAIN, LAST, options={"kept_keys": 2})
    put(queue, "k-0", 2, 1)
    lose(queue, [1])
    assert put(queue, "k-0", 2, 1).first == 2
    assert queue.do(queue.admin, cmd.GetPut(prefix="k-")).key == "k-0"
    put(queue, "k-1", 1, 1)
    queue.do(queue.admin, cmd.Cancel(ids=cmd.pack_ids(np.array([0]))))
    for key in ("k-2", "k-3"):
        put(queue, key, 1, 1)
    with pytest.raises(SchemaError, match="key 'k-0' names another put"):
        put(queue, "k-0", 3, 1)  # the row that came again lives
    queue.do(queue.admin, cmd.Cancel(ids=cmd.pack_ids(np.array([2]))))
    for key in ("k-4", "k-5", "k-6"):
        put(queue, key, 1, 1)
    assert not put(queue, "k-0", 3, 1).again
    assert queue.do(queue.admin, cmd.GetPut(prefix="k-")).key == "k-0"


def test_a_digest_that_is_none_is_refused() -> None:
    queue = Queue(PLAIN)
    with pytest.raises(SchemaError, match="the digest of 1 columns is not 15 bytes"):
        queue.do(
            queue.admin, cmd.AddRows(groups=1, group_size=1, columns={"prompt": TEXT}, key="k", digest=bytes(15))
        )
