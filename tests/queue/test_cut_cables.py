"""Cables that are cut for 20 s, longer than all waits for a unit. In `make fuzz`."""

from __future__ import annotations

import os
import time

import pytest
from attacked import FAR, NEAR, Attacked
from waiting import until

from benchmarks.hosts.network import unavailable

CUT_S = 20.0
pytestmark = [
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "hosts can be made"),
    pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE") != "long", reason="takes minutes: make fuzz"),
]


@pytest.mark.parametrize("server_dies", [False, True], ids=["alone", "with the server"])
@pytest.mark.parametrize("side", [NEAR, FAR], ids=["of the columns", "of the reader"])
def test_a_cable_is_cut_for_20_s(attacked: Attacked, side: int, server_dies: bool) -> None:
    near, far = attacked.begin(durability="process")
    near(f"put({list(range(8))})")
    trained = far("score(2)") and far("train(2)")
    # when
    attacked.network.cut(side)
    near.say(f"put({list(range(8, 12))}, key='more', timeout_s=100.0)")
    far.say("score(10)")
    began = time.monotonic()
    until(lambda: attacked.absent(side), "the unit's silence")
    if server_dies:
        attacked.kill_server()
    time.sleep(max(0.0, began + CUT_S - time.monotonic()))
    attacked.network.mend(side)
    # then nothing was lost, and no row an attempt
    assert near.hear() == 4
    assert sorted(far.hear() + trained) == list(range(12))
    assert sorted(trained + far("train(10)")) == list(range(12))
    attacked.ended(consumed=12)
    assert attacked.server("failed()") == {}
    assert attacked.server("events") == []
