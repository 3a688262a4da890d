"""A trainer of several ranks: each publishes its part, and a version is there when all parts are."""

import re
import threading

import numpy as np
import pytest
from children import Child
from publisher_runs import LIMIT_S, Served, broken, publish_a_half, value_of
from waiting import until

from asyncflow_sdk.errors import WeightError
from asyncflow_sdk.types import Shard
from asyncflow_sdk.types.events import Note
from asyncflow_sdk.weights import WeightPublisher


def test_ranks_publish_one_version_together(served: Served) -> None:
    with Child(publish_a_half, served.address, 0) as zero, Child(publish_a_half, served.address, 1) as one:
        assert [zero.hear(), one.hear()] == ["ready", "ready"]
        for version in (1, 2, 3):
            zero.say(version)
            assert zero.hear() == "published"
            one.say(version)
            assert one.hear() == "published"
            update = served.newest()
            assert (update.version, value_of(update), update.tensors["w"].shape) == (version, version, (10,))
        # when one of them is killed in the middle
        zero.say(4)
        assert zero.hear() == "published"  # its part
        one.say(-4)
        assert one.hear() == "in the middle"
        one.kill()
        # then nothing became current, and the other learns who is to blame
        zero.say(4)
        assert value_of(served.newest()) == 3.0
        with Child(publish_a_half, served.address, 1) as next_one:
            assert next_one.hear() == "ready"
            next_one.say(4)
            assert [zero.hear(), next_one.hear()] == ["published", "published"]
            assert value_of(served.newest()) == 4.0
            # and the one that is killed before the other has finished its part
            zero.say(-5)
            next_one.say(-5)
            assert [zero.hear(), next_one.hear()] == ["in the middle", "in the middle"]
            next_one.kill()
            until(lambda: 1 not in served.server.ledger.publisher, "the end of rank 1 is noticed")
            zero.say("go on")
            assert re.match(r"VersionGone: version 5 .*rank 1 \(rank1\) died", zero.hear())
            assert value_of(served.newest()) == 4.0
        zero.say(None)
        assert zero.hear() == "closed"


def test_a_rank_may_own_nothing(served: Served) -> None:
    ranks = [WeightPublisher(served.client(f"rank{rank}"), rank=rank, world_size=2) for rank in range(2)]
    threads = [
        threading.Thread(target=lambda r=r, w=w: ranks[r].publish(1, w).wait(LIMIT_S))  # type: ignore[misc]
        for r, w in enumerate(([("w", Shard(np.ones(3), (0,), (3,)))], []))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert value_of(served.newest()) == 1.0
    for each in ranks:
        each.close()


def test_a_part_of_a_version_that_another_rank_withdrew_is_said_to_be_lost(served: Served) -> None:
    # given rank 1, whose part is there, and rank 0 that fails in the middle of its own
    ranks = [
        WeightPublisher(served.client(f"rank{rank}"), rank=rank, world_size=2, timeout_s=LIMIT_S) for rank in (0, 1)
    ]
    before = [rank.publish(1, [(name, np.ones(3))]) for rank, name in zip(ranks, "wx", strict=True)]
    for each in before:
        each.wait(LIMIT_S)
    lost = ranks[1].publish(2, [("x", np.full(3, 2.0))])
    lost.wait(LIMIT_S)
    with pytest.raises(RuntimeError, match="the engine broke"):
        ranks[0].publish(2, broken())
    # when it hears of it: with the next version, which comes under the same number
    again = [rank.publish(2, [(name, np.full(3, 2.5))]) for rank, name in zip(reversed(ranks), "xw", strict=True)]
    # then
    for _ in range(2):
        with pytest.raises(WeightError, match="^version 2 was withdrawn by rank0: RuntimeError: the engine broke$"):
            lost.wait(LIMIT_S)
    for each in (*before, *again):
        each.wait(LIMIT_S)
    assert value_of(served.newest()) == 2.5
    ranks[0].publish(3, [("w", np.ones(3))]).wait(LIMIT_S)  # and whose version came to be hears nothing
    again[1].wait(LIMIT_S)
    for rank in ranks:
        rank.close()


def test_ranks_go_on_after_one_of_them_failed_alone(served: Served) -> None:
    # given rank 0 that fails before rank 1 begins, and rank 1 that publishes its part nevertheless
    ranks = [
        WeightPublisher(served.client(f"rank{rank}"), rank=rank, world_size=2, timeout_s=LIMIT_S) for rank in (0, 1)
    ]
    with pytest.raises(RuntimeError, match="the engine broke"):
        ranks[0].publish(1, broken())
    alone = ranks[1].publish(1, [("x", np.full(3, 1.0))])
    alone.wait(LIMIT_S)
    # when
    parts = [
        rank.publish(2, [(name, np.full(3, 2.0))]) for rank, name in zip(ranks, "wx", strict=True)
    ]  # one after the other: neither waits for version 1
    # then version 2 is there from both, and rank 1 and the run were told why version 1 is not
    for part in parts:
        part.wait(LIMIT_S)
    for _ in range(2):
        with pytest.raises(WeightError, match=r"^version 1 was withdrawn: rank 0 \(rank0\) announced 2 .*broke"):
            alone.wait(LIMIT_S)
    assert value_of(served.newest()) == 2.0
    for each in ranks:
        each.close()
    notes = [event.text for event in served.events if isinstance(event, Note)]
    assert notes == [
        "version 1 was withdrawn by rank0: RuntimeError: the engine broke",
        notes[0].join(["version 1 was withdrawn: rank 0 (rank0) announced 2 in its place; ", ""]),
    ]
