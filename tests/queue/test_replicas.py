"""Two replicas of each block, in two homes: a home that is lost removes a place, and no rows. Real server, units in processes of
their own, and clients that see the memory of their own host only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from children import Child, hear, say
from hosts import Cluster, HostClient
from small_disk import on_disk
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, DigestMismatch, LeaseLost, MemoryFull, ProtocolError, StoreUnavailable
from asyncflow_sdk.interfaces import TransferQueue
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.queue import open_queue
from asyncflow_sdk.queue.connection import BlockingPort
from asyncflow_sdk.queue.protocol import decode_call, decode_result
from asyncflow_sdk.queue.replay import replay
from asyncflow_sdk.queue.stores import replicator
from asyncflow_sdk.queue.stores.blocks import pack_columns, to_image
from asyncflow_sdk.queue.stores.home_clients import HomeClients
from asyncflow_sdk.queue.stores.homes import HomeId, KnownHomes
from asyncflow_sdk.queue.stores.replica_chunks import ReplicaChunk, decode_kept, digest_of_chunk, encode
from asyncflow_sdk.types.blocks import Block, BlockPlace

REPLICAS = af.Store(kind="hosts", options={"replicas": 2, "fetch_s": 10.0})


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(replicator, "CHUNK_S", 60.0)
    cluster = Cluster(tmp_path, store=REPLICAS)
    with cluster.ends:
        yield cluster


def columns(rows: int, first: int = 0) -> dict[str, Any]:
    numbers = np.random.default_rng(first)
    return {
        "x": np.arange(first, first + rows),
        "wide": numbers.integers(0, 255, (rows, 1 << 12), np.uint8),
        "text": [f"{n}ä" * (n % 5) for n in range(first, first + rows)],
    }


def declare(cluster: Cluster, **options: Any) -> None:
    cluster.run.queue.declare("work", needs=["x", "wide", "text"], **options)


def put_on_a(cluster: Cluster) -> dict[str, Any]:
    """Start units on a and b, and put rows on a. Returns their columns."""
    cluster.unit("a")
    cluster.unit("b")
    declare(cluster)
    wanted = columns(4)
    cluster.client("a").put(wanted)
    return wanted


def check(batch: Any, wanted: dict[str, Any]) -> None:
    """Every value of the batch is bit-identical to the row's."""
    at = batch["x"] - wanted["x"][0]
    assert batch["wide"].tobytes() == wanted["wide"][at].tobytes()
    assert list(batch["text"]) == [wanted["text"][n] for n in at]


def read_all(queue: TransferQueue, wanted: dict[str, Any], count: int = 0) -> None:
    rows = len(wanted["x"])
    seen: list[int] = []
    while len(seen) < rows:
        with queue.get("work", count or rows, timeout_s=60) as batch:
            check(batch, wanted)
            seen += batch["x"].tolist()
            batch.ack()
    assert sorted(seen) == wanted["x"].tolist()


def replicated(cluster: Cluster) -> tuple[int, int]:
    status = cluster.run.queue.status()
    return status.replicated_bytes, status.payload_bytes


def near_the_server(cluster: Cluster) -> TransferQueue:
    connection = HostClient(cluster.run, "server")
    assert connection.directory is not None
    return open_queue(cluster.ends.enter_context(contextlib.closing(connection)))


def test_both_homes_hold_the_bytes_and_either_may_be_lost(cluster: Cluster) -> None:
    for host in "abc":
        cluster.unit(host)
    declare(cluster)
    wanted = columns(24)
    a = cluster.client("a")
    # given blocks of 3 rows, written on a
    for n in range(0, 24, 3):
        a.put({name: value[n : n + 3] for name, value in wanted.items()})
    assert a.connection.store.home == (1, 1)
    # then each has a replica on b or c, and both have some
    assert replicated(cluster)[0] == replicated(cluster)[1] > 24 << 12
    assert all(cluster.files(host) for host in "abc")
    # when a is lost
    cluster.run.evict_home(cluster.home("a"))
    # then no row is, and the values come from the replicas
    audit = cluster.run.audit()
    assert (audit.put, audit.live, audit.failed, audit.expired) == (24, 24, 0, 0)
    assert replicated(cluster)[0] == 0
    read_all(cluster.client("b"), wanted, 5)
    assert cluster.run.audit().consumed == 24


def test_a_replica_that_is_lost_costs_nothing(cluster: Cluster) -> None:
    wanted = put_on_a(cluster)
    cluster.run.evict_home(cluster.home("b"))
    assert replicated(cluster)[0] == 0 < replicated(cluster)[1]
    read_all(cluster.client("c"), wanted)
    assert cluster.run.audit().consumed == 4


def test_a_home_that_is_silent_removes_a_place_and_no_group_is_remade(cluster: Cluster) -> None:
    cluster.unit("a")
    cluster.unit("b")
    cluster.run.queue.declare("square", needs=["x"], gives=["y"])
    cluster.run.queue.declare("use", needs=["x", "y"])
    stage = cluster.client("a")
    stage.put({"x": np.arange(6)}, group_size=2)
    with stage.get("square", 12) as batch:
        batch.complete({"y": batch["x"] ** 2})
    cluster.run.queue.configure(home_silence_s=0.0)
    # when the unit of a is killed
    cluster.units["a"].kill()
    until(lambda: cluster.home("a").lost, "the loss of the home")
    # then
    audit = cluster.run.audit()
    assert (audit.put, audit.live, audit.expired, audit.failed) == (12, 12, 0, 0)
    with cluster.client("c").get("use", 12) as batch:
        assert (batch["y"] == batch["x"] ** 2).all()
        batch.ack()
    assert cluster.run.audit().consumed == 12


def test_rows_with_both_homes_lost_fail_and_may_be_put_again(cluster: Cluster) -> None:
    cluster.unit("a")
    cluster.unit("b")
    declare(cluster)
    wanted = columns(4)
    cluster.client("a").put(wanted, key="epoch-0")
    cluster.run.evict_home(cluster.home("b"))
    cluster.run.evict_home(cluster.home("a"))
    audit = cluster.run.audit()
    assert (audit.put, audit.failed, audit.live, audit.balanced) == (4, 4, 0, True)
    assert cluster.run.queue.status().payload_bytes == 0
    cluster.client("c").put(wanted, key="epoch-0")
    read_all(cluster.run.queue, wanted)


def test_homes_lost_at_once_lose_only_the_blocks_of_both(cluster: Cluster) -> None:
    for host in "abcd":
        cluster.unit(host)
    declare(cluster)
    wanted = columns(30)
    a = cluster.client("a")
    for n in range(30):
        a.put({name: value[n : n + 1] for name, value in wanted.items()})
    cluster.run.evict_home(cluster.home("a"))
    cluster.run.evict_home(cluster.home("b"))
    audit = cluster.run.audit()
    assert audit.failed + audit.live == 30
    assert 0 < audit.failed < 30
    seen = 0
    while seen < audit.live:
        with cluster.client("c").get("work", 30) as batch:
            check(batch, wanted)
            seen += len(batch["x"])
            batch.ack()
    assert cluster.run.audit().consumed == audit.live


@pytest.mark.parametrize("writer", ["a", "", "server"])
def test_every_kind_of_writer_has_a_second_place(cluster: Cluster, writer: str) -> None:
    # given a writer with a unit, one that sends to the server, and the server's process
    if writer != "a":
        cluster.unit("b")
    else:
        cluster.unit("a")  # no other unit: the replica goes to the server
    declare(cluster)
    wanted = columns(4)
    queue = near_the_server(cluster) if writer == "server" else cluster.client(writer)
    queue.put(wanted)
    assert replicated(cluster)[0] == replicated(cluster)[1] > 0
    # when the unit is lost
    cluster.run.evict_home(cluster.home("a" if writer == "a" else "b"))
    # then the server's memory has the rows
    read_all(cluster.client("c"), wanted)
    assert cluster.run.audit().consumed == 4


def test_a_writer_on_an_event_loop_replicates(cluster: Cluster) -> None:
    cluster.unit("a")
    cluster.unit("b")
    declare(cluster)
    wanted = columns(4)
    asyncio.run(cluster.client("a").aio.put(wanted))  # type: ignore[attr-defined]
    assert replicated(cluster)[0] == replicated(cluster)[1] > 0
    cluster.run.evict_home(cluster.home("a"))
    read_all(cluster.client("c"), wanted)


def test_a_reader_takes_the_other_place_if_one_cannot_be_reached(cluster: Cluster) -> None:
    wanted = put_on_a(cluster)
    reader = cluster.client("c")
    reader.connection.store.read((), {})  # type: ignore[attr-defined]
    # when the unit of a does not answer, and is not lost
    cluster.units["a"].stop()
    # then a reader elsewhere, which would have read there, has the rows
    read_all(reader, wanted)
    assert not cluster.home("a").lost
    cluster.units["a"].resume()


def test_a_reader_takes_the_other_place_if_its_own_memory_is_gone(cluster: Cluster) -> None:
    wanted = put_on_a(cluster)
    for name in cluster.files("a"):
        next((cluster.folder / "a").glob(f"*/{name}")).unlink()
    read_all(cluster.client("a"), wanted)


def test_rows_are_late_if_neither_place_can_be_reached(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, store=af.Store(kind="hosts", options={"replicas": 2, "fetch_s": 0.5}))
    with cluster.ends:
        wanted = put_on_a(cluster)
        cluster.units["a"].stop()
        cluster.units["b"].stop()
        reader = cluster.client("c")
        with pytest.raises(StoreUnavailable, match="could not be reached"):
            reader.get("work", 4, timeout_s=1)
        cluster.units["b"].resume()
        read_all(reader, wanted)
        cluster.units["a"].resume()
        assert cluster.run.audit().failed == 0


# ---- servers and units that die


def serve_run(folder: str, level: str) -> None:
    with af.serve(folder, address="tcp://127.0.0.1:0", store=REPLICAS, durability=level) as run:
        recovered = run.recovered
        say([run.address, 0 if recovered is None else recovered.differing])
        hear()


class KilledCluster(Cluster):
    """Its server is a process of its own, which ends after its clients."""

    def __init__(self, folder: Path, servers: contextlib.ExitStack, level: str) -> None:
        self.servers = servers
        super().__init__(folder, level=level)

    def serve(self, **options: Any) -> None:
        self.server = self.servers.enter_context(Child(serve_run, str(self.folder / "run"), options["level"]))
        address, differing = self.server.hear()
        assert not differing
        self.run = af.connect(address)
        self.ends.callback(self.run.close)


@pytest.mark.parametrize("level", ["process", "host"])
def test_a_resumed_run_knows_both_places(tmp_path: Path, level: str) -> None:
    servers = contextlib.ExitStack()
    cluster = KilledCluster(tmp_path, servers, level)
    with servers, cluster.ends:
        cluster.unit("a")
        declare(cluster)
        wanted = columns(6)
        cluster.client("a").put(
            {name: value[:3] for name, value in wanted.items()}
        )  # its replica: the server's memory
        cluster.unit("b")
        cluster.client("a").put({name: value[3:] for name, value in wanted.items()})  # its replica: on b
        places = replicated(cluster)
        assert places[0] == places[1] > 0
        # when the server is killed, twice: the second time a snapshot has the places
        for _ in range(2):
            cluster.server.kill()
            cluster.serve(level=level)
            assert replicated(cluster) == places
        # then the loss of a home removes a place
        until(lambda: cluster.home("b").address, "the unit's return")
        cluster.run.evict_home(cluster.home("a"))
        assert replicated(cluster)[0] == 0
        read_all(cluster.client("c"), wanted)
        assert cluster.run.audit().consumed == 6
        assert replay(tmp_path / "run").differing == 0
        cluster.run.queue.end()


def test_a_unit_that_is_away_leaves_one_place_and_says_so(
    cluster: Cluster, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.unit("b")
    declare(cluster)
    wanted = columns(4)
    near = near_the_server(cluster)
    near.put({name: value[:1] for name, value in wanted.items()})
    # when the only other unit is frozen: it is tried once, and its rows have one place
    cluster.units["b"].stop()
    monkeypatch.setattr(replicator, "CHUNK_S", 1.0)
    with caplog.at_level("WARNING"):
        near.put({name: value[1:2] for name, value in wanted.items()})
        near.put({name: value[2:3] for name, value in wanted.items()})
    assert len([record for record in caplog.records if "server's memory only" in record.message]) == 1
    before, whole = replicated(cluster)
    assert 0 < before < whole
    # and a client with a unit has the server as the second place
    cluster.units["b"].resume()
    monkeypatch.setattr(replicator, "CHUNK_S", 60.0)
    cluster.unit("a")
    cluster.client("a").put({name: value[3:] for name, value in wanted.items()})
    assert replicated(cluster)[0] > before
    read_all(cluster.client("c"), wanted)


def test_replicas_are_freed_and_their_memory_is_used_again(cluster: Cluster) -> None:
    cluster.unit("a")
    cluster.unit("b")
    declare(cluster)
    a = cluster.client("a")
    size = 0
    for n in range(40):
        wanted = columns(128, 128 * n)
        a.put(wanted)
        read_all(cluster.run.queue, wanted)
        size = max(size, on_disk(cluster.folder / "b", "*/h*!s*"))
    # 40 blocks of half a megabyte took no more than one segment
    assert cluster.files("b")
    assert size <= 8 << 20
    assert replicated(cluster) == (0, 0)
    # and nothing is left once their session has ended
    a.connection.close()  # type: ignore[attr-defined]
    until(lambda: not cluster.files("a") + cluster.files("b"), "the end of the files")


def test_replicas_survive_their_units_process(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.unit("a")
    cluster.unit("b")
    declare(cluster)
    wanted = columns(4)
    a = cluster.client("a")
    a.put({name: value[:2] for name, value in wanted.items()})
    # when the unit with the replica dies, and another one finds its files
    cluster.units["b"].kill()
    until(lambda: not cluster.home("b").address, "the home without a unit")
    cluster.unit("b")
    monkeypatch.setattr(replicator, "CHUNK_S", 15.0)  # the first chunk goes to the unit that is dead
    a.put({name: value[2:] for name, value in wanted.items()})
    cluster.run.evict_home(cluster.home("a"))
    read_all(cluster.client("c"), wanted)


def test_a_writer_whose_home_was_lost_sends_its_block_again_with_a_replica(cluster: Cluster) -> None:
    cluster.unit("a")
    cluster.unit("b")
    declare(cluster)
    wanted = columns(4)
    a = cluster.client("a")
    a.put({name: value[:2] for name, value in wanted.items()})
    cluster.run.evict_home(cluster.home("a"))
    until(lambda: cluster.home("a").epoch == 2, "the next epoch")
    # when it writes into the lost epoch once more
    a.put({name: value[2:] for name, value in wanted.items()})
    # then the block is in the next one, with a replica; the first block has one place
    assert a.connection.store.home == (1, 2)
    assert 0 < replicated(cluster)[0] < replicated(cluster)[1]
    read_all(cluster.client("c"), wanted)


def test_large_blocks_are_sent_in_chunks(cluster: Cluster) -> None:
    cluster.unit("a")
    cluster.unit("b")
    cluster.run.queue.declare("large", needs=["x"])
    x = np.random.default_rng(0).integers(0, 1 << 60, (3, 1 << 20))
    cluster.client("a").put({"x": x})
    cluster.run.evict_home(cluster.home("a"))
    with cluster.client("c").get("large", 3) as batch:
        assert batch["x"].tobytes() == x.tobytes()
        batch.ack()


def test_a_call_without_a_replica_has_no_field_for_it(cluster: Cluster) -> None:
    connection = cluster.run.queue.connection
    block = Block("s1-1", 0, 1, 1, 64, ("x",))
    assert len(msgspec.msgpack.decode(connection.encode_call(cmd.GetAudit(), block))) == 6
    call = decode_call(connection.encode_call(cmd.GetAudit(), block, None, None, BlockPlace("h1.1!s1-1", 0, 1)))
    assert (call.block, call.replica) == (block, BlockPlace("h1.1!s1-1", 0, 1))


def test_the_number_of_replicas_is_checked() -> None:
    for wrong in (0, 3, "2", 1.5):
        with pytest.raises(ConfigError, match="keeps 1 or 2 replicas"):
            af.serve(store=af.Store(kind="hosts", options={"replicas": wrong}))


# ---- calls and chunks that no client of ours sends


def test_a_replica_that_a_client_made_up_is_refused(cluster: Cluster) -> None:
    cluster.unit("a")
    cluster.unit("b")
    declare(cluster)
    client = cluster.client("a").connection  # type: ignore[attr-defined]
    packed = pack_columns(columns(2))
    port = BlockingPort(client)
    mine = f"h2.1!s{client.session}-0123abcd-1"
    for place in (
        BlockPlace(f"h1.1!s{client.session}-0123abcd-1", 0, 5),  # in the same home
        BlockPlace(f"h2.1!s{client.session + 1}-0123abcd-1", 0, 5),  # of another session
        BlockPlace(f"h2.1!s{client.session}-1", 0, 5),  # not written by a unit
        BlockPlace(f"s{client.session}-1", 0, 5),
        BlockPlace("s0-0123abcd-1", 0, 5),
        BlockPlace("../x", 0, 5),
        BlockPlace(mine, 1, 5),
        BlockPlace(mine, -64, 5),
        BlockPlace(mine, 0, 0),
    ):
        for image in (None, to_image(packed)):
            pending = port.write(cmd.AddRows(groups=2, group_size=1, columns={}), packed)
            block = pending.stored.block
            rows = None if image is None else image.rows
            body = client.encode_call(pending.command, block, None, rows, place)
            answer = decode_result(client.wire.exchange(body, 60, () if image is None else image.parts).body)
            assert answer.error is not None
            assert answer.error[0] in ("SchemaError", "ProtocolError"), answer.error
            # and the client may use the memory of its block again
            assert block is not None
            assert block.packed_serial in answer.freed
    assert cluster.run.audit().put == 0
    assert replicated(cluster) == (0, 0)
    # a replica in a home that is lost meanwhile is left out
    pending = port.write(cmd.AddRows(groups=2, group_size=1, columns={}), packed)
    body = client.encode_call(pending.command, pending.stored.block, None, None, BlockPlace(mine, 0, 5))
    cluster.run.evict_home(cluster.home("b"))
    assert decode_result(client.wire.exchange(body, 60).body).error is None
    assert replicated(cluster)[0] == 0 < replicated(cluster)[1]


def test_a_unit_refuses_chunks_that_are_damaged_or_made_up(cluster: Cluster) -> None:
    cluster.unit("a")
    connection = cluster.client("c").connection  # type: ignore[attr-defined]
    unit = HomeClients(KnownHomes(connection.homes()), connection.key).client(HomeId(1, 1))
    data = np.arange(256, dtype=np.uint8)
    good = ReplicaChunk(1, 1, connection.session, 1024, 0, digest_of_chunk(data))
    for error, changes in (
        (DigestMismatch, {"digest": 1}),
        (LeaseLost, {"epoch": 2}),
        (LeaseLost, {"home": 2}),
        (LeaseLost, {"serial": 1 << 40, "start": 256}),
        (ProtocolError, {"start": 256}),
        (ProtocolError, {"start": -64}),
        (ProtocolError, {"serial": 5}),
        (ProtocolError, {"nbytes": 255}),
        (ProtocolError, {"nbytes": 1 << 60}),
    ):
        with pytest.raises(error):
            unit.call(encode(msgspec.structs.replace(good, **changes)), 60, "", (data,))  # type: ignore[arg-type]
    for frames in ((), (data, data)):
        with pytest.raises(ProtocolError):
            unit.call(encode(good), 60, "", frames)
    with pytest.raises(MemoryFull):
        unit.call(encode(msgspec.structs.replace(good, nbytes=1 << 45)), 60, "", (data,))
    # the unit goes on
    place = decode_kept(unit.call(encode(good), 60, "", (data,)).body)
    for start in (256, 512, 768):
        more = msgspec.structs.replace(good, start=start, serial=place.serial)
        assert decode_kept(unit.call(encode(more), 60, "", (data,)).body) == place
    with pytest.raises(LeaseLost):  # it is complete
        unit.call(encode(more), 60, "", (data,))
