"""Trainers after a rollback: they load the restored weights before the next step, and what they train from then on descends from it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_runs import echo_workflow, trained_rows
from gates import Gates
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, WorkerFailed
from asyncflow_sdk.interfaces import RollbackResult, StepResult
from asyncflow_sdk.testing import EchoTrain
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.types import one_version

ROWS, STEPS = 4, 5
LIMIT_S = 100.0


class Served:
    """A run with the rows of all steps, its events, and trainers in threads of this process."""

    def __init__(self, directory: Path) -> None:
        self.events: list[ev.Event] = []
        self.directory = directory
        self.run = af.serve(steps=STEPS, keep_versions=8, checkpoints=True, on_event=self.events.append)
        self.run.queue.declare("train", needs=["version_spans"], batch_rows=ROWS)
        for _ in range(STEPS):
            self.run.queue.put({"version_spans": one_version(0, np.full(ROWS, 3))})

    def train(self, engine: EchoTrain, *, every: int = 0) -> None:
        """``every``: steps between checkpoints; 0 for none."""
        engines.append(engine)
        kept = {"checkpoint": af.Checkpoint(every=every, keep=9), "checkpoints": str(self.directory)} if every else {}
        with af.connect(self.run.address, name="client") as client:
            (worker,) = client.start(
                af.Train("test_rolling_back:engine_of_the_test", launcher="thread", needs=["version_spans"]), **kept
            )
            client.wait(worker, timeout_s=60)
        self.run.queue.flush()

    def roll_back(self, version: int) -> RollbackResult:
        """When the newest published version is current."""
        return self.run.rollback(version, "the reward fell")

    def current(self, version: int) -> None:
        until(lambda: self.run.queue.status().version == version, f"version {version} is current")

    def told(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "checkpoints")
    with served.run:
        yield served


engines: list[EchoTrain] = []


def engine_of_the_test(model: str = "", *, algorithm: Any = None) -> EchoTrain:
    """The engine that a trainer's thread is to use: the one that a test has made."""
    return engines.pop()


class Logged(EchoTrain):
    """Its training is written down: the steps its weights had had before each, and when they were published. ``meanwhile``: called before the step of that
    number is over, counted as they are trained."""

    def __init__(self, meanwhile: dict[int, Callable[[], Any]]) -> None:
        super().__init__()
        self.meanwhile, self.trained, self.published = meanwhile, list[int](), list[int]()
        self.answers, self.loads = list[Any](), list[str]()

    def train_step(self, batch: af.Batch) -> StepResult:
        self.trained.append(self.steps)
        self.steps += 1
        if (happens := self.meanwhile.pop(len(self.trained) - 1, None)) is not None:
            self.answers.append(happens())
        return StepResult({})

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        self.published.append(self.steps)  # only what is announced is read
        yield from super().named_weights()

    def load(self, path: Path) -> None:
        self.loads.append("checkpoint")
        super().load(path)

    def load_weights(self, update: af.WeightUpdate) -> None:
        self.loads.append("weights")
        super().load_weights(update)


def test_a_step_in_progress_is_trained_again_from_the_restored_weights(served: Served) -> None:
    def meanwhile() -> RollbackResult:
        served.current(2)
        return served.roll_back(1)

    engine = Logged({2: meanwhile})  # step 2, the third, trains version 2
    served.train(engine)

    assert engine.trained == [0, 1, 2, 1, 2, 3]  # step 2 twice, the second time from version 1's weights
    (answer,) = engine.answers
    assert (answer.version, answer.optimizer, answer.expired) == (3, "fresh", 0)
    (restored,) = served.told(ev.Restored)
    assert (restored.version, restored.source, restored.optimizer, restored.worker.startswith("train-")) == (
        3,
        1,
        "fresh",
        True,
    )
    assert engine.loads == ["weights"]
    assert [(e.step, e.version) for e in served.told(ev.StepTrained)] == [(0, 0), (1, 1), (2, 3), (3, 4), (4, 5)]
    assert [e.version for e in served.told(ev.Published)] == [0, 1, 2, 3, 4, 5, 6]
    assert (served.run.queue.status().version, engine.published[-1]) == (
        6,
        4,
    )  # version 3 has had one step, and three followed
    audit = served.run.audit()
    assert (audit.balanced, audit.put, audit.live + audit.consumed) == (True, ROWS * STEPS, ROWS * STEPS)


def test_a_version_on_its_way_is_withdrawn_and_the_steps_after_it_descend_from_the_restored_one(
    served: Served,
) -> None:
    """The rollback comes between two steps, in a checkpoint: the weights given up get into none."""

    class Saving(Logged):
        def save(self, path: Path) -> None:
            if not self.answers:
                served.current(2)
                self.answers.append(served.roll_back(0))
            super().save(path)

    engine = Saving({})
    served.train(engine, every=2)  # after steps 1 and 3, and the last

    assert engine.trained == [0, 1, 0, 1, 2]
    assert (served.run.queue.status().version, engine.published[-1]) == (6, 3)
    saved = {}
    for manifest in served.directory.glob("step-*/manifest.json"):
        of = json.loads(manifest.read_text())
        saved[of["step"]] = of["version"], json.loads((manifest.parent / "engine/echo.json").read_text())["steps"]
    # a checkpoint's version is that of its weights: 2 has had two steps; 5 and 6 follow version 3, which has had none
    assert saved == {2: (2, 2), 4: (5, 2), 5: (6, 3)}


def test_the_optimizer_of_the_versions_checkpoint_is_loaded(served: Served) -> None:
    def meanwhile() -> RollbackResult:
        served.current(3)
        return served.roll_back(2)

    engine = Logged({3: meanwhile})
    served.train(engine, every=2)

    (answer,) = engine.answers
    assert (answer.version, answer.checkpoint, answer.optimizer) == (4, 2, "checkpoint of step 2")
    assert engine.loads == ["checkpoint"]
    assert served.told(ev.Restored)[0].optimizer == "checkpoint of step 2"
    assert engine.trained == [0, 1, 2, 3, 2, 3]
    assert (served.run.queue.status().version, engine.published[-1]) == (6, 4)


def test_a_checkpoint_that_is_damaged_is_not_loaded_and_the_event_says_so(served: Served) -> None:
    def meanwhile() -> RollbackResult:
        served.current(3)
        (served.directory / "step-000002/engine/echo.json").write_text("{}")
        return served.roll_back(2)

    engine = Logged({3: meanwhile})
    served.train(engine, every=2)

    assert engine.loads == ["weights"]
    assert served.told(ev.Restored)[0].optimizer == "fresh"
    assert any("checkpoint of step 2 cannot be loaded" in e.text for e in served.told(ev.Note))
    assert (served.run.queue.status().version, engine.published[-1]) == (6, 4)


def test_of_two_rollbacks_the_second_is_loaded(served: Served) -> None:
    def meanwhile() -> RollbackResult:
        served.current(2)
        served.roll_back(1)
        return served.roll_back(0)

    engine = Logged({2: meanwhile})
    served.train(engine)

    assert engine.trained == [0, 1, 2, 0, 1, 2]
    assert [(e.version, e.source) for e in served.told(ev.Restored)] == [(4, 0)]
    assert (served.run.queue.status().version, engine.published[-1]) == (7, 3)


def test_a_rollback_while_another_is_loaded_is_loaded_next(served: Served) -> None:
    class Slow(Logged):
        def load_weights(self, update: af.WeightUpdate) -> None:
            super().load_weights(update)
            if len(self.loads) == 1:
                served.roll_back(0)

    def meanwhile() -> RollbackResult:
        served.current(2)
        return served.roll_back(1)

    engine = Slow({2: meanwhile})
    served.train(engine)

    assert engine.loads == ["weights", "weights"]
    assert engine.trained == [0, 1, 2, 0, 1, 2]
    assert [(e.version, e.source) for e in served.told(ev.Restored)] == [(4, 0)]


def test_a_trainer_that_cannot_load_weights_refuses_rollbacks(served: Served) -> None:
    class Cannot(Logged):
        restores = False

    def meanwhile() -> str:
        served.current(2)
        with pytest.raises(ConfigError) as refused:
            served.roll_back(1)
        return str(refused.value)

    engine = Cannot({2: meanwhile})
    served.train(engine)

    assert "1 cannot be rolled back to: the trainer's engine, Cannot, has no load_weights" in engine.answers[0]
    assert engine.trained == [0, 1, 2, 3, 4]
    assert served.run.queue.status().version == STEPS


def test_another_trainer_restores_what_its_predecessor_did_not(served: Served) -> None:
    """One without checkpoints, that died between the rollback and its next step."""

    class Dies(Logged):
        def load_weights(self, update: af.WeightUpdate) -> None:
            raise RuntimeError("told to die")

    def meanwhile() -> RollbackResult:
        served.current(2)
        return served.roll_back(1)

    with pytest.raises(WorkerFailed, match="train-.* ended with status 1") as died:
        served.train(Dies({2: meanwhile}))
    assert "told to die" in died.value.detail
    engine = Logged({})
    served.train(engine)

    assert engine.trained == [1, 2, 3]
    assert [(e.version, e.source) for e in served.told(ev.Restored)] == [(3, 1)]
    assert (served.run.queue.status().version, engine.published[-1]) == (6, 4)


@pytest.mark.parametrize("transport", ["shm", "tcp", "file"])
def test_a_loop_of_ones_own_publishes_when_it_says_that_it_has_restored(
    transport: str, served: Served, tmp_path: Path
) -> None:
    run, engine = served.run, EchoTrain()
    options = {"path": tmp_path / "versions"} if transport == "file" else {}
    with run.weight_publisher(transport, **options) as publisher:
        publisher.publish(0, engine.named_weights())
        first = run.queue.get("train")
        engine.steps += 1
        publisher.publish(first.version + 1, engine.named_weights()).wait(LIMIT_S)
        first.ack()
        before = run.queue.get("train")
        assert run.restoration() is None
        answer = run.rollback(0)
        assert (answer.version, answer.optimizer) == (2, "fresh")
        with pytest.raises(ConfigError, match="Load 2 into the trainer"):
            publisher.publish(before.version + 1, engine.named_weights())
        with pytest.raises(ConfigError, match=r"has not loaded version 2 yet. Load it, then call run.restored\(2\)"):
            publisher.publish(answer.version + 1, engine.named_weights())
        with pytest.raises(ConfigError, match="no checkpoint can be made: .* has not loaded version 2 yet"):
            run.checkpoint(engine.save, directory=served.directory)
        asked = run.restoration()
        assert asked is not None
        with asked.fetch() as update:
            engine.load_weights(update)

        run.restored(asked.version, "fresh")

        assert (engine.steps, run.restoration()) == (0, None)
        engine.steps += 1
        publisher.publish(asked.version + 1, engine.named_weights()).wait(LIMIT_S)
        before.ack()
        with run.queue.get("train") as following:
            assert following.version == 3
            following.ack()


def test_all_ranks_of_a_trainer_load_the_same_version_and_train_the_step_again(tmp_path: Path) -> None:
    """In a workflow: while the ranks are at a step, an operator goes back two versions."""
    gates, events, answers = Gates(tmp_path / "gates", 5), list[ev.Event](), list[RollbackResult]()

    def roll_back() -> None:
        with af.connect(tmp_path / "run", name="operator") as operator:
            until(lambda: gates.reached(5) == 2, "both ranks at the step of version 5")
            answers.append(operator.rollback(3, "the reward fell"))
        gates.open(5)

    def listen(event: ev.Event) -> None:
        events.append(event)
        if isinstance(event, ev.StepTrained) and event.step == 4:
            threads.append(threading.Thread(target=roll_back))
            threads[0].start()

    threads: list[threading.Thread] = []
    workflow = echo_workflow(
        train=gates.trainer("gates:GatedRanks", world_size=2), weights=af.Weights(keep=4), steps=7
    )
    result = workflow.run(tmp_path / "run", on_event=listen)
    threads[0].join()

    assert [(answer.version, answer.optimizer) for answer in answers] == [(6, "fresh")]
    restored = [(e.version, e.source, e.optimizer) for e in events if isinstance(e, ev.Restored)]
    assert restored == [(6, 3, "fresh")]
    trained = [(e.step, e.version) for e in events if isinstance(e, ev.StepTrained)]
    assert trained == [(step, step) for step in range(5)] + [(step, step + 1) for step in range(5, 7)]
    spans = [(e.worker, e.version) for e in events if isinstance(e, ev.Span) and e.kind == "train"]
    for rank in range(2):  # the step in progress trained version 5; its result was discarded
        assert [version for worker, version in spans if worker == f"train-0 rank {rank}"] == list(range(8))
    assert (result.summary["status"], result.summary["balanced"]) == ("completed", True)
    rows = trained_rows(tmp_path / "run")
    assert len(set(rows)) == len(rows) == 7 * 16
    # version 3 has had 3 steps, and steps 5 and 6 followed
    assert json.loads((tmp_path / "run/model/echo.json").read_text())["steps"] == 3 + 2
