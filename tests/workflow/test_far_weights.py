"""Workers and weights for clients that do not see the run's memory, and trainers that come after one another."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import functions
import pytest
from echo_runs import PROMPTS, declare_rollout

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.testing import EchoRollout
from asyncflow_sdk.types.events import Note, Published

pytestmark = pytest.mark.fast


def begin(run: af.Run, **train: Any) -> None:
    """Everything of a run but its replicas."""
    run.queue.declare("train", needs=af.TRAIN_COLUMNS, batch_rows=16, lease_s=86400.0)
    declare_rollout(run)
    run.start(af.Stage(functions.length, task="reward", gives=["reward"], launcher="thread"))
    run.start(af.Train("echo", launcher="thread", **train))
    run.feed(PROMPTS, group_size=4, column="prompt_ids", chunk=4)


def produce(far: af.Run, failures: list[BaseException]) -> threading.Thread:
    """A replica in a thread of this process."""

    def work() -> None:
        try:
            asyncio.run(af.EngineProducer(far.queue, EchoRollout(delay_s=0.002), needs_first=True).run())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_weights_reach_a_replica_without_shared_memory_over_tcp(tmp_path: Path) -> None:
    events: list[Any] = []
    with af.serve(tmp_path, steps=6, on_event=events.append) as run:
        with af.connect(run.address, name="far", shared_memory=False) as far:
            begin(run, weights=af.Weights(transport="tcp"))
            failures: list[BaseException] = []
            produce(far, failures).join(60)
            assert not failures
            run.join_workers(100)
            assert run.audit().consumed == 6 * 16
    staged = [e for e in events if getattr(e, "state", "") == "staged"]
    assert {e.worker for e in staged} == {"far"}
    assert all(e.encoding in ("full", "delta") and e.moved for e in staged)


def test_shared_memory_is_refused_there_with_what_to_use_instead(tmp_path: Path) -> None:
    with af.serve(tmp_path, steps=6) as run, af.connect(run.address, name="far", shared_memory=False) as far:
        begin(run)
        failures: list[BaseException] = []
        produce(far, failures).join(60)
        assert isinstance(failures[0], ConfigError)
        assert "tcp" in str(failures[0])


def test_a_trainer_that_comes_after_another_goes_on_from_what_is_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where workers of a client log
    events: list[Any] = []
    with af.serve(tmp_path / "run", steps=8, on_event=events.append) as run:
        # given a trainer that died after some steps, which did not end the run
        with af.connect(run.address, name="first") as first:
            begin(first, fail_at=3)
            failures: list[BaseException] = []
            thread = produce(af.connect(run.address, name="replica"), failures)
            (trainer,) = [worker for worker in first.workers if worker.name.startswith("train")]
            assert trainer.ended.wait(60)
            current = run.queue.status().version
            assert current == 3
            # when
            first.start(af.Train("echo", launcher="thread"))
            thread.join(60)
            # then
            assert not failures
            first.join_workers(100)
            assert run.audit().consumed == 8 * 16
    assert [e.version for e in events if isinstance(e, Published)] == list(range(9))
    assert any("version 3 is current already" in e.text for e in events if isinstance(e, Note))


def test_a_second_publisher_is_refused(tmp_path: Path) -> None:
    with af.serve(tmp_path) as run, run.weight_publisher():
        with af.connect(run.address, name="other") as other:
            with pytest.raises(ConfigError, match="one publisher at a time"):
                other.weight_publisher()


def test_workers_started_near_and_from_afar_work_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a run served with keys, and a client that sees none of its memory
    monkeypatch.chdir(tmp_path)  # where the far client's workers log
    with af.serve(tmp_path / "run", address="tcp://0.0.0.0:0") as run:
        address = run.address.replace("0.0.0.0", "127.0.0.1")
        with af.connect(address, key=tmp_path / "run" / "run.key", shared_memory=False) as far:
            far.queue.put({"response_ids": [[1, 2], [3], [4, 5, 6]]})
            # when: those started by the server need no key, those started from afar have one
            far.start(af.Stage(functions.length, task="reward", launcher="thread"))
            run.start(af.Stage(functions.doubled, task="double", gives=["twice"], launcher="thread"))
            # then
            run.queue.declare("end", needs=["reward", "twice"])
            seen = {}
            while len(seen) < 3:
                with far.queue.get("end", 3, timeout_s=60) as batch:
                    seen.update(zip(batch.ids.tolist(), batch.array("twice").tolist(), strict=True))
                    batch.ack()
            assert seen == {0: 4.0, 1: 2.0, 2: 6.0}
