"""Memory of a run that is lost while its server is away: each loss is counted, what lives can be read, and clients go on."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from queue_runs import KINDS, Durable, running
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import DeadlineExceeded, LeaseLost
from asyncflow_sdk.interfaces import TransferQueue

pytestmark = pytest.mark.usefixtures("soon")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Durable]:
    with Durable(tmp_path / "run", capacity_rows=10) as run:
        yield run


def parked(queue: TransferQueue, *names: str) -> None:
    until(lambda: set(names) <= queue.status().waiting.keys(), f"that {names} wait")


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_put_that_waits_when_its_payload_is_lost_is_made_again(run: Durable, shared_memory: bool) -> None:
    with run.client("reader") as reader:
        # given a full queue, and puts of other clients that wait for room
        queue = reader.queue
        queue.declare("work", needs=["x"])
        queue.put({"x": np.arange(10.0)})
        others = [run.client(f"other-{n}", shared_memory=shared_memory) for n in range(2)]
        puts = [in_thread(each.queue.put, {"x": np.arange(5.0) + 10 * n}) for n, each in enumerate(others)]
        parked(queue, "other-0", "other-1")
        # when all memory is lost with the server
        run.kill()
        shutil.rmtree(run.memory)
        found = run.start()
        # then what was put is lost, each row counted
        assert (found["lost"], found["rows"]) == (10, 0)
        # and what was not yet is put after all, and can be read
        assert [put().count for put in puts] == [5, 5]
        with queue.get("work", 10, at_least=10) as batch:
            assert sorted(batch["x"].tolist()) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
            batch.ack()
        audit = queue.audit()
        assert (audit.put, audit.failed, audit.consumed, audit.live) == (20, 10, 10, 0)
        for each in others:
            each.close()


@pytest.mark.parametrize("beside", [0, 5])
def test_a_put_of_a_far_client_that_waits_is_read_after_its_server_came_back(run: Durable, beside: int) -> None:
    with run.client("reader") as reader, run.client("far", shared_memory=False) as far:
        # given a put that waits for room, whose payload lies with the server, beside rows that were put
        queue = reader.queue
        queue.declare("work", needs=["x"])
        if beside:
            far.queue.put({"x": np.arange(float(beside))})
        queue.put({"x": np.arange(10.0 - beside)})
        put = in_thread(far.queue.put, {"x": np.arange(10.0)})
        parked(queue, "far")
        # when the server comes back, and no row is left in that memory before the put has its turn
        run.again()
        for _ in range(2):
            queue.get("work", 5).ack()
        # then
        assert put().count == 10
        assert queue.get("work", 10)["x"].tolist() == list(range(10))


def test_a_client_that_outlives_the_memory_of_its_run_goes_on(run: Durable) -> None:
    with run.client() as client:
        # given a client that holds rows of memory that is lost with the server
        queue = client.queue
        queue.configure(capacity_rows=10_000)
        queue.declare("work", needs=["x"], gives=["y"])
        queue.declare("end", needs=["y"])
        queue.put({"x": np.arange(4.0)})
        queue.put({"x": np.arange(3000.0)})
        small, large, last = queue.get("work", 1), queue.get("work", 3), queue.get("work", 3000)
        last.finish({"y": np.zeros(3000)})
        run.kill()
        shutil.rmtree(run.memory)
        # when it puts before the server is back, and after
        early = in_thread(queue.put, {"x": np.arange(2.0)})
        assert run.start()["lost"] == 3004
        assert early().count == 2
        assert queue.put({"x": np.arange(5.0)}).count == 5
        # then its rows are there, and what it held is lost, which it still sees
        with queue.get("work", 7, at_least=7) as batch:
            assert batch["x"].tolist() == [0, 1, 0, 1, 2, 3, 4]
            batch.complete({"y": np.ones(7)})
        assert queue.get("end", 7).array("y").tolist() == 7 * [1.0]
        for held in (small, large):
            with pytest.raises(LeaseLost):
                held.complete({"y": np.zeros(held.rows)})
        with pytest.raises(LeaseLost):
            queue.get("work", ack=last)
        assert last["x"].tolist() == list(range(3000))


def test_what_was_written_before_the_loss_and_is_sent_after_it_arrives(run: Durable) -> None:
    with run.client() as client, run.client("other", shared_memory=False) as other:
        # given a client's memory that is lost after it has written, and before the server looks
        queue = client.queue
        queue.declare("work", needs=["x"], gives=["y"])
        queue.declare("end", needs=["y"])
        other.queue.put({"x": np.arange(4.0)})
        run.again()
        batch = queue.get("work", 4)
        batch.finish({"y": np.arange(4.0)})
        for file in run.memory.glob(f"s{client.session}-*"):
            file.unlink()
        with pytest.raises(DeadlineExceeded):
            queue.get("work", ack=batch, timeout_s=0)
        assert queue.get("end", 4).array("y").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("ipc", {}), ("remote", {}), ("ipc", {"durability": "process"}), ("tcp", {"store": "hosts"})],
    ids=["ipc", "remote", "durable", "hosts"],
)
def test_clients_go_on_in_new_memory_if_that_of_a_served_run_is_removed(
    tmp_path: Path, kind: str, options: dict[str, str]
) -> None:
    with running(kind, tmp_path / "run", **options) as run:
        # given clients of a run, one of which holds rows
        queue, far = run.queue(), run.queue("far", shared_memory=False)
        queue.declare("work", needs=["x"], gives=["y"])
        queue.declare("end", needs=["x", "y"])
        for each in (queue, far):
            each.put({"x": np.arange(5.0)})
        with queue.get("work", 5) as held:
            # when its memory is removed while its server lives
            shutil.rmtree(run.memory)
            # then what they send is stored, whatever it is
            held.finish({"y": np.zeros(5)})
        for each in (far, queue, queue):
            assert each.put({"x": np.arange(7.0)}, timeout_s=60).count == 7
        assert list(run.memory.glob("s*-*"))
        # and clients that come later read it; what was there is lost and counted, unless it is still mapped
        later, read = run.queue("later"), []
        queue.end()
        for batch in later.stream("work", count=31, at_least=1):
            batch.complete({"y": batch.array("x") + 1})
        for batch in later.stream("end", count=31, at_least=1):
            read += batch["y"].tolist()
            batch.ack()
        audit = queue.audit()
        assert read[-21:] == [*range(1, 8)] * 3
        assert (audit.consumed, audit.failed, audit.live) == (len(read), 31 - len(read), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_cannot_be_read_fail_once_and_are_given_to_nobody_again(kind: str) -> None:
    # given rows of one client whose memory somebody removes, and a row of another
    with running(kind) as run:
        owner, queue = run.queue("owner", shared_memory=True), run.queue()
        queue.declare("work", needs=["x"])
        for number in range(40):
            owner.put({"x": [float(number)]})
        for file in run.memory.glob("s*"):
            file.unlink()
        owner.put({"x": [40.0]})
        # when
        with queue.get("work", 2, timeout_s=60) as batch:
            # then
            assert batch["x"].tolist() == [40]
            batch.ack()
        audit = queue.audit()
        assert (audit.put, audit.failed, audit.consumed, audit.live) == (41, 40, 1, 0)
        assert audit.reasons["failed: payload lost"] == 40


def test_a_run_that_comes_back_remembers_what_could_not_be_read(run: Durable) -> None:
    with run.client() as client:
        # given rows that were found lost by a client that could not read them
        queue = client.queue
        queue.declare("work", needs=["x"])
        queue.put({"x": np.arange(4.0)})
        for file in run.memory.glob("s*"):
            file.unlink()
        queue.put({"x": [4.0]})
        batch = queue.get("work", 5, timeout_s=60)
        # when their server is killed and its journal carried out again
        found = run.again()
        # then nothing comes out differently, and what is held can be completed
        assert (found["differing"], found["lost"], found["rows"]) == (0, 0, 1)
        batch.ack()
        audit = queue.audit()
        assert (audit.failed, audit.consumed) == (4, 1)


def test_versions_outlive_the_server_and_the_loss_of_their_memory(run: Durable) -> None:
    # given a publisher that uses the memory of old versions again
    with run.client("trainer") as trainer:
        publisher = trainer.weight_publisher()

        def publish(version: int) -> None:
            publisher.publish(version, [("w", np.full(1000, version, np.float32))]).wait()

        def fetched() -> tuple[int, list[float]]:
            with af.connect(run.address, name="replica") as replica, replica.weight_updates() as updates:
                with next(iter(updates)) as update:
                    return update.version, np.unique(np.asarray(dict(update)["w"])).tolist()

        for version in range(5):
            publish(version)
        files = sorted(run.memory.glob("w*"))
        # when its server is killed, then the newest version is there, and a further one follows it
        run.again()
        assert sorted(run.memory.glob("w*")) == files
        assert fetched() == (4, [4.0])
        publish(5)
        assert fetched() == (5, [5.0])
        # and when all memory is lost with the server, versions are published where replicas find them
        run.kill()
        shutil.rmtree(run.memory)
        run.start()
        for version in (6, 7):
            publish(version)
            assert fetched() == (version, [float(version)])
        publisher.close()
