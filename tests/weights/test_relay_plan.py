"""RelayPlan: which host fetches from which."""

import random
from collections import Counter

import pytest

from asyncflow_sdk.weights.transports.relay_plan import FORGIVE_AFTER, Assignment, RelayPlan

pytestmark = pytest.mark.fast


def relay(host: int | str) -> bytes:
    return f"relay of {host}".encode()


def join(plan: RelayPlan, version: int, host: int, failed: bytes = b"") -> bytes:
    """The source of a host whose relay asks."""
    source, shared = plan.join(version, str(host), relay(host), failed)
    assert not shared
    return source


@pytest.mark.parametrize(
    ("fanout", "parents"),
    [(1, ["", 0, 1, 2, 3, 4, 5, 6]), (2, ["", "", 0, 0, 1, 1, 2, 2]), (3, ["", "", "", 0, 0, 0, 1, 1])],
)
def test_hosts_form_a_tree_in_the_order_in_which_they_ask(fanout: int, parents: list[int | str]) -> None:
    plan = RelayPlan(fanout)
    for version in (1, 2):
        assert [join(plan, version, host) for host in range(8)] == [b"" if p == "" else relay(p) for p in parents]


def test_other_replicas_of_a_host_share_what_its_relay_fetches() -> None:
    plan = RelayPlan(2)
    assert join(plan, 1, 0) == b""
    assert plan.join(1, "0", b"another") == Assignment(relay(0), True)
    # and still do for the next version, whoever asks first
    assert plan.join(2, "0", b"another") == Assignment(relay(0), True)
    # until one reports that the relay failed, or it has left
    assert plan.join(2, "0", b"another", failed=relay(0)) == Assignment(b"", False)
    assert plan.join(2, "0", relay(0)) == Assignment(b"another", True)
    plan.leave(b"another")
    assert plan.join(3, "0", relay(0)) == Assignment(b"", False)


def test_a_host_that_failed_is_left_out_and_forgiven_after_a_while() -> None:
    # given a chain
    plan = RelayPlan(1)
    assert [join(plan, 1, host) for host in range(5)] == [b"", *map(relay, range(4))]
    # when the host behind host 2 reports it
    grandparent = join(plan, 1, 3, failed=relay(2))
    # then it fetches from the host above, and host 2 feeds nobody, in later versions neither
    assert grandparent == relay(1)
    assert [join(plan, 2, host) for host in (2, 0, 1, 3)] == [b"", b"", relay(0), relay(1)]
    assert [join(plan, 1 + FORGIVE_AFTER, host) for host in (2, 0)] == [b"", relay(2)]


def test_a_report_about_a_host_that_was_not_the_source_changes_nothing() -> None:
    plan = RelayPlan(1)
    assert [join(plan, 1, host) for host in range(3)] == [b"", relay(0), relay(1)]
    assert join(plan, 1, 2, failed=relay(0)) == relay(1)
    assert join(plan, 1, 3) == relay(2)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_fails_every_host_is_below_the_publisher(seed: int) -> None:
    numbers = random.Random(seed)
    fanout = numbers.choice((1, 2, 3))
    plan, parents = RelayPlan(fanout), dict[int, bytes]()
    for _ in range(200):
        # when hosts join, report their source, leave and come back
        host = numbers.randrange(12)
        if numbers.random() < 0.1:
            plan.leave(relay(host))
            parents.pop(host, None)
            continue
        failed = parents.get(host, b"") if numbers.random() < 0.3 else b""
        parents[host] = join(plan, 1, host, failed)
        # then nobody fetches from itself, from a host below it, or from what it reported just now
        at, seen = relay(host), list[bytes]()
        while at:
            assert at not in seen, f"{seen} go round in a circle"
            seen.append(at)
            at = next((parents[each] for each in parents if relay(each) == at), b"")
        assert parents[host] != failed or not failed
        # and without failures no host feeds more than ``fanout``
    fresh = RelayPlan(fanout)
    assert max(Counter(join(fresh, 1, each) for each in range(50)).values()) == fanout
