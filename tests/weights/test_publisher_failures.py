"""A publisher when something goes wrong: the version before stays current, and the error says which version and why."""

import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flaky_proxy import WHOLE, FlakyProxy
from replicas import LIMIT_S, Served, model
from scripted_transport import Scripted
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import (
    ConfigError,
    DeadlineExceeded,
    MemoryFull,
    SchemaError,
    ServerLost,
    VersionGone,
    WeightError,
    WeightMismatch,
)
from asyncflow_sdk.queue.coroutines import run_blocking
from asyncflow_sdk.types.events import Note


class Gate:
    """Holds up a version where it is sent."""

    def __init__(self, scripted: type[Scripted]) -> None:
        self.open, self.reached, self.problem = threading.Event(), threading.Event(), list[Exception]()
        scripted.send = self.send

    def send(self, manifest: Any) -> None:
        self.reached.set()
        assert self.open.wait(LIMIT_S)
        if self.problem:
            raise self.problem.pop()


@pytest.fixture
def gate(scripted: type[Scripted], served: Served) -> Iterator[Gate]:
    """Of a publisher of the transport "scripted"; closed until a test opens it."""
    served.transport = "scripted"
    gate = Gate(scripted)
    yield gate
    gate.open.set()


@pytest.mark.parametrize(
    ("problem", "error", "reason"),
    [
        (OSError(5, "the disk is gone"), WeightError, "version 2 failed .*: OSError: .*the disk is gone"),
        (MemoryFull("no room"), MemoryFull, "version 2 failed while it was being sent through transport 'scripted': no room"),
    ],
)  # fmt: skip
def test_an_error_names_the_version_and_what_was_done_with_it(
    served: Served, gate: Gate, problem: Exception, error: type[Exception], reason: str
) -> None:
    gate.open.set()
    gate.problem = [problem]
    publication = served.publisher.publish(2, model(2))
    for _ in range(2):
        with pytest.raises(error, match=reason):
            publication.wait(LIMIT_S)


@pytest.mark.parametrize("raised_by", ["publish", "flush", "close", "wait"])
def test_an_error_behind_is_raised_once_in_front(served: Served, gate: Gate, raised_by: str) -> None:
    # given a version that cannot be delivered
    gate.open.set()
    trainer = served.trainer()
    trainer.publish(1, model(1)).wait(LIMIT_S)
    gate.problem = [MemoryFull("version 2: no room")]
    publication = trainer.publish(2, model(2))
    # when
    with pytest.raises(MemoryFull, match="version 2: no room"):
        {
            "publish": lambda: trainer.publish(3, model(3)), "flush": trainer.flush, "close": trainer.close,
            "wait": publication.wait,
        }[raised_by]()  # fmt: skip
    # then the version before is current, and the next comes, under the same number too
    assert served.current() == (1, 1.0)
    if raised_by == "close":
        trainer = served.trainer("another")
    trainer.flush()
    trainer.publish(2, model(2.5)).wait(LIMIT_S)
    assert served.current() == (2, 2.5)
    trainer.close()


def test_a_delivery_that_does_not_end_holds_up_the_next_until_a_deadline(served: Served, gate: Gate) -> None:
    # given
    trainer = served.trainer(timeout_s=0.05)
    publication = trainer.publish(1, model(1))
    assert gate.reached.wait(LIMIT_S)
    # when / then
    reason = "version 1 is not published after 0.05 s: it is being sent through transport 'scripted'"
    for what, call in (
        ("version 2 cannot be published yet: ", lambda: trainer.publish(2, model(2))),
        ("version 1 cannot be rolled back to yet: ", lambda: trainer.rollback(1)),
        ("not everything is published: ", trainer.flush),
        ("", lambda: publication.wait(0.05)),
    ):
        with pytest.raises(DeadlineExceeded, match=f"^{re.escape(what + reason)}"):
            call()
    # and once it is through, the next goes on
    gate.open.set()
    publication.wait(LIMIT_S)
    trainer.publish(2, model(2)).wait(LIMIT_S)
    assert served.current() == (2, 2.0)


def broken(error: BaseException) -> Iterator[tuple[str, Any]]:
    """Weights of an engine that fails while they are asked for."""
    yield "w", np.zeros(10)
    raise error


def interrupted() -> Iterator[tuple[str, Any]]:
    yield "w", np.zeros(10)
    signal.raise_signal(signal.SIGINT)
    yield "never", np.zeros(3)


@pytest.mark.parametrize(
    ("weights", "error", "reason"),
    [
        (interrupted, KeyboardInterrupt, None),
        (lambda: broken(RuntimeError("the engine broke")), RuntimeError, "the engine broke"),
        (lambda: [], WeightMismatch, "version 2 has no tensors"),
        (lambda: [("w", np.ones(3)), ("w", np.ones(3))], WeightMismatch, "version 2: tensor 'w' is sent twice"),
        (lambda: [("w", np.array([object()]))], SchemaError, "version 2: tensor 'w': numpy dtype object"),
    ],
)
def test_a_version_that_cannot_be_written_leaves_the_one_before(
    served: Served, weights: Any, error: type[BaseException], reason: str | None
) -> None:
    served.publish(1)
    # when
    for _ in range(2):
        with pytest.raises(error, match=reason):
            served.publisher.publish(2, weights())
    # then it is withdrawn, and its number free
    assert served.run.queue.status().announced == -1
    assert served.current() == (1, 1.0)
    served.publish(2)
    assert served.current() == (2, 2.0)


def test_an_interrupted_announcement_is_withdrawn(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.publish(1)

    def interrupted(work: Any) -> None:
        monkeypatch.undo()
        run_blocking(work)
        raise KeyboardInterrupt

    monkeypatch.setattr("asyncflow_sdk.weights.publisher.run_blocking", interrupted)
    with pytest.raises(KeyboardInterrupt):
        served.publisher.publish(2, model(2))
    assert served.run.queue.status().announced == -1
    served.publish(2)


def test_a_version_that_was_withdrawn_by_a_rollback_is_not_current(served: Served, gate: Gate) -> None:
    """A run may be rolled back by somebody else while a version is on its way."""
    gate.open.set()
    for version in (1, 2):
        served.publish(version)
    gate.open.clear()
    gate.reached.clear()
    publication = served.publisher.publish(3, model(3))
    assert gate.reached.wait(LIMIT_S)
    served.client("admin").rollback(1)
    gate.open.set()
    with pytest.raises((VersionGone, ConfigError), match="version 3"):
        publication.wait(LIMIT_S)
    assert served.current() == (4, 1.0)
    served.run.restored(4)
    served.publish(5)


def test_memory_that_cannot_be_freed_is_no_reason_to_have_no_version(
    served: Served, scripted: type[Scripted]
) -> None:
    # given a file system that takes nothing away
    served.transport = "scripted"
    served.publish(1)

    def stale(versions: Any) -> None:
        raise OSError(116, "Stale file handle")

    # when
    scripted.keep = stale
    served.publish(2)
    scripted.keep = lambda versions: None
    # then
    assert (served.publisher.current, *served.current()) == (2, 2, 2.0)
    served.publish(3)
    notes = [event for event in served.events if isinstance(event, Note)]
    assert len(notes) == 2  # before it is written, and after
    for note in notes:
        assert note.level == "warning"
        assert re.match(r"memory of versions .*not free yet: OSError: .*Stale file handle", note.text)


def test_a_publisher_that_closes_gives_up_a_version_that_is_late(served: Served, gate: Gate) -> None:
    # given a version whose delivery does not end
    connection = served.client("trainer")
    trainer = connection.weight_publisher("scripted", timeout_s=0.05)
    publication = trainer.publish(1, model(1))
    assert gate.reached.wait(LIMIT_S)
    # when
    with pytest.raises(DeadlineExceeded, match="version 1 is not published after 0.05 s"):
        trainer.close()
    # then
    for _ in range(2):
        with pytest.raises(WeightError, match="version 1 failed while it was .*: the publisher was closed"):
            publication.wait(LIMIT_S)
    # and what the thread still does harms nobody who publishes on the same connection
    with connection.weight_publisher("shm") as second:
        gate.open.set()
        second.publish(1, model(1.5)).wait(LIMIT_S)
        assert served.current() == (1, 1.5)
    with pytest.raises(WeightError, match="the publisher was closed"):
        publication.wait(LIMIT_S)


# ---- a server that does not answer


class Cut:
    """A run that is served by tcp, and a publisher that reaches it through a proxy."""

    def __init__(self, run: af.Run, events: list[Any]) -> None:
        self.run, self.events = run, events
        self.proxy = FlakyProxy(int(run.address.rpartition(":")[2]), pieces=WHOLE)
        connection = af.connect(self.proxy.address, insecure=True, name="trainer", shared_memory=False)
        self.trainer = connection.weight_publisher("tcp", timeout_s=1.0)


@pytest.fixture
def cut() -> Iterator[Cut]:
    events: list[Any] = []
    with af.serve(address="tcp://127.0.0.1:0", insecure=True, on_event=events.append) as run:
        made = Cut(run, events)
        yield made
        made.proxy.resume()
        made.trainer.close()
        made.proxy.close()


@pytest.mark.parametrize("arrives", [True, False])
def test_a_trainer_goes_on_after_the_answer_to_its_publish_was_lost(
    cut: Cut, arrives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given
    cut.trainer.publish(1, model(1)).wait(LIMIT_S)

    # when neither the request nor its answer comes through, or only the request
    with monkeypatch.context() as impatient:

        def weights() -> Iterator[tuple[str, Any]]:
            yield from model(2).items()
            cut.proxy.halt(there=not arrives)  # it was announced
            impatient.setattr("asyncflow_sdk.queue.connection.CALL_S", 0.1)
            impatient.setattr("asyncflow_sdk.wire.client.GRACE_S", 0.1)

        with pytest.raises(ServerLost, match=r"version 2 .*told to the server.*Nobody knows whether it is current"):
            cut.trainer.publish(2, weights()).wait(LIMIT_S)
    until(lambda: cut.run.queue.status().version == (2 if arrives else 1), "the request, or nothing")
    cut.proxy.resume()
    # then
    if arrives:
        with pytest.raises(ConfigError, match="2 is already current"):
            cut.trainer.publish(2, model(2.5))
        assert cut.trainer.current == 2
    cut.trainer.publish(3, model(3)).wait(LIMIT_S)
    assert (cut.trainer.current, cut.run.queue.status().version) == (3, 3)
    if arrives:
        said = "version 2 is current: only the server's answer was lost"
        until(lambda: said in [each.text for each in cut.events if isinstance(each, Note)], "a note")


def test_a_server_that_is_gone_is_an_error(served: Served) -> None:
    trainer = served.trainer()
    trainer.publish(1, model(1)).wait(LIMIT_S)
    served.run.close()
    with pytest.raises(ServerLost):
        trainer.publish(2, model(2))
    trainer.close()


def test_a_wait_for_a_version_may_be_in_another_thread(served: Served, gate: Gate) -> None:
    publication = served.publisher.publish(1, model(1))
    waits = in_thread(publication.wait, LIMIT_S)
    until(gate.reached.is_set, "its delivery")
    assert not publication.done
    gate.open.set()
    assert waits().version == 1
    assert publication.done
