"""Trainers and replicas are killed and frozen at every moment of a version's life.

Nothing hangs, a replica that lives is on one whole version, and the next version comes.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from children import Child
from replicas import LIMIT_S, Served
from small_disk import on_disk
from stopping import MODEL, replicate, train, versions_of, weights
from waiting import until

SLACK = 8 << 20


def on(version: int) -> list[Any]:
    """What a replica says that has one whole version."""
    return ["on", version, [float(version)]]


def until_on(child: Child, version: int) -> None:
    """It comes to be on ``version``; it may pass whole versions before."""
    while (said := child.hear()) != on(version):
        assert said == on(said[1]), said
        assert said[1] < version, said


class Replica:
    """A replica in this process."""

    def __init__(self, run: Served, name: str) -> None:
        self._updates = iter(run.replica(name))

    def until_on(self, version: int) -> None:
        last = 0
        while last != version:
            with next(self._updates) as update:
                assert last < update.version <= version
                last = update.version
                assert versions_of(update) == [float(last)]


def held(run: Served, path: Path) -> int:
    """Bytes of weights in the run's memory, and in its version directories."""
    return on_disk(run.directory, "[wft]*") + on_disk(path, "*/*")


@pytest.fixture
def run() -> Iterator[Served]:
    with Served(max_swapping=1) as run:
        yield run


@pytest.mark.parametrize(
    ("transport", "moments"),
    [
        ("shm", ["announced", "copying", "published"]),
        ("shm", ["sending", "sent"]),
        ("file", ["copying", "sent"]),
        ("tcp", ["copying", "sent"]),
    ],
)
def test_trainers_are_killed_in_the_middle_of_a_version(
    transport: str, moments: list[str], run: Served, path: Path
) -> None:
    options = {"path": str(path)} if transport == "file" else {}
    replica, version = Replica(run, "replica"), 1
    with contextlib.ExitStack() as trainers:
        trainer = trainers.enter_context(Child(train, run.address, transport, options, moments[0]))
        assert trainer.hear()[:2] == ["published", 1]
        replica.until_on(1)
        for moment, following in zip(moments, [*moments[1:], ""], strict=True):
            # given a trainer in the middle of a version
            trainer.say("publish")
            if moment == "published":
                version += 1
                assert trainer.hear()[:2] == ["published", version]
            else:
                assert trainer.hear() == ["at", moment]
            # when
            trainer.kill()
            # then a replica that comes late begins with what is current, where that outlives its trainer
            if transport != "tcp":
                with run.newest() as update:
                    assert (update.version, versions_of(update)) == (version, [float(version)])
            # and the next trainer goes on from there
            trainer = trainers.enter_context(Child(train, run.address, transport, options, following))
            version += 1
            assert trainer.hear()[:2] == ["published", version]
            replica.until_on(version)
        # and nothing of the dead ones is left when their versions are not kept any more
        for _ in range(2):
            trainer.say("publish")
            version += 1
            said = trainer.hear()
            assert said[:2] == ["published", version]
            assert said[2] <= 4 * MODEL + SLACK
            replica.until_on(version)
        assert held(run, path) <= 4 * MODEL + SLACK
        assert run.run.queue.status().publisher.startswith("trainer")


@pytest.mark.parametrize(
    ("transport", "moments"),
    [
        ("shm", ["awaiting", "staged", "swapping"]),
        ("shm", ["loading", "committed", "fetching"]),
        ("file", ["fetching", "loading"]),
        ("tcp", ["fetching", "loading"]),
    ],
)
def test_replicas_are_killed_in_the_middle_of_a_version(
    transport: str, moments: list[str], run: Served, path: Path
) -> None:
    run.transport = transport
    publisher = run.trainer(**({"path": str(path)} if transport == "file" else {}))
    other, version = Replica(run, "other"), 1
    publisher.publish(1, weights(1)).wait(LIMIT_S)
    other.until_on(1)
    for moment in moments:
        with Child(replicate, run.address, transport, moment, f"victim at {moment}") as victim:
            # given a replica in the middle of a version; one may load at a time
            assert victim.hear() == on(version)
            if moment == "staged":
                holds = run.replica("holds the permission")
                holding = next(iter(holds))
            if moment != "awaiting":
                version += 1
                publisher.publish(version, weights(version)).wait(LIMIT_S)
                if moment == "staged":
                    run.until("staged", version, f"victim at {moment}")
                else:
                    assert victim.hear() == ["at", moment]
            # when
            victim.kill()
        if moment == "staged":
            holding.release()
            holds.close()
        # then the other one goes on, and the trainer
        version += 1
        publisher.publish(version, weights(version)).wait(LIMIT_S)
        other.until_on(version)
        assert publisher.nbytes <= 4 * MODEL + SLACK  # what the other one is just loading is the fourth
    until(lambda: [s.name for s in run.run.queue.status().sessions if s.replica] == ["other"], "the end of the dead")
    assert held(run, path) <= 4 * MODEL + SLACK
    publisher.close()


@pytest.mark.parametrize(
    ("transport", "moment"), [("shm", "awaiting"), ("shm", "loading"), ("file", "fetching"), ("tcp", "fetching")]
)
def test_a_replica_is_frozen_while_versions_pass(transport: str, moment: str, run: Served, path: Path) -> None:
    # given a replica that is frozen, in the middle of version 2
    run.transport = transport
    publisher = run.trainer(**({"path": str(path)} if transport == "file" else {}))
    publisher.publish(1, weights(1)).wait(LIMIT_S)
    with Child(replicate, run.address, transport, moment, "sleeper") as sleeper:
        assert sleeper.hear() == on(1)
        if moment != "awaiting":
            publisher.publish(2, weights(2)).wait(LIMIT_S)
            assert sleeper.hear() == ["at", moment]
        sleeper.stop()
        # when more are published than may be kept
        for version in range(3, 9):
            publisher.publish(version, weights(version)).wait(LIMIT_S)
            assert publisher.nbytes <= 5 * MODEL + SLACK  # what the sleeper has mapped, too
        # then it goes on with a whole version when it wakes up, and is on the newest
        sleeper.resume()
        if moment != "awaiting":
            sleeper.say("go on")
        until_on(sleeper, 8)
    publisher.close()
