"""A trainer's publisher: held for a copy and never stuck; what it published is what replicas get, in bounded memory."""

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from children import Child
from publisher_runs import LIMIT_S, PROBE, Gated, Served, crash_while_publishing, full, value_of

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.types.events import Published, Span
from asyncflow_sdk.weights import WeightPublisher, restoration, restored


def test_what_is_published_is_what_replicas_get(served: Served) -> None:
    # given
    trainer = WeightPublisher(served.client(), dtype="bfloat16", rename=lambda name: f"model.{name}")
    weights = {"w": torch.randn(300, 200), "steps": torch.arange(5)}
    # when
    publication = trainer.publish(np.int64(3), weights.items(), probe=PROBE)  # type: ignore[arg-type]
    manifest = publication.wait(LIMIT_S)
    # then
    update = served.newest()
    got = dict(update)
    assert publication.done
    assert (update.version, trainer.current, manifest.version) == (3, 3, 3)
    assert list(got) == ["model.w", "model.steps"]
    assert torch.equal(got["model.w"], weights["w"].to(torch.bfloat16))
    assert torch.equal(got["model.steps"], weights["steps"])
    assert update.root == manifest.root
    assert manifest.digested
    trainer.close()
    (span,) = [event for event in served.events if isinstance(event, Span)]
    assert (span.kind, span.version, span.worker) == ("publish", 3, "trainer")
    assert [event.version for event in served.events if isinstance(event, Published)] == [3]


def test_a_tensor_is_let_go_before_the_next_is_asked_for(served: Served) -> None:
    before: list[weakref.ref[Any]] = []

    def gathered() -> Iterator[tuple[str, Any]]:
        for number in range(4):
            assert [each for each in before if each() is not None] == []
            tensor = torch.ones(8)
            before.append(weakref.ref(tensor))
            yield f"w{number}", tensor
            del tensor

    with WeightPublisher(served.client()) as trainer:
        trainer.publish(1, gathered()).wait(LIMIT_S)
        assert len(before) == 4


def test_weights_may_change_as_soon_as_publish_returns(served: Served, transport: Gated) -> None:
    # given a delivery that takes its time
    trainer, weights = WeightPublisher(served.client()), torch.zeros(1 << 20)
    transport.gate.clear()
    publication = trainer.publish(1, [("w", weights)])
    # when
    weights.fill_(7)
    assert not publication.done
    transport.gate.set()
    publication.wait(LIMIT_S)
    # then
    assert value_of(served.newest()) == 0.0
    trainer.close()


def test_without_digests_nothing_is_hashed(served: Served) -> None:
    with WeightPublisher(served.client(), digests=False) as trainer:
        manifest = trainer.publish(1, full(1)).wait(LIMIT_S)
        assert not any(chunk.digests for chunk in manifest.chunks)
        assert value_of(served.newest()) == 1.0


def test_a_number_that_was_used_is_refused_before_anything_is_copied(served: Served) -> None:
    trainer, asked = WeightPublisher(served.client()), []

    def weights() -> Iterator[tuple[str, Any]]:
        asked.append(True)
        yield from full(9)

    trainer.publish(5, full(5))
    for version in (5, 4, 0):
        with pytest.raises(ConfigError, match=f"version {version} cannot be published: 5 is already current"):
            trainer.publish(version, weights())
    assert not asked
    assert value_of(served.newest()) == 5.0
    trainer.close()


def test_one_publisher_at_a_time(served: Served) -> None:
    first = WeightPublisher(served.client("first"))
    first.publish(1, full(1)).wait(LIMIT_S)
    with pytest.raises(ConfigError, match=r"first .*one publisher at a time"):
        WeightPublisher(served.client("second"))
    first.close()
    first.close()
    with pytest.raises(ConfigError, match="version 2: this publisher is closed"):
        first.publish(2, full(2))
    second = WeightPublisher(served.client("third"))
    assert second.current == 1
    second.publish(2, full(2)).wait(LIMIT_S)
    assert value_of(served.newest()) == 2.0
    second.close()


def test_a_publisher_that_was_not_closed_ends_with_its_connection(served: Served) -> None:
    queue = served.client("first")
    WeightPublisher(queue).publish(1, full(1)).wait(LIMIT_S)
    queue._port.connection.close()
    with WeightPublisher(served.client("second")) as second:
        second.publish(2, full(2)).wait(LIMIT_S)


def test_rolled_back_the_old_bytes_are_current(served: Served) -> None:
    # given
    trainer = WeightPublisher(served.client())
    for version in (1, 2):
        trainer.publish(version, full(version))
    # when
    answer = trainer.rollback(1, "the loss rose")
    # then
    assert (answer.version, answer.optimizer, trainer.current) == (3, "fresh", 3)
    assert value_of(served.newest()) == 1.0
    with pytest.raises(ConfigError, match="the trainer has not loaded version 3 yet"):
        trainer.publish(4, full(4))
    asked = restoration(served.client())
    assert asked is not None
    with asked.fetch(LIMIT_S) as update:
        assert (asked.version, asked.source, value_of(update)) == (3, 1, 1.0)
    restored(served.client(), 3)
    assert restoration(served.client()) is None
    trainer.publish(4, full(4)).wait(LIMIT_S)
    assert trainer.rollback(3).version == 5
    assert value_of(served.newest()) == 1.0
    with pytest.raises(ConfigError, match="version 2 is not kept any more"):
        trainer.rollback(2)
    trainer.close()


def test_memory_is_that_of_what_is_kept_and_one_more(served: Served) -> None:
    # given
    model = [("a", np.zeros(3 << 20, np.uint8)), ("b", np.zeros(5 << 20, np.uint8))]
    nbytes = 8 << 20
    served.client("admin").configure(keep_versions=3)
    trainer = WeightPublisher(served.client())
    for version in range(1, 12):
        trainer.publish(version, model).wait(LIMIT_S)
        trainer._stop_preparing()
        if version == 4:
            reading = served.newest()  # a laggard, for ever
        assert trainer.nbytes == served.held() <= (3 + 1 + (version > 4)) * nbytes + (1 << 20)
    reading.release()
    for version in range(12, 15):
        trainer.publish(version, model).wait(LIMIT_S)
    trainer._stop_preparing()
    assert trainer.nbytes == served.held() <= (3 + 1) * nbytes + (1 << 20)
    trainer.close()


def test_publishers_that_are_killed_leave_no_more_than_one_does(served: Served) -> None:
    count, model = 1 << 20, 4 << 20
    for crash in range(10):
        first = 1 + 3 * crash
        with Child(crash_while_publishing, served.address, first, count) as child:
            # given a publisher that goes on after one that was killed
            assert child.hear() <= 5 * model
            assert value_of(served.newest()) == first + 1
            # when
            child.kill()
        # then what is current stays so
        assert value_of(served.newest()) == first + 1
        assert served.held() <= 5 * model + (10 << 20)
    with WeightPublisher(served.client()) as trainer:
        for version in range(100, 104):
            trainer.publish(version, full(version, count)).wait(LIMIT_S)
        trainer._stop_preparing()
        assert served.held() == trainer.nbytes <= 3 * model + (1 << 20)
