"""A trainer's publisher: what it published is what replicas get, in bounded memory."""

import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from replicas import LIMIT_S, PROBE, Served, load, model, value_of
from scripted_transport import Scripted
from small_disk import on_disk
from waiting import until

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.types.events import Published, Span

pytestmark = pytest.mark.fast


def test_what_is_published_is_what_replicas_get(served: Served) -> None:
    # given
    trainer = served.trainer(dtype="bfloat16", rename=lambda name: f"model.{name}")
    weights = {"w": np.random.default_rng(0).standard_normal((300, 200)).astype(np.float32), "steps": np.arange(5)}
    # when
    publication = trainer.publish(np.int64(3), weights.items(), probe=PROBE)
    manifest = publication.wait(LIMIT_S)
    # then
    with served.newest() as update:
        got = {name: array.copy() for name, array in update.arrays()}
        assert (update.version, trainer.current, manifest.version) == (3, 3, 3)
        assert update.root == manifest.root
    assert publication.done
    assert list(got) == ["model.w", "model.steps"]
    assert got["model.w"].tobytes() == weights["w"].astype(ml_dtypes.bfloat16).tobytes()
    assert got["model.steps"].tolist() == [0, 1, 2, 3, 4]
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
            tensor = np.ones(8)
            before.append(weakref.ref(tensor))
            yield f"w{number}", tensor
            del tensor

    served.publish(1, gathered())
    assert len(before) == 4


def test_weights_may_change_as_soon_as_publish_returns(served: Served, scripted: type[Scripted]) -> None:
    # given a delivery that takes its time
    gate, weights = threading.Event(), np.zeros(1 << 18)
    scripted.send = lambda manifest: gate.wait(LIMIT_S)
    trainer = served.trainer(transport="scripted")
    publication = trainer.publish(1, {"w": weights})
    # when
    weights[:] = 7
    assert not publication.done
    gate.set()
    publication.wait(LIMIT_S)
    # then
    assert served.current() == (1, 0.0)


def test_without_digests_nothing_is_hashed(served: Served) -> None:
    manifest = served.trainer(digests=False).publish(1, model(1)).wait(LIMIT_S)
    assert not any(chunk.digests for chunk in manifest.chunks)
    assert served.current() == (1, 1.0)


def test_a_number_that_was_used_is_refused_before_anything_is_copied(served: Served) -> None:
    asked = []

    def weights() -> Iterator[tuple[str, Any]]:
        asked.append(True)
        yield from model(9).items()

    served.publish(5)
    for version in (5, 4, 0):
        with pytest.raises(ConfigError, match=f"version {version} cannot be published: 5 is already current"):
            served.publisher.publish(version, weights())
    assert not asked
    assert served.current() == (5, 5.0)


def test_one_publisher_at_a_time(served: Served) -> None:
    first = served.trainer("first")
    first.publish(1, model(1)).wait(LIMIT_S)
    with pytest.raises(ConfigError, match=r"first .*one publisher at a time"):
        served.trainer("second")
    assert served.current() == (1, 1.0)  # which harmed nothing
    first.close()
    first.close()
    with pytest.raises(ConfigError, match="version 2: this publisher is closed"):
        first.publish(2, model(2))
    second = served.trainer("third")
    assert second.current == 1
    second.publish(2, model(2)).wait(LIMIT_S)
    assert served.current() == (2, 2.0)


def test_a_publisher_that_was_not_closed_ends_with_its_connection(served: Served) -> None:
    first = served.client("first")
    first.weight_publisher().publish(1, model(1)).wait(LIMIT_S)
    first.close()
    second = served.trainer("second")
    second.publish(2, model(2)).wait(LIMIT_S)


def test_rolled_back_the_old_bytes_are_current(served: Served) -> None:
    # given
    trainer = served.trainer()
    for version in (1, 2):
        trainer.publish(version, model(version))
    # when
    answer = trainer.rollback(1, "the loss rose")
    # then
    assert (answer.version, answer.optimizer, trainer.current) == (3, "fresh", 3)
    assert served.current() == (3, 1.0)
    with pytest.raises(ConfigError, match="the trainer has not loaded version 3 yet"):
        trainer.publish(4, model(4))
    asked = served.run.restoration()
    assert asked is not None
    with asked.fetch(LIMIT_S) as update:
        assert (asked.version, asked.source, value_of(update)) == (3, 1, 1.0)
    served.run.restored(3)
    assert served.run.restoration() is None
    trainer.publish(4, model(4)).wait(LIMIT_S)
    assert trainer.rollback(3).version == 5
    assert served.current() == (5, 1.0)
    with pytest.raises(ConfigError, match="version 2 is not kept any more"):
        trainer.rollback(2)


def test_a_replica_may_load_the_version_before_again_only_while_it_is_kept(served: Served) -> None:
    updates = served.replica()
    for version in range(1, 5):
        served.publish(version)
        assert load(updates, version) == version
    assert [each.version for each in served.run.queue.status().versions] == [3, 4]  # keep_versions=2


def test_memory_is_that_of_what_is_kept_and_one_more() -> None:
    nbytes = 3 << 20
    weights = {"a": np.zeros(1 << 20, np.uint8), "b": np.zeros(2 << 20, np.uint8)}
    with Served(keep_versions=3) as served:

        def within(versions: int) -> bool:
            """Memory for the next version may be on its way."""
            return served.publisher.nbytes == on_disk(served.directory) <= versions * nbytes + (1 << 20)

        for version in range(1, 8):
            served.publish(version, weights)
            if version == 4:
                reading = next(iter(served.replica("laggard")))  # for ever
            until(lambda: within(4 + (version > 4)), "bounded memory")  # noqa: B023
        reading.release()
        numbers = itertools.count(8)

        def publish_one_more() -> bool:
            """Memory to spare is freed with the version after the one in which it is found."""
            served.publish(next(numbers), weights)
            return within(4)

        until(publish_one_more, "the memory of the laggard's version")
