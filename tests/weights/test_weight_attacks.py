"""Trainers and replicas are killed and frozen at every moment of a version's life, on every transport.

Nothing hangs, whoever lives is on one whole version, and the next version comes.
"""

import os
import queue
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from attack_children import MODEL, PUBLISHING, REPLICA, fill_up_weights, replicate, train, versions_of, weights
from children import LIMIT_S, Child

import asyncflow_sdk as af
from asyncflow_sdk.errors import VersionGone
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.queue import Connection, QueueServer, TransferQueue, open_queue
from asyncflow_sdk.queue._once import drive
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.weights import OwnUpdates, WeightPublisher, prefetch
from asyncflow_sdk.weights.shm import ShmReceiver, ShmSender

INSTALLED = [each.spec.name for each in registry().adapters if each.spec.kind == "transport"]
TRANSPORTS = [name for name in ("shm", "file", "tcp", "dist") if name in INSTALLED]
OUTLIVES = ("shm", "file")
SLACK = 8 << 20


def each_moment(*moments: str, of_dist: tuple[str, ...]) -> Any:
    """Every moment on every transport; of dist, whose processes take seconds to start, those that are its own to get wrong."""
    return pytest.mark.parametrize(
        ("scene", "moment"),
        [(name, each) for name in TRANSPORTS for each in (of_dist if name == "dist" else moments)],
        indirect=["scene"],
    )


class Scene:
    """A run of its own: a server in this process, everybody else in theirs."""

    def __init__(self, transport: str, folder: Path) -> None:
        self.transport, self._folder = transport, folder
        self.events: list[Any] = []
        self._coming: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.server = QueueServer([], on_event=self._event)
        self.address = self.server.addresses[-1]
        self._connection = Connection(self.address, "test")
        self.queue: TransferQueue = open_queue(self._connection)
        self._children: list[Child] = []

    @property
    def options(self) -> dict[str, Any]:
        return {"path": str(self._folder / "weights")} if self.transport == "file" else {}

    def configure(self, **limits: Any) -> None:
        drive(self.queue._port.send(cmd.Configure(**limits)))

    def trainer(self, moment: str = "") -> Child:
        return self._child(train, self.address, self.transport, self.options, moment)

    def replica(self, moment: str = "", at: int = 0, name: str = "replica") -> Child:
        return self._child(replicate, self.address, moment, at, name)

    def held(self) -> int:
        """Bytes of weights that lie in the run's memory, and in its version directories."""
        files = [*self.server.directory.path.glob("[wft]*"), *(self._folder / "weights").glob("*/*")]
        return sum(each.stat().st_blocks * 512 for each in files if each.is_file())

    def said(self, kind: type[Any], **fields: Any) -> list[Any]:
        found = (each for each in list(self.events) if isinstance(each, kind))
        return [each for each in found if all(getattr(each, name) == value for name, value in fields.items())]

    def flip(self, pattern: bytes, trainer: int) -> int:
        """A bit in each file of weights that holds these bytes. Returns in how many."""
        shared = [self.server.directory.path, *Path("/dev/shm").glob(f"asyncflow-{os.getuid()}-{trainer}-*")]
        count = 0
        for path in [*(each for folder in shared for each in folder.iterdir()), *self._folder.glob("weights/*/*")]:
            at = path.read_bytes().find(pattern) if path.is_file() else -1
            if at >= 0:
                with path.open("r+b") as file:
                    file.seek(at + 5)
                    file.write(bytes([pattern[5] ^ 0x10]))
                count += 1
        return count

    def failure(self, worker: str, version: int) -> str:
        """Why it could not have that version, once it has said so."""
        while True:
            event = self._coming.get(timeout=LIMIT_S)
            if isinstance(event, ev.WeightState) and event.state == "failed":
                assert (event.worker, event.version) == (worker, version)
                return event.detail

    def _event(self, event: Any) -> None:
        self.events.append(event)
        self._coming.put(event)

    def _child(self, *arguments: Any) -> Child:
        self._children.append(Child(*arguments))
        return self._children[-1]

    def close(self) -> None:
        for child in self._children:
            child.__exit__()
        self._connection.close()
        self.server.close()


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    made = Scene(request.param, tmp_path)
    yield made
    made.close()


def on(version: int) -> list[Any]:
    """What a replica says that has one whole version."""
    return ["on", version, [float(version)]]


def until_on(child: Child, version: int, *, passing: int) -> None:
    """It comes to be on ``version``; it may pass whole versions above ``passing`` first."""
    while (said := child.hear()) != on(version):
        assert said[0] == "on", said
        assert said == on(said[1]), said
        assert passing < said[1] < version, said
        passing = said[1]


@each_moment(*PUBLISHING, of_dist=("copying", "sent", "published"))
def test_a_trainer_is_killed(scene: Scene, moment: str) -> None:
    # given a replica on version 1, and a trainer in the middle of version 2
    trainer, replica = scene.trainer(moment), scene.replica()
    assert trainer.hear() == ["published", 1]
    assert replica.hear() == on(1)
    trainer.say(1)
    assert trainer.hear() == ["at", moment]
    # when
    trainer.kill()
    # then a replica that comes late begins with what is current, where that can still be had
    last = 2 if moment == "published" else 1
    late = scene.replica(name="late")
    if scene.transport in OUTLIVES:
        assert late.hear() == on(last)
    # and the next trainer goes on from there
    successor = scene.trainer()
    assert successor.hear() == ["published", last + 1]
    until_on(replica, last + 1, passing=1)
    assert late.hear() == on(last + 1)
    # and nothing of the dead one is left when its versions are not kept any more
    for version in (last + 2, last + 3):
        successor.say(1)
        said = successor.hear()
        assert said[:2] == ["published", version]
        assert said[2] <= 4 * MODEL + SLACK
        for each in (replica, late):
            assert each.hear() == on(version)
    assert scene.held() <= 4 * MODEL + SLACK
    assert scene.queue.status().publisher.startswith("trainer")


@each_moment(*REPLICA, of_dist=("fetching", "loading"))
def test_a_replica_is_killed(scene: Scene, moment: str) -> None:
    # given two replicas on version 1, of which one may load at a time; one of them is in the middle of version 2
    scene.configure(max_swapping=1)
    trainer, victim = scene.trainer(), scene.replica(moment, at=2, name="victim")
    assert trainer.hear() == ["published", 1]
    assert victim.hear() == on(1)
    other = scene.replica()
    assert other.hear() == on(1)
    if moment != "awaiting":
        trainer.say(1)
        assert trainer.hear()[:2] == ["published", 2]
        assert victim.hear() == ["at", moment]
    # when
    victim.kill()
    # then the other one goes on, and the trainer
    for version in (3, 4) if moment != "awaiting" else (2, 3):
        trainer.say(1)
        said = trainer.hear()
        assert said[:2] == ["published", version]
        assert said[2] <= 4 * MODEL + SLACK  # what the other one is just loading is the fourth
        until_on(other, version, passing=1)
    # and one that takes its place has the newest
    assert scene.replica(name="victim").hear() == on(version)
    assert scene.held() <= 4 * MODEL + SLACK
    names = [each.name for each in scene.queue.status().sessions if each.replica]
    assert sorted(names) == ["replica", "victim"]


@each_moment("awaiting", "fetching", "swapping", "loading", of_dist=("fetching",))
def test_a_replica_sleeps_while_versions_pass(scene: Scene, moment: str) -> None:
    # given a replica that is frozen in the middle of version 2
    trainer, sleeper = scene.trainer(), scene.replica(moment, at=2, name="sleeper")
    assert trainer.hear() == ["published", 1]
    assert sleeper.hear() == on(1)
    other = scene.replica()
    assert other.hear() == on(1)
    if moment != "awaiting":
        trainer.say(1)
        assert trainer.hear()[:2] == ["published", 2]
        assert sleeper.hear() == ["at", moment]
        until_on(other, 2, passing=1)
    sleeper.stop()
    # when more are published than may be kept; of dist fewer, for each waits for the sleeper to its deadline
    first = 3 if moment != "awaiting" else 2
    for version in range(first, first + (4 if scene.transport == "dist" else 10)):
        trainer.say(1)
        said = trainer.hear()
        assert said[:2] == ["published", version]
        assert said[2] <= 5 * MODEL + SLACK  # what the sleeper has mapped, and what the other one is just loading
        until_on(other, version, passing=1)
    # then it goes on with a whole version when it wakes up, and is on the newest
    sleeper.resume()
    if moment != "awaiting":
        sleeper.say("go on")
    until_on(sleeper, version, passing=1)


@pytest.mark.parametrize("scene", TRANSPORTS, indirect=True)
def test_versions_come_faster_than_they_can_be_fetched(scene: Scene) -> None:
    # given a replica that fetches version 2
    trainer, slow = scene.trainer(), scene.replica("fetching", at=2, name="slow")
    assert trainer.hear() == ["published", 1]
    assert slow.hear() == on(1)
    trainer.say(1)
    assert trainer.hear()[:2] == ["published", 2]
    assert slow.hear() == ["at", "fetching"]
    # when twenty more are published at once
    trainer.say(20)
    said = trainer.hear()
    assert said[:2] == ["published", 22]
    assert said[2] <= 5 * MODEL + SLACK
    # then it comes to the newest, and what it passed over is counted
    slow.say("go on")
    until_on(slow, 22, passing=1)
    staged = scene.said(ev.WeightState, worker="slow", state="staged")
    assert [each.version for each in staged][-1] == 22
    assert sum(each.skipped for each in staged) + len(staged) == 22
    assert sum(each.skipped for each in staged) >= 15


@pytest.mark.parametrize("scene", TRANSPORTS, indirect=True)
def test_a_second_trainer_is_refused_by_name_and_harms_nothing(scene: Scene) -> None:
    # given
    trainer, replica = scene.trainer(), scene.replica()
    assert trainer.hear() == ["published", 1]
    # when
    second = scene.trainer()
    assert second.wait() != 0
    # then
    assert "ConfigError" in second.errors()
    assert "trainer (session" in second.errors()
    assert replica.hear() == on(1)
    trainer.say(1)
    assert trainer.hear()[:2] == ["published", 2]
    until_on(replica, 2, passing=1)
    assert scene.replica(name="late").hear() == on(2)


@pytest.mark.parametrize("scene", TRANSPORTS, indirect=True)
def test_a_bit_flips_where_a_version_lies(scene: Scene) -> None:
    # given a replica on version 1, and version 2 hashed, made available, and not yet told of
    trainer, replica = scene.trainer("sent"), scene.replica()
    assert trainer.hear() == ["published", 1]
    assert replica.hear() == on(1)
    trainer.say(1)
    assert trainer.hear() == ["at", "sent"]
    # when one bit of one tensor flips
    pattern = np.full(16, 2 + 3 / 8, np.float32).tobytes()
    assert scene.flip(pattern, trainer.pid)
    trainer.say("go on")
    assert trainer.hear()[:2] == ["published", 2]
    # then the replica says what is damaged, and stays on version 1 until the next one comes, whole
    reason = scene.failure("replica", 2)
    assert re.search(r"DigestMismatch: .*version 2: bucket \d .*layer\.3\.weight", reason), reason
    trainer.say(1)
    assert trainer.hear()[:2] == ["published", 3]
    assert replica.hear() == on(3)


def test_a_manifest_that_is_none_fails_a_version_and_no_replica(tmp_path: Path) -> None:
    scene = Scene("shm", tmp_path)
    try:
        # given a replica on version 1
        trainer, replica = scene.trainer(), scene.replica()
        assert trainer.hear() == ["published", 1]
        assert replica.hear() == on(1)
        trainer.kill()
        # when somebody publishes what cannot be read
        port = scene.queue._port
        bad = msgspec.msgpack.encode((2, (("w", "float32", (1 << 40,), 0, 0),), ((4 << 40, ()),), 0))
        opened = drive(port.send(cmd.OpenPublisher()))
        for version, manifest in enumerate((b"\xc1", b"", bad, opened.kept[0][1].manifest[:-9]), 2):
            drive(port.send(cmd.Announce(version=version)))
            part = msgspec.structs.replace(opened.kept[0][1], manifest=manifest)
            drive(port.send(cmd.Publish(version=version, part=part)))
            # then the replica says so
            reason = scene.failure("replica", version)
            assert f"ProtocolError: version {version}: the manifest of rank 0's part cannot be read" in reason
        drive(port.send(cmd.ClosePublisher()))
        # and has the next one
        assert scene.trainer().hear() == ["published", version + 1]
        assert replica.hear() == on(version + 1)
    finally:
        scene.close()


def test_bytes_that_went_with_their_trainer_are_waited_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing newer comes for a long time."""
    scene = Scene("shm", tmp_path)
    monkeypatch.setattr(prefetch, "ASK_AGAIN_S", 0.05)
    fetching, died = threading.Event(), threading.Event()
    fetch = ShmReceiver.fetch

    def late(self: ShmReceiver, manifest: Any, where: bytes, **options: Any) -> Any:
        if manifest.version == 1:
            fetching.set()
            died.wait(LIMIT_S)
            raise VersionGone("version 1 is no longer kept")
        return fetch(self, manifest, where, **options)

    monkeypatch.setattr(ShmReceiver, "fetch", late)
    monkeypatch.setattr(ShmSender, "outlives", False)
    try:
        # given a replica that fetches version 1 while its trainer goes, and its bytes with it
        updates = OwnUpdates(open_queue(Connection(scene.address, "replica")), timeout_s=LIMIT_S)
        first = WeightPublisher(scene.queue)
        first.publish(1, weights(1)).wait()
        assert fetching.wait(LIMIT_S)
        first.close()
        died.set()
        assert "VersionGone: version 1" in scene.failure("replica", 1)
        # when another one publishes
        with WeightPublisher(scene.queue) as second:
            second.publish(2, weights(2)).wait()
            # then the replica has that
            update = next(iter(updates))
            assert update.version == 2
            with update:
                assert versions_of(dict(update.arrays())) == [2.0]
        updates.close()
    finally:
        scene.close()


def test_weights_of_another_dtype_are_refused_by_name(tmp_path: Path) -> None:
    """bfloat16 weights for an engine of float32, in a run of real workers."""
    work = af.Workflow(
        prompts={"prompt_ids": af.Ragged.of([[1, 2, 3]])},
        rollout=af.Rollout("echo", group_size=4, prompt="prompt_ids"),
        reward=length,
        train=af.Train("echo"),
        batch_size=8,
        steps=4,
        weights=af.Weights(dtype="bfloat16"),
    )
    with pytest.raises(
        af.WorkerFailed, match=r"WeightMismatch: version \d: tensor 'layer\.0\.weight' is bfloat16.*has float32"
    ):
        work.run(tmp_path)


def length(response_ids: Any) -> list[float]:
    return [float(len(row)) for row in response_ids]


def test_shared_memory_that_fills_up_fails_a_version_and_no_replica() -> None:
    with Child(fill_up_weights) as child:
        outcome = child.hear()
    if isinstance(outcome, str) and outcome.startswith("cannot"):
        pytest.skip(f"mounting a small /dev/shm needs root: {outcome}")
    assert "no room for" in outcome["error"]
    assert "--shm-size" in outcome["error"]
    assert outcome["on"] == [[1, [1.0]], [3, [3.0]]]
