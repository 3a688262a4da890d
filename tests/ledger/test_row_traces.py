"""Traced groups: an event for each state of their rows, and the spans made of these."""

from __future__ import annotations

import numpy as np
import pytest
from ledger_queue import Queue, produce, running

from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.types.row_spans import LIFE, RowSpan, RowSpans, is_traced, traced_mask

pytestmark = pytest.mark.fast


def spans_of(queue: Queue) -> list[RowSpan]:
    spans = RowSpans()
    return [span for event in queue.events for span in spans.add(event)]


def named(spans: list[RowSpan], row: int) -> list[tuple[str, int, float, float]]:
    return [(each.name, each.attempt, each.start_s, each.end_s) for each in spans if each.row == row]


def test_a_row_is_followed_from_its_put_to_its_step_over_a_lost_lease() -> None:
    queue, replica, judge, trainer = running(batch=2, max_staleness=1)
    queue.trace(1.0)
    queue.at(1.0)
    queue.put(1, 2)
    queue.at(2.0)
    lost = queue.lease(replica, "rollout")
    queue.at(3.0)
    queue.do(replica, cmd.GiveBack(token=lost.token, blame=True))
    queue.at(4.0)
    lease = queue.lease(replica, "rollout")
    queue.at(5.0)
    queue.complete(replica, lease)
    queue.at(6.0)
    judged = queue.lease(judge, "reward")
    queue.at(7.0)
    queue.complete(judge, judged)
    queue.at(8.0)
    step = queue.lease(trainer, "train")
    queue.at(9.0)
    queue.complete(trainer, step)

    spans = spans_of(queue)

    for row in (0, 1):
        assert named(spans, row) == [
            ("wait rollout", 1, 1.0, 2.0), ("rollout", 1, 2.0, 3.0), ("wait rollout", 2, 3.0, 4.0),
            ("rollout", 2, 4.0, 5.0), ("wait reward", 1, 5.0, 6.0), ("reward", 1, 6.0, 7.0), ("wait train", 1, 7.0, 8.0),
            ("train", 1, 8.0, 9.0),
            (LIFE, 0, 1.0, 9.0),
        ]  # fmt: skip
    lost_one, again = (each for each in spans if each.row == 0 and each.name == "rollout")
    assert lost_one.reason
    assert (again.worker, again.version, again.reason) == ("gen-0", 0, "")
    (trained,) = (each for each in spans if each.row == 0 and each.name == "train")
    assert (trained.worker, trained.step, trained.staleness, trained.version) == ("train-0", 0, 0, 0)
    (life,) = (each for each in spans if each.row == 0 and each.name == LIFE)
    assert (life.state, life.step, life.group) == ("consumed", 0, 0)
    assert "attempt" not in life.attributes


def test_a_late_row_has_its_staleness_and_one_that_ends_early_its_reason() -> None:
    queue, replica, judge, trainer = running(batch=2, max_staleness=1)
    queue.trace(1.0)
    queue.put(6, 1)
    produce(queue, replica, judge, 4)
    queue.complete(trainer, queue.lease(trainer, "train"))
    queue.publish(1)
    queue.complete(trainer, queue.lease(trainer, "train"))
    queue.lease(replica, "rollout")
    queue.do(queue.admin, cmd.Cancel(ids=np.array([4, 5], "<i8").tobytes(), reason="not wanted"))

    spans = spans_of(queue)

    assert [each.staleness for each in spans if each.name == "train"] == [0, 0, 1, 1]
    ends = {each.row: (each.state, each.reason) for each in spans if each.name == LIFE}
    assert ends == {**dict.fromkeys(range(4), ("consumed", "")), **dict.fromkeys((4, 5), ("cancelled", "not wanted"))}
    assert all(each.end_s >= each.start_s for each in spans)


def test_groups_are_sampled_whole_by_their_ids_and_a_larger_share_has_them_too() -> None:
    groups = np.arange(0, 80_000, 8)
    few, more = traced_mask(groups, 0.01), traced_mask(groups, 0.3)

    assert few[0]
    assert few.sum() == pytest.approx(100, abs=5)
    assert more.sum() == pytest.approx(3000, abs=30)
    assert not (few & ~more).any()
    assert traced_mask(groups, 1.0).all()
    assert [is_traced(group, 0.3) for group in groups.tolist()] == more.tolist()

    queue, _, _, _ = running(batch=8)
    queue.trace(0.3)
    queue.put(10, 4)
    put = [event for event in queue.events if isinstance(event, ev.RowsTraced) and event.state == "put"]
    assert [event.group for event in put] == [group for group in range(0, 40, 4) if is_traced(group, 0.3)]
    assert all(event.rows == list(range(event.group, event.group + 4)) for event in put)


def test_without_a_share_nothing_is_traced() -> None:
    queue, replica, judge, _ = running(batch=2)
    queue.put(2, 1)
    produce(queue, replica, judge, 2)

    assert not [event for event in queue.events if isinstance(event, ev.RowsTraced)]
