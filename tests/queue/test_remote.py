"""Clients that share no memory with the server: the same values, the same guarantees, clear errors."""

import asyncio
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import Child, say
from flaky_proxy import FlakyProxy
from queue_runs import WAITS, Durable, RawClient, Served, running, serve
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import AccessDenied, ConfigError, ProtocolError, SchemaError, ServerLost
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types import ColumnSpec

MIB = 1 << 20


@pytest.fixture
def run() -> Iterator[Served]:
    with running("remote") as run:
        yield run


def large(rows: int, seed: int = 0) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    numbers = np.random.default_rng(seed)
    return {"x": numbers.integers(0, 255, (rows, 1 << 16), np.uint8), "y": numbers.random(rows)}


# ---- who is remote


def use_from_another_shared_memory(address: str, key: str, memory: str) -> None:
    """Put and get where /dev/shm is another one that looks the same."""
    Path(memory).mkdir()
    (Path(memory) / "owner").touch()
    with af.connect(address, key=key, name="child") as run:
        run.queue.put({"x": np.arange(5.0)})
        with run.queue.get("read", 10, at_least=10) as batch:
            say(sorted(batch.array("x").tolist()))
            batch.ack()


def test_a_client_in_another_container_shares_no_memory_though_all_has_the_same_name(tmp_path: Path) -> None:
    with running("tcp", tmp_path / "run") as run:
        run.queue().declare("read", needs=["x"])
        run.queue().put({"x": np.arange(5.0, 10.0)})
        script = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        container = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
        arguments = run.address, str(tmp_path / "run" / "run.key"), str(run.memory)
        with Child(use_from_another_shared_memory, *arguments, within=container) as child:
            try:
                assert child.hear() == list(range(10))
            except AssertionError as error:
                if "unshare" not in str(error):
                    raise
                pytest.skip(f"nothing can be mounted here: {error}")


def test_what_goes_through_shared_memory_alone_says_so(run: Served) -> None:
    with pytest.raises(
        ConfigError, match="transport 'shm' goes through the run's shared memory.*on the server's host"
    ):
        run.client().weight_publisher("shm")


# ---- keys


def test_a_run_that_other_hosts_reach_is_served_with_keys(tmp_path: Path) -> None:
    with af.serve(tmp_path / "run", address="tcp://0.0.0.0:0") as run:
        # given a copy of its key, and its own socket, which needs none
        key = tmp_path / "copy.key"
        shutil.copy(tmp_path / "run" / "run.key", key)
        address = run.address.replace("0.0.0.0", "127.0.0.1")
        run.queue.declare("work", needs=["x"], gives=["y"])
        # when
        for options in ({"shared_memory": False}, {}):
            with af.connect(address, key=key, **options) as other:
                other.queue.put({"x": np.arange(5.0)})
                with other.queue.get("work", 5) as batch:
                    batch.complete({"y": batch.array("x") * 2})
        with af.connect(tmp_path / "run") as local:
            assert local.audit().put == 10
        # and without it, or with another's
        with pytest.raises(AccessDenied, match="needs a key"):
            af.connect(address, insecure=True)
        af.serve(tmp_path / "other", address="tcp://0.0.0.0:0").close()
        with pytest.raises(AccessDenied, match="is it the run.key of that run"):
            af.connect(address, key=tmp_path / "other" / "run.key")
        with pytest.raises(ConfigError, match="there is no run key at"):
            af.connect(address, key=tmp_path / "nowhere")
        key.chmod(0o644)
        with pytest.raises(ConfigError, match="chmod 600"):
            af.connect(address, key=key)


def test_where_keys_may_lie_and_where_none_are_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is served with keys only.*Serve a run directory"):
        af.serve(address="tcp://0.0.0.0:0")
    with pytest.raises(ConfigError, match="key= is for a tcp address"):
        af.serve(tmp_path, key=tmp_path / "k")
    with af.serve(address="tcp://127.0.0.1:0", key=tmp_path / "keys" / "mine.key") as run:
        with af.connect(run.address, key=tmp_path / "keys" / "run.key") as other:
            assert other.audit().put == 0
    with pytest.raises(ConfigError, match="insecure=True is for a tcp address"):
        af.serve(tmp_path, insecure=True)
    with pytest.raises(ConfigError, match="give key= or insecure=True"):
        af.serve(address="tcp://127.0.0.1:0", key=tmp_path / "keys" / "mine.key", insecure=True)
    with af.serve(address="tcp://127.0.0.1:0", insecure=True) as run:
        with af.connect(run.address, insecure=True) as other:
            assert other.audit().put == 0
        with pytest.raises(AccessDenied, match="has no keys"):
            af.connect(run.address, key=tmp_path / "keys" / "run.key")


# ---- payload


def test_large_and_small_columns_of_many_puts_come_back_bit_for_bit(run: Served) -> None:
    # given columns of more than a piece and of less, empty ones too
    queue, reader = run.queue(), run.queue("reader")
    numbers = np.random.default_rng(0)
    columns = {
        "large": numbers.integers(0, 255, (3, MIB), np.uint8),
        "edge": numbers.integers(0, 255, (3, MIB // 3 + 1), np.uint8)[:, : MIB // 3],
        "ragged": [numbers.random(size) for size in (0, 50_000, 3)],
        "text": ["", "\u00e4\0" * 40_000, "x"],
        "none": np.empty((3, 0), np.float32),
        "empty": [np.empty((0, 2)) for _ in range(3)],
        "scalar": numbers.random(3),
    }
    queue.declare("read", needs=list(columns))
    # when
    for index in ([0, 1], [2]):
        queue.put({name: [column[i] for i in index] if isinstance(column, list) else column[index] for name, column in columns.items()})  # fmt: skip
    batch = reader.get("read", 3)
    # then
    for name in ("large", "edge", "none", "scalar"):
        assert batch.array(name).tobytes() == np.ascontiguousarray(columns[name]).tobytes()
        assert not batch.array(name).flags.writeable
    for name in ("ragged", "empty"):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(batch.ragged(name), columns[name], strict=True))
    assert batch.texts("text") == columns["text"]
    # and torch tensors may be written into
    tensor = batch.torch("large")
    tensor.zero_()
    assert batch.array("large").tobytes() == columns["large"].tobytes()
    batch.ack()
    assert queue.status().payload_bytes == 0


def test_a_client_learns_how_much_a_call_may_hold() -> None:
    with running("remote", max_call_bytes=1 << 20) as run:
        far, near = run.queue(), run.queue("near", shared_memory=True)
        with pytest.raises(ProtocolError, match="is too large; this server takes at most 1048576: send fewer rows"):
            far.put(large(16))
        far.put(large(8))
        near.put(large(40))  # payload that does not go over the socket
        assert near.audit().put == 48


RAGGED = {"x": ColumnSpec("fixed", "uint8", (1 << 16,)), "r": ColumnSpec("ragged", "int64")}


def image(rows: int) -> bytes:
    """A block as it travels: rows, columns and bytes behind 16 bytes, where each column's values and offsets lie, and those."""
    x, r = large(rows)["x"].tobytes(), np.array([1, 2, 3] * (rows // 2)).tobytes()
    offsets = np.cumsum([0, *([2, 1] * (rows // 2))]).tobytes()
    parts = [part.ljust(-(-len(part) // 64) * 64, b"\0") for part in (x, r, offsets)]
    begins = np.cumsum([128, *map(len, parts)]).tolist()
    head = [0, 0, rows, 2, begins[3], begins[0], len(x), -1, begins[1], len(r), begins[2]]
    return struct.pack("<11q", *head).ljust(128, b"\0") + b"".join(parts)


def patched(block: bytes, word: int, value: int) -> bytes:
    return block[: 8 * word] + struct.pack("<q", value) + block[8 * (word + 1) :]


def offsets_of(block: bytes) -> int:
    return int(struct.unpack_from("<q", block, 80)[0]) // 8


DAMAGES = {
    "none": lambda block: b"",
    "a byte less": lambda block: block[:-1],
    "more": lambda block: block + bytes(64),
    "noise": lambda block: bytes(range(256)) * 3,
    "other rows": lambda block: patched(block, 2, 3),
    "no columns": lambda block: patched(block, 3, 0),
    "values elsewhere": lambda block: patched(block, 5, 1 << 40),
    "values before the block": lambda block: patched(block, 5, -64),
    "offsets elsewhere": lambda block: patched(block, 10, 1 << 40),
    "falling offsets": lambda block: patched(block, offsets_of(block) + 1, 9),
    "offsets past the values": lambda block: patched(block, offsets_of(block) + 2, 1 << 40),
}


def test_payload_that_is_not_what_was_said_of_it_is_refused(run: Served) -> None:
    attacker = RawClient(run.run.addresses[1])
    for rows in (2, 40):  # in one message, and in pieces
        put = cmd.AddRows(groups=rows, group_size=1, columns=RAGGED, timeout_s=1)
        for damage in DAMAGES.values():
            damaged = damage(image(rows))
            with pytest.raises(SchemaError):
                attacker.send_inline(put, rows, damaged)
        for count in (-1, 0, 1, 3, 2**62):
            with pytest.raises((SchemaError, ProtocolError)):
                attacker.send_inline(put, count, image(rows))
        other = RAGGED | {"x": ColumnSpec("fixed", "float64", (-1,))}
        with pytest.raises(SchemaError):
            attacker.send_inline(cmd.AddRows(groups=rows, group_size=1, columns=other), rows, image(rows))
    for command in (cmd.LeaseRows(task="t", count=1, timeout_s=0), cmd.AddRows(groups=2, group_size=1, columns={})):
        with pytest.raises(af.AsyncFlowError):
            attacker.send_inline(command, 2, image(2))
    status = run.queue("other").status()
    assert (status.put, status.payload_bytes) == (0, 0)
    assert attacker.send_inline(cmd.AddRows(groups=2, group_size=1, columns=RAGGED), 2, image(2)).count == 2
    attacker.close()


def test_what_a_put_that_failed_was_given_is_not_sent_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a proxy that stands still after the hello, so that a put ends without an answer
    monkeypatch.setattr(WAITS, "GRACE_S", 0.0)
    monkeypatch.setattr("asyncflow_sdk.wire.exchange.SLOWEST_BYTES_PER_S", 1e12)
    with running("remote", insecure=True) as run:
        proxy = FlakyProxy(int(run.address.rsplit(":", 1)[1]), pieces=(10**9, 10**9))
        queue = run.queue("test", address=proxy.address)
        values = large(400)["x"]
        true = values.copy()
        proxy.halt()
        with pytest.raises(ServerLost, match="gave no answer in"):
            queue.put({"x": values}, timeout_s=0.3)
        # when its caller uses the memory again
        values[:] = 0
        proxy.resume()
        queue.declare("read", needs=["x"])
        queue.put({"x": true[:1]}, timeout_s=60)
        # then nobody ever sees the new values as the old ones: they were not sent, or the old ones were
        batch = run.queue("reader").get("read", 401)
        assert batch.array("x").tobytes() in (true[:1].tobytes(), true.tobytes() + true[:1].tobytes())
        monkeypatch.undo()


# ---- the end of the server


def test_who_waits_for_a_server_learns_of_its_death() -> None:
    # given a server in another process, a thread and an event loop that wait for rows for long
    with Child(serve, None, {"address": "tcp://127.0.0.1:0"}) as child:
        address = child.hear()["addresses"][-1]
        queue = af.connect(address).queue
        queue.declare("never", needs=["nothing"])
        waiting = [
            in_thread(queue.get, "never", timeout_s=10_000),
            in_thread(lambda: asyncio.run(queue.aio.get("never", timeout_s=10_000))),
        ]
        until(lambda: queue.status().parked_count == 2, "both to wait")
        # when
        child.kill()
        # then both say which process ended, and so does every later call: not that the server gave no answer in time
        outcomes = [wait() for wait in waiting]
        for _ in range(20):
            with pytest.raises(ServerLost) as later:
                queue.audit()
            outcomes.append(later.value)
        for error in outcomes:
            assert isinstance(error, ServerLost)
            assert f"the server at {address} is gone: its process {child.pid} has ended" in str(error)


@pytest.mark.usefixtures("soon")
def test_a_server_that_is_killed_and_comes_back_has_what_came_over_the_wire(tmp_path: Path) -> None:
    values: Any = large(30)["x"]
    with (
        Durable(tmp_path / "run", durability="host", address="tcp://127.0.0.1:0") as run,
        run.client(shared_memory=False) as client,
    ):
        # given a client without its memory, with rows put, rows leased, and rows completed
        queue = client.queue
        queue.declare("work", needs=["x"], gives=["y"])
        queue.declare("end", needs=["x", "y"])
        queue.put({"x": values}, key="all")
        first, second = queue.get("work", 10), queue.get("work", 10)
        first.complete({"y": first.array("x")[:, 0].astype(np.float64)})
        run.kill()
        # when another server serves the same directory, while the client waits for it
        putting = in_thread(queue.put, {"x": values}, key="all")
        assert run.start()["lost"] == 0
        # then it knows the rows, whose they are, and what they are
        assert putting().again
        second.complete({"y": second.array("x")[:, 0].astype(np.float64)})
        with queue.get("work", 30) as third:
            assert third.array("x").tobytes() == values[20:].tobytes()
            third.complete({"y": third.array("x")[:, 0].astype(np.float64)})
        with queue.get("end", 30) as batch:
            assert batch.array("x").tobytes() == values.tobytes()
            assert batch.array("y").tolist() == values[:, 0].tolist()
            batch.ack()
        audit = queue.audit()
        assert (audit.put, audit.consumed, audit.live) == (30, 30, 0)
