"""A trainer of several ranks: each publishes its part, and a version is there when all parts are."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from children import Child, hear, say
from replicas import LIMIT_S, Served, value_of
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import WeightError
from asyncflow_sdk.types import Shard


def half(version: int, rank: int) -> tuple[str, Shard]:
    """This rank's half of a tensor of 10."""
    return "w", Shard(np.full(5, version, np.float32), (5 * rank,), (10,))


def publish_halves(address: str) -> None:
    """As rank 1, publish a half for each number that is read; of a negative one, say so in the middle of it and wait."""
    with af.connect(address, name="rank1") as run:
        publisher = run.weight_publisher(rank=1, world_size=2, timeout_s=LIMIT_S)
        say("ready")
        while True:
            version = hear()

            def weights(version: int = version) -> Iterator[tuple[str, Any]]:
                yield half(abs(version), 1)
                if version < 0:
                    say("in the middle")
                    hear()

            publisher.publish(abs(version), weights()).wait(LIMIT_S)
            say("published")


def ranks(served: Served) -> list[Any]:
    return [served.trainer(f"rank{rank}", rank=rank, world_size=2, timeout_s=LIMIT_S) for rank in (0, 1)]


def broken() -> Iterator[tuple[str, Any]]:
    """Weights of an engine that fails while they are asked for."""
    yield "w", np.zeros(10)
    raise RuntimeError("the engine broke")


def test_ranks_publish_one_version_together_and_one_is_killed(served: Served) -> None:
    zero = served.trainer("rank0", rank=0, world_size=2, timeout_s=LIMIT_S)
    with Child(publish_halves, served.address) as one:
        assert one.hear() == "ready"
        zero.publish(1, [half(1, 0)]).wait(LIMIT_S)
        one.say(1)
        assert one.hear() == "published"
        with served.newest() as update:
            assert (update.version, value_of(update), update.tensors["w"].shape) == (1, 1.0, (10,))
        # when rank 1 is killed in the middle of the next, of which the other part is there
        zero.publish(2, [half(2, 0)]).wait(LIMIT_S)
        one.say(-2)
        assert one.hear() == "in the middle"
        one.kill()
    # then nothing became current, and the next rank 1 goes on
    assert served.current() == (1, 1.0)
    with Child(publish_halves, served.address) as next_one:
        assert next_one.hear() == "ready"
        again = in_thread(lambda: zero.publish(2, [half(2, 0)]).wait(LIMIT_S))
        next_one.say(2)
        assert next_one.hear() == "published"
        assert again().version == 2
        assert served.current() == (2, 2.0)

        # and when it is killed before the other has finished its part, the error names it
        def weights() -> Iterator[tuple[str, Any]]:
            yield half(3, 0)
            next_one.say(-3)
            assert next_one.hear() == "in the middle"
            next_one.kill()
            until(lambda: all(s.name != "rank1" for s in served.run.queue.status().sessions), "the end of rank 1")

        with pytest.raises(af.AsyncFlowError, match=r"version 3 .*rank 1 \(rank1\) died"):
            zero.publish(3, weights()).wait(LIMIT_S)
    assert served.current() == (2, 2.0)


def test_a_rank_may_own_nothing(served: Served) -> None:
    parts = ([("w", Shard(np.ones(3), (0,), (3,)))], [])
    publishing = [
        in_thread(lambda r=r, w=w: r.publish(1, w).wait(LIMIT_S)) for r, w in zip(ranks(served), parts, strict=True)
    ]
    assert [each().version for each in publishing] == [1, 1]
    assert served.current() == (1, 1.0)


def test_a_part_of_a_version_that_another_rank_withdrew_is_lost(served: Served) -> None:
    # given rank 1, whose part is there, and rank 0 that fails in the middle of its own
    both = ranks(served)
    before = [rank.publish(1, [(name, np.ones(3))]) for rank, name in zip(both, "wx", strict=True)]
    for each in before:
        each.wait(LIMIT_S)
    lost = both[1].publish(2, [("x", np.full(3, 2.0))])
    lost.wait(LIMIT_S)
    with pytest.raises(RuntimeError, match="the engine broke"):
        both[0].publish(2, broken())
    # when it publishes the next version, which comes under the same number
    again = [rank.publish(2, [(name, np.full(3, 2.5))]) for rank, name in zip(reversed(both), "xw", strict=True)]
    # then
    for _ in range(2):
        with pytest.raises(WeightError, match="^version 2 was withdrawn by rank0: RuntimeError: the engine broke$"):
            lost.wait(LIMIT_S)
    for each in (*before, *again):
        each.wait(LIMIT_S)
    assert served.current() == (2, 2.5)
    both[0].publish(3, [("w", np.ones(3))]).wait(LIMIT_S)  # and a version that came to be raises nothing
    again[1].wait(LIMIT_S)


def test_ranks_go_on_after_one_of_them_failed_alone(served: Served) -> None:
    # given rank 0 that fails before rank 1 begins, and rank 1 that publishes its part nevertheless
    both = ranks(served)
    with pytest.raises(RuntimeError, match="the engine broke"):
        both[0].publish(1, broken())
    alone = both[1].publish(1, [("x", np.full(3, 1.0))])
    alone.wait(LIMIT_S)
    # when both publish the next, one after the other: neither waits for version 1
    parts = [rank.publish(2, [(name, np.full(3, 2.0))]) for rank, name in zip(both, "wx", strict=True)]
    # then version 2 is there from both, and rank 1 and the run were told why version 1 is not
    for part in parts:
        part.wait(LIMIT_S)
    for _ in range(2):
        with pytest.raises(WeightError, match=r"^version 1 was withdrawn: rank 0 \(rank0\) announced 2 .*broke"):
            alone.wait(LIMIT_S)
    assert served.current() == (2, 2.0)
    first = "version 1 was withdrawn by rank0: RuntimeError: the engine broke"
    assert served.notes() == [first, f"version 1 was withdrawn: rank 0 (rank0) announced 2 in its place; {first}"]
