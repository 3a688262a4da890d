"""Runs that come back after a kill: their rows, clients, leases and versions; and what does not survive is said."""

import contextlib
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import Child
from queue_runs import ClientProcess, Durable, RawClient, serve, values_of
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, DeadlineExceeded, Ended, LeaseLost, MemoryFull
from asyncflow_sdk.ledger import commands as cmd

pytestmark = pytest.mark.usefixtures("soon")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Durable]:
    with Durable(tmp_path / "run") as run:
        yield run


def test_clients_of_a_killed_server_just_go_on(run: Durable) -> None:
    # given a client that holds rows, one that waits for some, and one that will die with the server
    with run.client() as client, run.client("waiter") as waiter:
        queue = client.queue
        queue.declare("work", needs=["x"], gives=["y"], max_attempts=1)
        queue.declare("other", needs=["z"])
        queue.put({"x": values_of(0, 100)})
        batch = queue.get("work", 60)
        waiting = in_thread(waiter.queue.get, "other", 3)
        until(lambda: queue.status().parked, "the request")
        with ClientProcess(run.address) as holder:
            assert holder('queue.get("work", 4).rows') == 4
            # when the server is killed and comes back
            run.kill()
            holder.kill()
        found = run.start()
        assert (found["rows"], found["lost"], found["differing"]) == (100, 0, 0)
        assert run.said["addresses"][-1] == run.address
        # then what was leased can be completed, and the waiting request gets rows
        assert batch.array("x").tobytes() == values_of(0, 60).tobytes()
        batch.complete({"y": np.zeros(60)})
        queue.put({"z": np.arange(3.0)})
        assert waiting().array("z").tolist() == [0.0, 1.0, 2.0]
        # and the death of the other does not count against its rows
        assert queue.get("work", 40, at_least=40).rows == 40
        assert (queue.audit().put, queue.audit().failed) == (103, 0)


def test_payload_that_is_gone_is_counted_row_by_row(run: Durable) -> None:
    with run.client() as client, run.client("other") as other:
        # given rows of two sessions, in groups of two, some of them through already
        queue = client.queue
        queue.declare("work", needs=["x"])
        queue.put({"x": values_of(0, 10)}, group_size=2)
        queue.get("work", 4).ack()
        other.queue.put({"x": values_of(50, 5)}, group_size=2)
        # when the memory of one is gone with the server
        run.kill()
        lost = list(run.memory.glob(f"s{other.session}-*"))
        assert lost
        for file in lost:
            file.unlink()
        told: list[Any] = []
        with af.serve(run.directory, on_event=told.append) as again:
            # then its rows failed, and the others are there
            assert again.recovered is not None
            assert (again.recovered.lost, again.recovered.rows) == (10, 16)
            audit = again.audit()
            assert audit.balanced
            assert (audit.put, audit.consumed, audit.failed, audit.live) == (30, 4, 10, 16)
            assert audit.reasons["failed: payload lost"] == 10
            assert any("payload of 10 rows is lost" in getattr(event, "text", "") for event in told)
            assert queue.get("work", 100).array("x").tobytes() == np.repeat(values_of(0, 10), 2)[4:].tobytes()
            for each in (client, other):
                each.close()


def test_a_step_with_lost_rows_is_filled_again(run: Durable) -> None:
    with run.client("one") as one, run.client("two") as two:
        # given a full step, leased, of rows of two writers
        one.queue.declare("train", needs=["x"], batch_rows=4)
        for writer in (one, two, one, two):
            writer.queue.put({"x": np.arange(2.0)})
        step = one.queue.get("train")
        assert step.ids.tolist() == [0, 1, 2, 3]
        # when the memory of one is lost
        run.kill()
        for file in run.memory.glob(f"s{two.session}-*"):
            file.unlink()
        assert run.start()["lost"] == 4
        # then what is left is leased as the same step
        with pytest.raises(LeaseLost):
            step.ack()
        again = one.queue.get("train")
        assert (again.index, again.ids.tolist()) == (0, [0, 1, 4, 5])


@pytest.mark.parametrize("durability", ["process", "host"])
def test_what_a_restart_of_the_host_leaves(tmp_path: Path, durability: str) -> None:
    # given a run with rows put and rows completed
    with Durable(tmp_path / "run", durability=durability) as run, run.client() as client:
        queue = client.queue
        queue.declare("work", needs=["x"], gives=["y"])
        queue.declare("read", needs=["x", "y"])
        queue.put({"x": values_of(0, 1000)})
        queue.get("work", 500).complete({"y": values_of(1000, 500)})
        # when the host starts again: shared memory is gone, and every process
        run.kill()
        if durability == "host":
            shutil.rmtree(run.memory)
        boot = tmp_path / "boot_id"
        boot.write_text("another-start-of-the-host\n")
        script = f'mount --bind {boot} /proc/sys/kernel/random/boot_id && exec "$@"'
        with Child(serve, str(run.directory), {}, within=["unshare", "--mount", "sh", "-c", script, "sh"]) as server:
            try:
                said = server.hear()
            except AssertionError as error:
                pytest.skip(f"the id of a boot cannot be changed here: {error}")
            # then what was on the disk is there, and what lay in memory is not trusted
            found = said["found"]
            assert (found["lost"], found["rows"]) == ((1000, 0) if durability == "process" else (0, 1000))
            with af.connect(said["addresses"][-1], shared_memory=False) as after:
                assert [session.name for session in after.queue.status().sessions] == ["driver", "client"]
                if durability == "host":
                    batch = after.queue.get("read", 1000)
                    assert batch.array("x").tobytes() == values_of(0, 500).tobytes()
                    assert batch.array("y").tobytes() == values_of(1000, 500).tobytes()
                with contextlib.suppress(af.AsyncFlowError):  # its session ended with its host
                    client.close()
                after.queue.end(cancel=True)


def publish(trainer: RawClient, version: int) -> None:
    trainer.send(cmd.Announce(version=version))
    trainer.send(cmd.Publish(version=version, part=cmd.VersionPart(manifest=b"m", transport="t", where=b"")))


def test_reports_before_a_kill_change_no_answer_after_it(tmp_path: Path) -> None:
    with Durable(tmp_path / "run", max_staleness=1) as run, run.client() as client:
        # given a replica that waits for a version, and another one that took the last prompts with it
        queue = client.queue
        queue.declare("rollout", needs=["x"], gives=["y"], admits=True)
        queue.declare("train", needs=["y"], batch_rows=4)
        queue.put({"x": np.arange(12.0)})
        trainer, waits, takes = (RawClient(run.address, name) for name in ("trainer", "gen-0", "gen-1"))
        trainer.send(cmd.OpenPublisher())
        publish(trainer, 0)
        for replica in (waits, takes):
            replica.send(cmd.ReportLoaded(version=0))
        takes.send(cmd.LeaseRows(task="rollout", count=8))
        asked = in_thread(waits.send, cmd.LeaseRows(task="rollout", count=1, most=8, timeout_s=200.0))
        until(lambda: queue.status().parked, "the request")
        publish(trainer, 1)
        takes.send(cmd.ReportLoaded(version=1))
        takes.send(cmd.LeaseRows(task="rollout", count=4))
        # when it asks for more after a report, and the server is killed
        assert queue.status().parked[0].why
        with pytest.raises(DeadlineExceeded):
            takes.send(cmd.LeaseRows(task="rollout", count=1))
        # then the journal gives the same answers
        assert run.again()["differing"] == 0
        queue.end(cancel=True)
        assert isinstance(asked(), Ended)


def test_what_is_staged_decided_and_rolled_back_outlives_the_server(tmp_path: Path) -> None:
    with Durable(tmp_path / "run", quorum=3, max_swapping=1, keep_versions=3) as run, run.client() as client:
        # given two of three replicas that must have a version staged, and one of them waits to load it
        queue = client.queue
        queue.declare("rollout", needs=["x"], gives=["y"], admits=True)
        queue.declare("train", needs=["y"], batch_rows=4)
        trainer, *replicas = (RawClient(run.address, name) for name in ("trainer", "gen-0", "gen-1", "gen-2"))
        trainer.send(cmd.OpenPublisher())
        for version in (5, 6):
            publish(trainer, version)
        for replica in replicas[:2]:
            replica.send(cmd.AwaitVersion(after=5))
            replica.send(cmd.ReportStaged(version=6))
        # when the server is killed between staging and loading
        assert run.again()["differing"] == 0
        with pytest.raises(DeadlineExceeded, match="2 of the 3 required replicas"):
            replicas[0].send(cmd.Swap(version=6))
        replicas[2].send(cmd.ReportStaged(version=6))
        assert replicas[0].send(cmd.Swap(version=6)) == cmd.Permitted(version=6)
        # and killed after the decision, with one permission given
        assert run.again()["differing"] == 0
        with pytest.raises(DeadlineExceeded, match=r"at most 1 at a time \(max_swapping\), now gen-0"):
            replicas[1].send(cmd.Swap(version=6))
        replicas[0].send(cmd.ReportLoaded(version=6))
        assert replicas[1].send(cmd.Swap(version=6)) == cmd.Permitted(version=6)
        replicas[1].send(cmd.ReportLoaded(version=6))
        queue.put({"x": np.arange(4.0)})
        lease = replicas[0].send(cmd.LeaseRows(task="rollout", count=2))
        assert trainer.send(cmd.Rollback(version=5, reason="it diverged")) == cmd.RollbackDone(version=7, expired=2)
        # and killed after a rollback
        assert run.again()["differing"] == 0
        # then it is rolled back, decided, and the publisher is who it was
        status = queue.status()
        assert (status.version, status.committed) == (7, 7)
        with pytest.raises(LeaseLost):
            replicas[0].send(cmd.Renew(token=lease.token))
        assert replicas[1].send(cmd.LeaseRows(task="rollout", count=2)) == cmd.LoadFirst(version=7)
        assert replicas[1].send(cmd.AwaitVersion(after=6)).source == 5
        with pytest.raises(ConfigError, match="a run has one publisher at a time"):
            replicas[2].send(cmd.OpenPublisher())
        with pytest.raises(ConfigError, match="the trainer has not loaded version 7 yet"):
            publish(trainer, 8)
        trainer.send(cmd.ReportRestored(version=7))
        publish(trainer, 8)
        assert queue.audit().reasons == {"expired: version 6 was rolled back": 2}
        for each in (trainer, *replicas):
            each.close()


def test_nothing_is_acknowledged_that_the_disk_did_not_take(run: Durable) -> None:
    with run.client("one") as one, run.client("two") as two:
        two.queue.put({"x": [1.0]})
        # when a put is carried out, and the disk refuses its record: no file of the server's process may grow
        most = resource.prlimit(run.server.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        waiting = in_thread(one.queue.put, {"x": [2.0]})
        until(lambda: two.queue.audit().put == 2, "the put")
        # then it is not acknowledged, and further ones may not begin
        with pytest.raises(MemoryFull, match=r"has no room for this request: File too large\. Nothing was stored"):
            two.queue.put({"x": [3.0]}, timeout_s=0.0)
        # and when the disk takes it again, all goes on
        resource.prlimit(run.server.pid, resource.RLIMIT_FSIZE, most)
        assert waiting().first == 1
        assert two.queue.put({"x": [3.0]}, timeout_s=60.0).first == 2
        assert run.again()["rows"] == 3


def test_a_journal_that_has_grown_long_is_replaced_by_a_snapshot(run: Durable) -> None:
    with run.client() as client:
        (before,) = (run.directory / "journal").glob("journal-*")
        # when more is recorded than a journal may hold
        for number in range(9):
            client.queue.put({"x": [float(number)]}, key=f"{number}-" + "k" * (2 << 20))
        # then another has begun, and what came before it is there
        (after,) = (run.directory / "journal").glob("journal-*")
        assert after != before
        found = run.again()
        assert (found["rows"], found["differing"]) == (9, 0)
        assert found["records"] < 9
        assert client.queue.put({"x": [0.0]}, key="0-" + "k" * (2 << 20)).again
