"""A client whose host is gone, which nobody sees end: its roles are others' when somebody says so."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, ProtocolError
from asyncflow_sdk.workflow import Run

pytestmark = pytest.mark.fast


@contextlib.contextmanager
def far(run: Run, name: str) -> Iterator[Run]:
    """A client that the server does not watch, as one of another host."""
    with contextlib.suppress(ProtocolError):
        with af.connect(run.address, name=name) as client:
            yield client


def test_another_publishes_in_the_place_of_a_trainer_whose_host_is_gone(tmp_path: Path) -> None:
    with af.serve(tmp_path) as run, far(run, "trainer") as lost:
        # given
        gone = lost.weight_publisher("tcp")
        gone.publish(0, {"w": np.zeros(4)}).wait(30)
        with pytest.raises(ConfigError, match=rf"its host is gone, call run.evict\({lost.session}\)"):
            run.weight_publisher("tcp")
        # when
        run.evict(lost.session)
        # then
        with run.weight_publisher("tcp") as publisher:
            publisher.publish(1, {"w": np.ones(4)})
        assert run.queue.status().version == 1
        with pytest.raises(ProtocolError, match="send hello first"):
            gone.publish(2, {"w": np.zeros(4)})
        gone.close()


def test_another_replica_loads_in_the_place_of_one_whose_host_is_gone(tmp_path: Path) -> None:
    with af.serve(tmp_path, max_swapping=1) as run, run.weight_publisher("tcp") as publisher:
        with far(run, "lost") as lost, far(run, "waits") as other:
            # given a replica that may load a version and never says that it has, and one that waits for it
            publisher.publish(0, {"w": np.zeros(4)})
            assert next(iter(lost.weight_updates(timeout_s=30))).version == 0
            update = in_thread(lambda: next(iter(other.weight_updates(timeout_s=30))))
            until(lambda: "lost for" in run.queue.status().waiting.get("waits", ""), "the one that waits")
            # when
            run.evict(lost.session)
            # then
            with update() as loaded:
                assert [array.sum() for _, array in loaded.arrays()] == [0.0]


def test_who_is_not_there_is_not_evicted(tmp_path: Path) -> None:
    with af.serve(tmp_path) as run:
        with pytest.raises(ConfigError, match=r"there is no session 77; there are: 1 \(driver\)"):
            run.evict(77)
        with pytest.raises(ConfigError, match="own"):
            run.evict(run.session)
