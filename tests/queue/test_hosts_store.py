"""The store of several hosts: values stay where they are written, are mapped there, and are fetched elsewhere."""

import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hosts import Cluster, rows_of, specs
from queue_runs import in_threads, running
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import (
    AccessDenied,
    ConfigError,
    DigestMismatch,
    LeaseLost,
    ProtocolError,
    SchemaError,
    StoreUnavailable,
)
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.memory import Mapper
from asyncflow_sdk.queue.connection import BlockingPort, Connection
from asyncflow_sdk.queue.coroutines import run_blocking
from asyncflow_sdk.queue.stores import fetch
from asyncflow_sdk.queue.stores.blocks import pack_columns
from asyncflow_sdk.queue.stores.fetch import (
    FetchPart,
    FetchReply,
    FetchRequest,
    HomeFetcher,
    SentBlock,
    check_parts,
    read_parts,
    unpack_parts,
)
from asyncflow_sdk.queue.stores.homes import SERVER_MEMORY, HomeId, KnownHomes, home_of, segment_prefix
from asyncflow_sdk.queue.stores.reader import ColumnReader
from asyncflow_sdk.types.blocks import BlockSlices
from asyncflow_sdk.wire import generate_keys


def columns(first: int, rows: int) -> dict[str, Any]:
    numbers = np.random.default_rng(first)
    return {
        "fixed": np.arange(first, first + 3.0 * rows).reshape(rows, 3)[:, ::2],
        "wide": numbers.integers(0, 255, (rows, 1 << 15), np.uint8),
        "ragged": [numbers.random((n % 5) * 100).astype(np.float32) for n in range(first, first + rows)],
        "text": [f"{n}ä" * (n % 7) for n in range(first, first + rows)],
    }


SPECS = specs(columns(0, 8))


def check(found: Any, ids: list[int], wanted: dict[int, dict[str, bytes]]) -> None:
    for name, column in found.items():
        assert rows_of(column) == [wanted[i][name] for i in ids], name
        assert not column.values.flags.writeable


def written(cluster: Cluster, parts: list[Any]) -> dict[int, dict[str, bytes]]:
    """Put 8 rows in each store; the bytes of each row."""
    wanted = {}
    for number, store in enumerate(parts):
        values = columns(8 * number, 8)
        cluster.put(store, values)
        for name, column in pack_columns(values).items():
            for row, value in enumerate(rows_of(column)):
                wanted.setdefault(8 * number + row, {})[name] = value
    return wanted


# ---- names


def test_a_name_of_a_segment_says_its_home_and_epoch() -> None:
    for where in (SERVER_MEMORY, HomeId(1, 1), HomeId(12, 345)):
        assert home_of(segment_prefix(where, 7) + "1") == where
    for name in ("", "s7-1", "h", "h0.1!s7-1", "h1.0!s7-1", "h1!s7-1", "h1.1", "h01.1!s7-1", "h-1.1!s7-1", "h1.1!w"):
        assert home_of(name) == SERVER_MEMORY


# ---- values


@pytest.mark.parametrize("secure", [True, False])
def test_values_are_mapped_on_their_host_and_fetched_elsewhere_in_any_mixture(tmp_path: Path, secure: bool) -> None:
    # given rows on two hosts, of two clients each
    cluster = Cluster(tmp_path, insecure=not secure)
    with cluster.ends:
        homes = [cluster.unit(name) for name in "ab"]
        wanted = written(cluster, [cluster.store(name) for name in "abab"])
        assert all(any(Path(home.directory).glob(f"h{home.home}.1!s*")) for home in homes)
        numbers = np.random.default_rng(0)
        mixtures = [list(range(8)), list(range(8, 16)), [3], [15], list(range(32))]
        mixtures += [numbers.permutation(32)[:n].tolist() for n in (2, 5, 16, 32)] + [[1, 1, 9, 9, 1]]
        for host in ("a", "b", ""):
            reader = cluster.store(host)
            for ids in mixtures:
                # when
                slices = cluster.locate(ids, *SPECS)
                found = reader.read(slices, SPECS)
                # then
                check(found, ids, wanted)
                assert list(found) == list(SPECS)
                in_memory = all(reader.writable(each, "wide", SPECS) is not None for each in slices)
                assert in_memory == (ids in {"a": (mixtures[0], [3]), "b": (mixtures[1], [15])}.get(host, ()))


def test_columns_of_one_row_are_in_different_homes(cluster: Cluster) -> None:
    cluster.unit("a"), cluster.unit("b")
    a, b = cluster.store("a"), cluster.store("b")
    x, y = np.arange(10.0), np.arange(10, 20)
    cluster.put(a, {"x": x})
    cluster.put(b, {"y": y[:5]}, range(5))
    cluster.put(a, {"y": y[5:]}, range(5, 10))
    schema = specs({"x": x, "y": y})
    ids = [9, 0, 4, 5, 2]
    for store in (a, b, cluster.store("")):
        found = store.read(cluster.locate(ids, "x", "y"), schema)
        assert found["x"].values.tolist() == x[ids].tolist()
        assert found["y"].values.tolist() == y[ids].tolist()


def test_many_threads_fetch_large_values_at_once(cluster: Cluster) -> None:
    cluster.unit("a"), cluster.unit("b")
    for name in "ab":
        cluster.put(cluster.store(name), {"x": np.arange(3 << 20, dtype=np.int64).reshape(3, 1 << 20)})
    schema = specs({"x": np.zeros((1, 1 << 20), np.int64)})
    reader = cluster.store("")

    def read(number: int) -> int:
        ids = [number % 6, (number + 3) % 6]
        found = reader.read(cluster.locate(ids, "x"), schema)["x"].values
        return int((found[:, 0] == [(i % 3) << 20 for i in ids]).all() and (np.diff(found) == 1).all())

    assert in_threads(6, read) == 6 * [1]


def test_bytes_copied_for_one_request_are_bounded(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    # given two columns of 64,000 bytes in four rows, and what a unit answers with
    home = cluster.unit("a")
    values = {name: [np.arange(2000.0) + row for row in range(4)] for name in "xy"}
    cluster.put(cluster.store("a"), values)
    reader = ColumnReader(Mapper(lambda segment: Path(home.directory)))

    def read(ids: list[int]) -> int:
        return sum(
            part.nbytes
            for part in read_parts(reader, [FetchPart(each, specs(values)) for each in cluster.locate(ids, *"xy")])[1]
        )

    monkeypatch.setattr(fetch, "MOST_COPIED_BYTES", 100_000)
    # then rows that are in order are not copied, others are, and all columns count
    assert read([0, 1, 2, 3]) > 128_000
    assert read([2, 0]) > 64_000
    with pytest.raises(SchemaError, match="'y' of these rows has 64000 bytes, and 36000 more .* lease fewer rows"):
        read([3, 1, 0, 2])


def test_rows_in_the_servers_memory_are_fetched_from_the_server() -> None:
    with running("remote") as run:
        queue, client = run.queue(), run.client("far")
        queue.declare("read", needs=["x"])
        queue.put({"x": np.arange(40_000.0).reshape(4, -1)})
        connection: Connection = client.queue.connection  # type: ignore[attr-defined]
        seeing: Connection = run.client("near", shared_memory=True).queue.connection  # type: ignore[attr-defined]
        # given a lease of rows, located
        answer = run_blocking(BlockingPort(seeing).call(cmd.LeaseRows(task="read", count=4)))
        # when
        (part,) = answer.slices
        reply, payload = connection.fetch(request(part, answer.schema), 60)
        # then
        (found,) = unpack_parts(reply, payload, [FetchPart(part, answer.schema)])
        assert found["x"].values.tobytes() == np.arange(40_000.0).tobytes()
        # and what is in no segment there is refused
        other = msgspec.structs.replace(part, segments=("h1.1!s1-1",))
        with pytest.raises(LeaseLost):
            connection.fetch(request(other, answer.schema), 60)
        for bad in ("../x", "queue", "owner"):
            with pytest.raises((LeaseLost, SchemaError, ProtocolError)):
                connection.fetch(request(msgspec.structs.replace(part, segments=(bad,)), answer.schema), 60)
        assert queue.status().garbage == 0


def request(slices: BlockSlices, schema: Any) -> FetchRequest:
    return FetchRequest((FetchPart(slices, schema),))


# ---- units that die, move and are lost


def test_rows_of_a_unit_that_died_are_late_and_not_lost(cluster: Cluster) -> None:
    # given a unit that is killed
    home = cluster.unit("a")
    wanted = written(cluster, [cluster.store("a")])
    ids, near, far = list(range(8)), cluster.store("a"), cluster.store("b")
    check(far.read(cluster.locate(ids, *SPECS), SPECS), ids, wanted)
    cluster.units["a"].kill()
    # then its host goes on, and others say what is missing
    check(near.read(cluster.locate(ids, *SPECS), SPECS), ids, wanted)
    cluster.put(near, columns(8, 8))
    with pytest.raises(StoreUnavailable, match=r"home 1 \(a\).* could not be reached .* not lost"):
        cluster.store("b", fetch_s=0.5).read(cluster.locate(ids, *SPECS), SPECS)
    # and when another unit starts there, while a reader waits, it has the same rows at another address
    patient = cluster.store("b", fetch_s=100.0)
    waiting = in_thread(lambda: patient.read(cluster.locate(ids, *SPECS), SPECS))
    again = cluster.unit("a")
    assert (again.home, again.epoch, again.directory) == (home.home, home.epoch, home.directory)
    assert (again.address, again.key) != (home.address, home.key)
    check(waiting(), ids, wanted)
    check(far.read(cluster.locate(ids, *SPECS), SPECS), ids, wanted)
    cluster.units["a"].say("end")
    assert cluster.units["a"].wait() == 0
    assert not Path(home.directory).exists()


def test_a_lost_epoch_is_never_read_and_its_writes_go_to_the_next(cluster: Cluster) -> None:
    # given a home that is given up, with a block whose call the server refuses
    home = cluster.unit("a")
    near, far = cluster.store("a"), cluster.store("b")
    written(cluster, [near])
    waiting = near.write(pack_columns({"x": np.arange(1000.0)}), copy=False)
    cluster.run.evict_home(home, "evicted by a test")
    until(lambda: cluster.home("a").epoch == 2, "the next epoch")
    until(lambda: not list(Path(home.directory).glob("h*!*")), "the end of the old files")
    with pytest.raises(ConfigError, match="epoch 1 of home 1"):
        cluster.run.evict_home(home)
    far.read((), {})
    # then nobody reads it
    with pytest.raises(LeaseLost, match=r"epoch 1 of home 1 \(a\) is lost"):
        far.read(cluster.locate([0], *SPECS), SPECS)
    # and the block is written again, in the new epoch, from which both read it
    again = near.rewrite(waiting)
    assert again is not None
    assert again.block is not None
    assert home_of(again.block.segment) == HomeId(1, 2)
    cluster.index.add(np.array([100]), again.block, np.arange(1))
    schema = specs({"x": np.zeros(1)})
    for store in (near, far):
        assert store.read(cluster.locate([100], "x"), schema)["x"].values.tolist() == [0]
    near.discard(again)
    near.discard(waiting)


def test_a_client_writes_elsewhere_if_the_memory_of_its_host_is_removed(cluster: Cluster) -> None:
    home = cluster.unit("a")
    store = cluster.store("a")
    cluster.put(store, {"x": np.arange(3.0)})
    cluster.units["a"].stop()  # else it removes files, too
    shutil.rmtree(home.directory)
    # its columns go to the server, beside their call
    stored = store.write(pack_columns({"x": np.zeros(9 << 17)}), copy=False)
    assert stored.block is None
    assert stored.image is not None
    assert stored.image.rows == 9 << 17
    # and a lost block is sent as it was
    cluster.units["a"].kill()


def test_a_client_without_memory_sends_its_columns_to_the_server(cluster: Cluster) -> None:
    stored = cluster.store("").write(pack_columns({"x": np.arange(3.0)}), copy=True)
    assert stored.block is None
    assert stored.image is not None


def test_a_unit_takes_no_other_key_than_the_runs(cluster: Cluster) -> None:
    cluster.unit("a")
    written(cluster, [cluster.store("a")])
    stranger = cluster.store("b", key=generate_keys().run)
    with pytest.raises(AccessDenied):
        stranger.read(cluster.locate([0], *SPECS), SPECS)
    with pytest.raises(AccessDenied, match="needs the run's key"):
        cluster.store("b", key=None).read(cluster.locate([0], *SPECS), SPECS)


def test_a_store_that_is_closed_ends_its_fetches(cluster: Cluster) -> None:
    cluster.unit("a")
    written(cluster, [cluster.store("a")])
    cluster.units["a"].stop()
    reader = cluster.store("b", fetch_s=60.0)
    waiting = in_thread(lambda: reader.read(cluster.locate([0], *SPECS), SPECS))
    time.sleep(0.3)  # inside the fetch, as far as one can tell from here
    reader.close()
    assert isinstance(waiting(), LeaseLost)


# ---- hostile requests


def test_locations_that_a_client_made_up_harm_nobody(cluster: Cluster) -> None:
    # given the location of rows that exist
    cluster.unit("a")
    wanted = written(cluster, [cluster.store("a"), cluster.store("a")])
    ids = [3, 12, 1, 9, 15]
    truth = [*cluster.locate(ids, *SPECS), *cluster.locate(list(range(8)), *SPECS)]
    numbers = np.random.default_rng(0)
    reader = cluster.store("b")
    client = cluster.connection("b")
    fetcher = HomeFetcher(KnownHomes(client.homes()), client.key, None, timeout_s=60.0)
    outcomes = set()
    for _ in range(400):
        # when any of its numbers is another one
        slices = truth[numbers.integers(len(truth))]
        field = ("blocks", "entries", "counts", "fields")[numbers.integers(4)]
        raw = bytearray(getattr(slices, field))
        width = 8 if field == "blocks" else 4
        at = int(numbers.integers(len(raw) // width)) * width
        value = int(numbers.choice([-1, 0, 1, 7, 64, 1 << 20, (1 << 31) - 1, numbers.integers(1 << 31)]))
        raw[at : at + width] = value.to_bytes(width, "little", signed=True)
        if numbers.random() < 0.1:
            del raw[-int(numbers.integers(1, 9)) :]
        changed = msgspec.structs.replace(slices, **{field: bytes(raw)})
        try:
            found = fetcher.fetch({HomeId(1, 1): [FetchPart(changed, {n: SPECS[n] for n in slices.columns})]})
            outcomes.add("read")
            for columns_ in found.values():
                for name, column in columns_[0].items():
                    known = {wanted[i][name] for i in wanted}
                    assert set(rows_of(column)) <= known or field in ("fields", "blocks")
        except (ProtocolError, LeaseLost, SchemaError) as error:
            outcomes.add(type(error).__name__)
    # then it is refused or reads rows, and the unit goes on
    assert outcomes >= {"ProtocolError", "LeaseLost"}
    check(reader.read(cluster.locate(ids, *SPECS), SPECS), ids, wanted)
    for segment in ("../../etc/passwd", "h1.1!s1-../x", "h1.2!s1-1", "s1-1", "owner"):
        bad = msgspec.structs.replace(truth[-1], segments=(segment,))
        with pytest.raises((LeaseLost, ProtocolError)):
            fetcher.fetch({HomeId(1, 1): [FetchPart(bad, SPECS)]})
    fetcher.close()


def test_answers_that_are_damaged_or_not_what_was_requested_are_refused() -> None:
    schema = specs({"x": np.zeros(2)})
    slices = BlockSlices(
        ("x",), bytes(4), ("s1-1",), np.array([[0, 0, 1, 2, 192, 1]]).tobytes(), bytes(4), b"\2\0\0\0"
    )
    part = FetchPart(slices, schema)
    check_parts([part])
    memory = np.zeros(192, np.uint8)
    for blocks, error in (
        ((), ProtocolError),
        ((SentBlock(2, 191, 0),), ProtocolError),
        ((SentBlock(3, 192, 0),), ProtocolError),
        ((SentBlock(2, -192, 0),), ProtocolError),
        ((SentBlock(2, 192, 0),), DigestMismatch),
    ):
        with pytest.raises(error):
            unpack_parts(FetchReply(blocks), memory, [part])


def test_columns_in_memory_are_refused_where_they_have_to_be_on_a_disk(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'hosts' has columns in the memory of their hosts.*durability='process'"):
        af.serve(tmp_path / "run", store="hosts", durability="host", address="tcp://127.0.0.1:0")
