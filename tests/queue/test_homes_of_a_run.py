"""A run with payload on several hosts: a real server, storage units in processes of their own, and clients that see the memory
of their own host only."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hosts import Cluster
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.cli.doctor import examine
from asyncflow_sdk.cli.inspection import Finding
from asyncflow_sdk.errors import ConfigError, Ended, StoreUnavailable
from asyncflow_sdk.interfaces import TransferQueue
from asyncflow_sdk.interfaces.store import HomeOffer
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.queue.connection import Port
from asyncflow_sdk.queue.protocol import CallResult, LedgerCatalog
from asyncflow_sdk.queue.stores.homes import HomeId, KnownHomes
from asyncflow_sdk.queue.stores.hosts import HostsStore
from asyncflow_sdk.types import VERSION_SPANS, Batch
from asyncflow_sdk.types.tasks import TaskSpec
from asyncflow_sdk.wire import ensure_keys
from asyncflow_sdk.workflow.data import load_prompts
from asyncflow_sdk.workflow.evaluation import EVALUATION, SCORES, Evaluator, TrainerState
from asyncflow_sdk.workflow.loops.record_files import read_steps
from asyncflow_sdk.workflow.loops.recorder import Recorder
from asyncflow_sdk.workflow.specs import declare_task


def number_of_tokens(response_ids: Any) -> list[float]:
    return [float(len(ids)) for ids in response_ids]


def test_columns_go_from_host_to_host_in_one_hop(cluster: Cluster) -> None:
    # given hosts a and b, which see neither each other's memory nor the server's
    cluster.unit("a")
    cluster.unit("b")
    cluster.run.queue.declare("work", needs=["x", "text"])
    producer, consumer, near = cluster.client("a"), cluster.client("b"), cluster.client("a")
    x = np.arange(12.0).reshape(4, 3)
    # when rows made on a are read on b, on a, and by the server's process
    for reader in (consumer, near, cluster.run.queue):
        producer.put({"x": x, "text": ["one", "", "three", "four"]})
        with reader.get("work", 4) as batch:
            # then they are the same
            assert batch["x"].tolist() == x.tolist()
            assert list(batch["text"]) == ["one", "", "three", "four"]
            batch.ack()
    # and none of their bytes was with the server
    assert producer.connection.store.home == (1, 1)
    assert not list(Path(cluster.run.directory or "", "shm").glob("s*"))
    assert cluster.run.queue.status().held_bytes < 1 << 16
    assert cluster.run.audit().consumed == 12


def test_a_reader_of_an_absent_host_waits_until_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Enough(Exception):
        pass

    cluster = Cluster(tmp_path, store=af.Store(kind="hosts", options={"fetch_s": 0.0}))
    with cluster.ends:
        cluster.unit("a")
        cluster.run.queue.declare("work", needs=["x"], max_attempts=1)
        cluster.client("a").put({"x": np.arange(5)})
        cluster.units["a"].kill()
        until(lambda: not cluster.home("a").address, "the home without a unit")
        # when its rows are leased again and again
        deadlines: list[float] = []
        call = Port.call

        async def recorded(port: Port, command: Any) -> CallResult:
            if isinstance(command, cmd.LeaseRows):
                deadlines.append(time.monotonic() + command.timeout_s)
                if len(deadlines) == 5:
                    raise Enough
            return await call(port, command)

        monkeypatch.setattr(Port, "call", recorded)
        reader, began = cluster.client("b"), time.monotonic()
        with pytest.raises(Enough):
            reader.get("work", 5, timeout_s=60.0)
        # then no request ends before the first one would have, and the rows have lost no attempt
        assert min(deadlines) >= began + 60.0
        assert cluster.run.audit().live == 5


@pytest.mark.parametrize("parts", [False, True])
def test_a_lease_is_renewed_while_its_columns_are_fetched(cluster: Cluster, parts: bool) -> None:
    cluster.unit("a")
    queue = cluster.run.queue
    queue.declare("train", needs=["x"], lease_s=3.0, max_attempts=1, batch_rows=2)
    cluster.client("a").put({"x": np.arange(2)})

    def read() -> list[int]:
        reader = cluster.client("b")
        if not parts:
            with reader.get("train") as batch:
                batch.ack()
                return batch["x"].tolist()  # type: ignore[no-any-return]
        with reader.steps("train", part_rows=2) as steps:
            step = next(iter(steps))
            rows = [x for part in step.parts() for x in part["x"].tolist()]
            step.ack()
            return rows

    def lasts_s() -> float:
        oldest = queue.status().oldest
        return 0.0 if oldest is None else round(oldest.since_s + oldest.left_s, 3)

    # when the host of leased columns does not answer for longer than the lease
    cluster.units["a"].stop()
    rows = in_thread(read)
    until(lambda: lasts_s() > 6.0, "renewals")
    cluster.units["a"].resume()
    # then they are read, in the only attempt
    assert rows() == [0, 1]
    assert cluster.run.audit().consumed == 2


@pytest.mark.parametrize("parts", [False, True], ids=["a rank", "a part"])
def test_ranks_and_parts_of_a_step_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: bool
) -> None:
    cluster = Cluster(tmp_path, store=af.Store(kind="hosts", options={"fetch_s": 0.2}))
    with cluster.ends:
        cluster.unit("a")
        queue = cluster.run.queue
        queue.declare("train", needs=["x"], max_attempts=1, **({"batch_rows": 4} if parts else {}))
        near, far = cluster.client("a"), cluster.client("b")
        near.put({"x": np.arange(4)})
        failures: list[StoreUnavailable] = []
        read = HostsStore.read

        def noted(store: HostsStore, *arguments: Any) -> Any:
            try:
                return read(store, *arguments)
            except StoreUnavailable as error:
                failures.append(error)
                raise

        monkeypatch.setattr(HostsStore, "read", noted)

        def rows_of(rank: int) -> list[int]:
            if parts:
                with far.steps("train", part_rows=2, timeout_s=60) as steps:
                    step = next(iter(steps))
                    found = [x for part in step.parts() for x in part["x"].tolist()]
                    step.ack()
                    return found
            with (near, far)[rank].get("train", 4, group="g", rank=rank, world_size=2, timeout_s=60) as batch:
                batch.ack()
                return batch["x"].tolist()  # type: ignore[no-any-return]

        # when the host of the columns cannot be reached by a rank, or for a part
        cluster.units["a"].stop()
        readers = [in_thread(rows_of, rank) for rank in range(1 if parts else 2)]
        until(lambda: len(failures) >= 3, "several failed reads")
        cluster.units["a"].resume()
        # then they are read once it can, under the same lease
        assert sorted(x for reader in readers for x in reader()) == [0, 1, 2, 3]
        assert cluster.run.audit().consumed == 4


def test_rows_put_on_a_lost_host_fail_by_name_and_may_be_put_again(cluster: Cluster) -> None:
    cluster.unit("a")
    cluster.run.queue.declare("work", needs=["x"])
    cluster.client("a").put({"x": np.arange(4)}, group_size=2, key="epoch-0")
    cluster.run.queue.put({"x": np.arange(3)})  # these are in the server's memory
    # when the host is given up
    cluster.run.evict_home(cluster.home("a"), "its disk burns")
    # then
    audit = cluster.run.audit()
    assert (audit.put, audit.failed, audit.live, audit.balanced) == (11, 8, 3, True)
    (reason,) = {reason for group in cluster.run.queue.failed() for reason in group.reasons}
    assert "payload lost: home a was lost, evicted by" in reason
    assert "its disk burns" in reason
    # when they are put again
    again = cluster.client("b").put({"x": np.arange(4)}, group_size=2, key="epoch-0")
    assert again.count == 8
    assert cluster.run.audit().live == 11


@pytest.mark.parametrize("steps", [6, None])
def test_prompts_whose_columns_were_on_a_lost_host_are_fed_again_and_trained_once(
    tmp_path: Path, steps: int | None
) -> None:
    cluster = Cluster(tmp_path, steps=steps)
    with cluster.ends:
        queue = cluster.run.queue
        queue.declare("rollout", needs=["prompt"], gives=["response"])
        queue.declare("train", needs=["prompt", "response"], batch_rows=8)
        prompts = [f"prompt {number}" for number in range(24)]
        read = prompts if steps else lambda: iter(prompts)  # in memory, or a stream without a last step
        feeder = cluster.run.feed(read, group_size=2, chunk=3, epochs=1)  # for six steps
        trained: list[str] = []

        def fill(steps: int, worker: TransferQueue) -> None:
            while queue.status().step < steps:
                with worker.get("rollout", 8, timeout_s=60) as batch:
                    batch.complete({"response": batch.texts("prompt")})

        def train(steps: int) -> None:
            for _ in range(steps):
                with queue.get("train", timeout_s=60) as batch:
                    trained.extend(batch.texts("prompt"))
                    batch.ack()

        # when a host with the first responses is lost
        cluster.unit("a")
        with cluster.client("a").get("rollout", 4, timeout_s=60) as batch:
            batch.complete({"response": batch.texts("prompt")})
        cluster.run.evict_home(cluster.home("a"))
        fill(5, queue)
        train(4)
        # and one with the last responses, when all prompts were put and all steps are full
        cluster.unit("b")
        fill(6, cluster.client("b"))
        cluster.run.evict_home(cluster.home("b"))
        fill(6, queue)
        train(2)
        # then each prompt was trained once, and feeder and workers know that nothing is left
        feeder.join(60)
        with pytest.raises(Ended):
            queue.get("rollout", timeout_s=60)
        assert Counter(trained) == dict.fromkeys(prompts, 2)
        audit = cluster.run.audit()
        assert (audit.consumed, audit.failed, audit.live, audit.balanced) == (48, 12, 0, True)
        assert feeder.fed == 24


def test_an_evaluation_says_how_many_of_its_rows_were_lost(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[Any] = []
    monkeypatch.setattr(cluster.run, "report", notes.append)
    for task in (
        TaskSpec(name="make", needs=("prompt_ids",), gives=SCORES.needs[1:], partitions=(EVALUATION,)),
        SCORES,
    ):
        declare_task(cluster.run.queue, task)
    prompts = {"prompt_ids": [[1], [2]]}
    evaluation = af.Evaluation(prompts=prompts, every=1, reward=number_of_tokens)
    evaluator = Evaluator(cluster.run, evaluation, load_prompts(prompts, "prompt_ids"), "", 1, TrainerState())
    # given an evaluation with its rows on a host
    cluster.unit("a")
    cluster.client("a").put(prompts, key=f"{EVALUATION}-0", partition=EVALUATION, version=1)
    evaluator.start()
    # when the host is lost
    cluster.run.evict_home(cluster.home("a"))
    # then it says so, and the next one is begun
    until(lambda: cluster.run.audit().put == 4, "the rows of the next evaluation")
    (note,) = notes
    text = "2 of 2 rows of an evaluation failed, and it has no score; the last one: payload lost: home a was lost"
    assert note.text.startswith(text)
    # and one of which a part is lost has a score, which is none of the run
    cluster.unit("b")
    for reward, there in ((1.0, cluster.client("b")), (0.5, cluster.run.queue)):
        made = {"response_ids": [[3]], VERSION_SPANS: [np.zeros((1, 2), np.int32)], "reward": np.float32([reward])}
        there.get("make").complete(made)
        if there is not cluster.run.queue:
            cluster.run.evict_home(cluster.home("b"))
    until(lambda: len(notes) > 1 and cluster.run.audit().put == 6, "the rows of another evaluation")
    text = (
        "1 of 2 rows of an evaluation failed, and the others' score, 0.5, counts for nothing; the last one: payload"
    )
    assert notes[1].text.startswith(text)
    assert (len(notes), evaluator.results, evaluator.best) == (2, [], None)


def test_a_home_without_a_sign_of_life_is_given_up(cluster: Cluster) -> None:
    cluster.unit("a")
    cluster.run.queue.declare("work", needs=["x"])
    cluster.client("a").put({"x": np.arange(2)})
    cluster.run.queue.configure(home_silence_s=0.0)
    # when its unit dies
    cluster.units["a"].kill()
    # then
    until(lambda: cluster.run.audit().failed == 2, "the loss of the home")
    assert "silent for" in cluster.home("a").lost


def test_status_audit_and_doctor_know_the_homes_and_what_was_lost_with_them(cluster: Cluster) -> None:
    cluster.unit("a")
    cluster.run.queue.declare("work", needs=["x"])
    cluster.client("a").put({"x": np.arange(4.0)}, group_size=2)
    address = next(each for each in cluster.run.addresses if each.startswith("tcp:"))

    def link(key: Path = cluster.folder / "run" / "run.key") -> Finding:
        return [each for each in examine([], [], [], [address], key).findings if each.where == address][-1]

    # with a unit
    server, home = cluster.run.queue.status().homes
    assert (server.name, server.state, server.payload_bytes) == ("server", "served", 0)
    assert (home.name, home.state, home.address) == ("a", "served", cluster.home("a").address)
    assert home.payload_bytes >= 4 * 8
    assert cluster.run.audit().homes[1].payload_bytes == home.payload_bytes
    assert 0 < cluster.run.ping_home(cluster.home("a")) < 60
    assert (link().level, link().subject) == ("fine", "home 1 (a)")
    # with another key
    ensure_keys(cluster.folder / "other.server.key", cluster.folder / "other.key")
    assert link(cluster.folder / "other.key").level == "fails"
    # without a unit
    cluster.units["a"].kill()
    until(lambda: cluster.run.queue.status().homes[1].state == "absent", "the home without a unit")
    assert (link().level, link().message[:15]) == ("warning", "no storage unit")
    with pytest.raises(StoreUnavailable, match=r"home 1 \(a\) has no storage unit"):
        cluster.run.ping_home(cluster.home("a"))
    # and lost
    cluster.run.evict_home(cluster.home("a"))
    home = cluster.run.audit().homes[1]
    assert (home.state, home.rows_failed, home.payload_bytes) == ("lost", 8, 0)
    assert "evicted by" in home.detail
    assert "8 rows failed" in link().message


def test_segments_of_sessions_that_have_ended_are_removed_by_the_unit(cluster: Cluster) -> None:
    cluster.unit("a")
    cluster.run.queue.declare("work", needs=["x"])
    producer = cluster.client("a")
    producer.put({"x": np.arange(2)})
    producer.connection.close()  # type: ignore[attr-defined]
    assert cluster.files("a")
    with cluster.client("b").get("work", 2) as batch:
        assert batch["x"].tolist() == [0, 1]
        batch.ack()
    until(lambda: not cluster.files("a"), "the end of the files")


def test_a_server_that_comes_back_knows_its_homes(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, durability="process")
    with cluster.ends:
        cluster.unit("a")
        cluster.run.queue.declare("work", needs=["x"])
        producer = cluster.client("a")
        producer.put({"x": np.arange(3)})
        producer.connection.close()  # type: ignore[attr-defined]
        # when the server ends with live rows, and another continues the run
        cluster.run.close()
        with pytest.raises(ConfigError, match="serve it with the same store again"):
            af.serve(tmp_path / "run", address="tcp://127.0.0.1:0")
        cluster.serve()
        # then the rows are where they were
        assert cluster.run.recovered is not None
        assert cluster.run.recovered.differing == 0
        with cluster.client("b").get("work", 3, timeout_s=60) as batch:
            assert batch["x"].tolist() == [0, 1, 2]
            batch.ack()
        assert cluster.run.audit().consumed == 3
        cluster.run.queue.end()


def test_a_server_that_comes_back_knows_what_was_lost_and_wants_it_again(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, durability="process")
    with cluster.ends:
        cluster.unit("a")
        cluster.run.queue.declare("square", needs=["x"], gives=["y"])
        cluster.run.queue.declare("use", needs=["y"])
        cluster.run.queue.put({"x": np.arange(4)}, key="k-0")
        stage = cluster.client("a")
        stage.put({"x": np.arange(10, 13)})
        with stage.get("square", 2) as batch:
            batch.complete({"y": batch["x"] ** 2})
        cluster.run.evict_home(cluster.home("a"))
        stage.connection.close()  # type: ignore[attr-defined]
        audit = cluster.run.audit()
        assert (audit.put, audit.failed, audit.live) == (7, 5, 2)
        # when another server continues the run
        cluster.run.close()
        cluster.serve()
        # then
        assert cluster.run.recovered is not None
        assert cluster.run.recovered.differing == 0
        again = cluster.run.audit()
        assert msgspec.structs.replace(again, homes=()) == msgspec.structs.replace(audit, homes=())
        assert [each.rows_failed for each in again.homes] == [0, 5]
        assert cluster.run.queue.put({"x": np.arange(4)}, key="k-0").count == 2
        with cluster.run.queue.get("square", 4) as batch:
            assert sorted(batch["x"].tolist()) == [0, 1, 2, 3]
            batch.complete({"y": batch["x"] ** 2})
        cluster.run.queue.get("use", 4).ack()
        assert cluster.run.audit().consumed == 4
        cluster.run.queue.end()


def test_samplers_choose_by_columns_on_other_hosts(cluster: Cluster) -> None:
    cluster.unit("a")
    cluster.run.queue.declare("work", needs=["x"], sampler=("by_column", {"column": "x"}))
    cluster.client("a").put({"x": np.array([1.0, 5.0, 3.0]), "z": np.arange(3)})
    with cluster.client("b").get("work", 2) as batch:
        assert sorted(batch["x"].tolist()) == [3.0, 5.0]
        batch.ack()
    # a task that comes later cannot measure them
    with pytest.raises(ConfigError, match="declare the task before rows are put"):
        cluster.run.queue.declare("late", needs=["z"], sampler=("by_column", {"column": "z"}))


def test_a_step_is_read_for_its_listener_from_the_host_that_has_it(tmp_path: Path) -> None:
    steps: list[Batch] = []
    with pytest.raises(ConfigError, match="set checkpoints=True"):
        af.serve(store="hosts", on_step=lambda number, read: None)
    reads: list[Any] = []
    cluster = Cluster(tmp_path, on_step=lambda number, read: reads.append(read), checkpoints=True)
    with cluster.ends:
        cluster.unit("a")
        cluster.run.queue.declare("train", needs=["x"], batch_rows=2)
        cluster.client("a").put({"x": np.arange(2)})
        with cluster.client("b").get("train", 2) as batch:
            batch.ack()
        until(lambda: reads, "the step")
        steps.append(reads[0]())
        assert steps[0]["x"].tolist() == [0, 1]


def test_a_step_in_a_home_that_came_back_is_recorded(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "record")
    recorded = (tmp_path / "record" / "steps").glob
    cluster = Cluster(tmp_path, sinks=[recorder], checkpoints=True)
    with cluster.ends:
        queue, home = cluster.run.queue, cluster.unit("a")
        queue.declare("train", needs=["x"], batch_rows=2)
        for step in range(3):
            # when a step of rows in a home is trained, as soon as its epoch has begun
            cluster.client("a").put({"x": np.arange(2) + step})
            queue.get("train").ack()
            until(lambda: recorder.errors or len(list(recorded("*.safetensors"))) > step, "the record")  # noqa: B023
            cluster.run.evict_home(home, "evicted by a test")
            until(lambda: cluster.home("a").epoch > home.epoch, "the next epoch")  # noqa: B023
            home = cluster.home("a")
        queue.send(cmd.AddCheckpoint(step=3, covers=3))
    recorder.close()
    # then it is recorded
    assert recorder.errors == []
    assert [batch["x"].tolist() for _, batch in read_steps(tmp_path / "record")] == [[0], [1], [2]], "one group of 16"


def test_a_question_for_a_newer_epoch_is_answered_by_a_read_that_began_after_it() -> None:
    # given a home that begins an epoch between any two reads
    reads = itertools.count(1)
    offer = HomeOffer(store="hosts", name="a", identity="", address="tcp://127.0.0.1:1")
    made = {"number": 1, "unit": 1, "offer": offer}
    homes = KnownHomes(LedgerCatalog(lambda asked: cmd.HomeList(homes=(cmd.HomeInfo(**made, epoch=next(reads)),))))
    # when it is looked for, at once after the read before
    for epoch in (1, 2, 3):
        found = homes.find(HomeId(1, epoch))
        # then it is there
        assert found is not None
        assert found.epoch == epoch
        assert homes.is_live(HomeId(1, epoch))
    assert next(reads) == 4, "a known epoch was read again"


def test_a_checkpoint_waits_for_rows_of_a_slow_host_and_the_server_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path / "record")
    cluster = Cluster(tmp_path, sinks=[recorder], checkpoints=True)
    with cluster.ends:
        cluster.unit("a")
        queue = cluster.run.queue
        queue.declare("train", needs=["x"], batch_rows=2)
        cluster.client("a").put({"x": np.arange(4)})
        first, second = queue.get("train"), queue.get("train")
        # given trained steps with columns on a host that the server does not see, and that does not answer
        monkeypatch.setattr(KnownHomes, "sees", lambda homes, home: False)
        cluster.units["a"].stop()
        first.ack()
        second.ack()
        checkpoint = in_thread(queue.send, cmd.AddCheckpoint(step=2, covers=2))
        until(lambda: queue.status().parked, "the checkpoint's wait")
        # then the checkpoint waits, and says for what, while others are answered
        (parked,) = queue.status().parked
        assert "the steps before 2 are still read by a listener" in parked.why
        cluster.client("b").put({"x": np.arange(2)})
        queue.get("train").give_back()
        assert cluster.run.audit().live == 6
        # when the host answers
        cluster.units["a"].resume()
        assert checkpoint() == cmd.Done()
        # then the steps were recorded before they became final
        assert cluster.run.audit().consumed == 4
        assert [batch["x"].tolist() for _, batch in read_steps(tmp_path / "record")] == [[0], [2]], "one group of 16"
    recorder.close()
    assert recorder.errors == []
