"""Weights for replicas that do not see the run's memory, and trainers that come after one another."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import functions
import pytest

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.testing import EchoRollout
from asyncflow_sdk.testing.echo import weights
from asyncflow_sdk.types.events import Note, Published

PROMPTS = {"prompt_ids": af.Ragged.of([[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]])}


def begin(run: af.Run, **train: Any) -> None:
    """Everything of a run but its replicas."""
    run.queue.declare("train", needs=af.interfaces.TRAIN_COLUMNS, batch_rows=16, lease_s=86400.0)  # type: ignore[attr-defined]
    run.queue.declare(
        "rollout", needs=["prompt_ids"], gives=["response_ids", "logprobs", "version_spans"], admits=True
    )
    run.start(af.Stage(functions.length, task="reward", gives=["reward"]))
    run.start(af.Train("echo", **train))
    run.feed(PROMPTS, group_size=4, column="prompt_ids", chunk=4)


def produce(far: af.Run, failures: list[BaseException]) -> threading.Thread:
    """A replica in a thread of this process."""

    def work() -> None:
        try:
            asyncio.run(af.Producer(far.queue, EchoRollout(delay_s=0.002), needs_first=True).run())
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
            run.join_workers(30)
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


def test_a_replica_that_comes_late_has_the_newest_version_before_its_first_prompt(tmp_path: Path) -> None:
    """Its own weights count as version 0; by now that is one nobody generates with any more."""
    engine = EchoRollout()
    with af.serve(tmp_path, max_staleness=100) as run, run.weight_publisher() as publisher:
        run.queue.declare("train", needs=["response_ids"], batch_rows=4)
        run.queue.declare(
            "rollout", needs=["prompt_ids"], gives=["response_ids", "logprobs", "version_spans"], admits=True
        )
        for version in range(4):
            publisher.publish(version, weights(version).items())
        publisher.flush()
        run.queue.put(PROMPTS, group_size=1)
        run.queue.end()
        with af.connect(run.address, name="late") as late:
            asyncio.run(af.Producer(late.queue, engine).run())
        with run.queue.get("train") as batch:
            assert set(batch.ragged("response_ids").lengths) == {1, 2, 3, 4}
            batch.ack()
    assert engine._held == 3.0


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
            first.start(af.Train("echo"))
            thread.join(60)
            # then
            assert not failures
            first.join_workers(30)
            assert run.audit().consumed == 8 * 16
    assert [e.version for e in events if isinstance(e, Published)] == list(range(9))
    assert any("version 3 is current already" in e.text for e in events if isinstance(e, Note))


def test_a_second_publisher_is_refused(tmp_path: Path) -> None:
    with af.serve(tmp_path) as run, run.weight_publisher():
        with af.connect(run.address, name="other") as other:
            with pytest.raises(ConfigError, match="one publisher at a time"):
                other.weight_publisher()
