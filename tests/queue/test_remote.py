"""Clients that share no memory with the server: the same values, the same guarantees, bounded memory, clear errors."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from children import Child
from flaky_proxy import FlakyProxy
from queue_children import serve, serve_durably
from queue_runs import Run, blocks_in_use, in_threads, running
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import AccessDenied, ConfigError, LeaseLost, ProtocolError, SchemaError, ServerLost
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.queue import Connection, open_queue
from asyncflow_sdk.queue import connection as connections
from asyncflow_sdk.queue.payload import from_image, to_image
from asyncflow_sdk.queue.protocol import Call, Welcome, decode_answer, encode
from asyncflow_sdk.types import ColumnSpec
from asyncflow_sdk.types.columns import pack
from asyncflow_sdk.wire import client as rules
from asyncflow_sdk.wire.envelope import FRAGMENT_BYTES, WINDOW_BYTES


@pytest.fixture
def run() -> Iterator[Run]:
    with running("remote") as run:
        yield run


def large(rows: int, seed: int = 0) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    numbers = np.random.default_rng(seed)
    return {"x": numbers.integers(0, 255, (rows, 1 << 16), np.uint8), "y": numbers.random(rows)}


# ---- who is remote


def test_memory_is_shared_where_it_is_the_very_same(run: Served) -> None:
    # given what the server says of itself to a client here
    plain = Connection(run.address, "here")
    path = run.server.directory.path
    owner = (path / "owner").stat()
    welcome = Welcome(1, str(path), "", owner=(owner.st_dev, owner.st_ino), pid_key=connections.process_key(1))
    # then it is shared, unless anything of it differs
    assert not plain.inline
    assert connections._sees(welcome)
    for other in (
        {"directory": f"{path}-other"},
        {"owner": (owner.st_dev, owner.st_ino + 1)},
        {"pid_key": "another-boot " + welcome.pid_key.split(" ", 1)[1]},
        {"pid_key": ""},
        {"rows": "/nowhere"},
    ):
        assert not connections._sees(msgspec.structs.replace(welcome, **other)), other
    plain.close()


def test_what_goes_through_shared_memory_alone_says_so(run: Served) -> None:
    from asyncflow_sdk.weights import WeightPublisher

    with pytest.raises(
        ConfigError, match="transport 'shm' goes through the run's shared memory.*on the server's host"
    ):
        WeightPublisher(run.queue(), "shm")


# ---- keys


def test_a_run_that_other_hosts_reach_is_served_with_keys(tmp_path: Path) -> None:
    with af.serve(tmp_path / "run", address="tcp://0.0.0.0:0") as run:
        # given a copy of its key, and its own socket, which needs none
        key = tmp_path / "copy.key"
        key.write_bytes((tmp_path / "run" / "run.key").read_bytes())
        key.chmod(0o600)
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


def test_large_and_small_columns_come_back_bit_for_bit(run: Served) -> None:
    # given columns of more than a fragment and of less, empty ones too
    queue, reader = run.queue(), run.queue("reader")
    numbers = np.random.default_rng(0)
    columns = {
        "large": numbers.integers(0, 255, (3, FRAGMENT_BYTES), np.uint8),
        "edge": numbers.integers(0, 255, (3, FRAGMENT_BYTES // 3 + 1), np.uint8)[:, : FRAGMENT_BYTES // 3],
        "ragged": [numbers.random(size) for size in (0, 50_000, 3)],
        "text": ["", "\u00e4\0" * 40_000, "x"],
        "none": np.empty((3, 0), np.float32),
        "empty": [np.empty((0, 2)) for _ in range(3)],
        "scalar": numbers.random(3),
    }
    queue.declare("read", needs=list(columns))
    # when
    queue.put(columns)
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
    assert blocks_in_use(queue) == 0


def test_rows_from_many_puts_and_in_any_order_are_gathered_on_the_way(run: Served) -> None:
    queue = run.queue()
    queue.declare("read", needs=["x", "y"])
    parts = [large(3, seed) for seed in range(4)]
    for part in parts:
        queue.put(part)
    with queue.get("read", 12) as batch:
        assert batch.array("x").tobytes() == b"".join(part["x"].tobytes() for part in parts)
        assert batch.array("y").tobytes() == b"".join(part["y"].tobytes() for part in parts)
        batch.ack()


def test_the_servers_memory_is_used_again(run: Served) -> None:
    queue = run.queue()
    queue.declare("read", needs=["x"])
    arena = run.server._remote.arena
    for seed in range(30):
        queue.put(large(40, seed))
        with queue.get("read", 40) as batch:
            batch.ack()
    queue.audit()
    assert blocks_in_use(queue) == 0
    assert arena.nbytes < 8 * large(40)["x"].nbytes


def test_a_client_learns_how_much_a_call_may_hold() -> None:
    with af.serve(address="tcp://127.0.0.1:0", max_call_bytes=1 << 20) as run:
        with af.connect(run.address, shared_memory=False) as other:
            with pytest.raises(ProtocolError, match="is too large; this server takes at most 1048576"):
                other.queue.put(large(16))
            other.queue.put(large(8))
        with af.connect(run.address) as near:
            near.queue.put(large(40))  # payload that does not go over the socket
            assert near.audit().put == 48


def test_a_call_too_large_is_refused_here_and_there(run: Served) -> None:
    queue = run.queue()
    wire = queue._port.connection.wire
    wire.max_bytes = 1 << 20
    with pytest.raises(ProtocolError, match="is too large; this server takes at most 1048576: send fewer rows"):
        queue.put(large(40))
    # and what a client that does not keep to it sends is dropped, without harm to others
    wire.max_bytes = 1 << 40
    uploads = run.server._wire._uploads
    uploads._most_bytes = 1 << 20
    garbage = run.server._wire.garbage
    thread = threading.Thread(target=lambda: in_threads(1, lambda _: queue.put(large(40))), daemon=True)
    thread.start()
    until(lambda: run.server._wire.garbage > garbage, "the message to be dropped")
    assert run.queue("other").audit().put == 0
    uploads._most_bytes = 1 << 30
    thread.join(30)  # it is sent again
    assert run.queue("third").audit().put == 40


WORD = 8  # a header's words: magic, serial, rows, columns, bytes, then values, bytes and offsets of each column
HOSTILE = {
    "none": lambda image: b"",
    "a byte less": lambda image: image[:-1],
    "more": lambda image: image + bytes(64),
    "noise": lambda image: bytes(range(256)) * 3,
    "other rows": lambda image: patched(image, 2, 3),
    "no columns": lambda image: patched(image, 3, 0),
    "values elsewhere": lambda image: patched(image, 5, 1 << 40),
    "values before the block": lambda image: patched(image, 5, -64),
    "offsets elsewhere": lambda image: patched(image, 10, 1 << 40),
    "falling offsets": lambda image: patched(image, offsets_of(image) // WORD + 1, 9),
    "offsets past the values": lambda image: patched(image, offsets_of(image) // WORD + 2, 1 << 40),
}


def patched(image: bytes, word: int, value: int) -> bytes:
    return image[: WORD * word] + value.to_bytes(WORD, "little", signed=True) + image[WORD * (word + 1) :]


def offsets_of(image: bytes) -> int:
    return int.from_bytes(image[10 * WORD : 11 * WORD], "little")


@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("rows", [2, 40], ids=["in one message", "in fragments"])
def test_payload_that_is_not_what_was_said_of_it_is_refused(run: Served, how: str, rows: int) -> None:
    # given a well-formed call and a block that does not fit it
    columns = {"x": pack("x", large(rows)["x"]), "r": pack("r", [[1, 2], [3]] * (rows // 2))}
    specs = {name: column.spec for name, column in columns.items()}
    image = HOSTILE[how](b"".join(part.tobytes() for part in to_image(columns).parts))
    connection = run.queue()._port.connection
    put = cmd.Put(groups=rows, group_size=1, columns=specs, timeout_s=1)
    # when / then
    with pytest.raises(SchemaError):
        connection.answered(connection.wire.exchange(encode(Call(put, payload=rows, inline=True)), 5, [image]))
    assert run.server._remote.arena.blocks == 0
    assert run.queue("other").audit().put == 0


@pytest.mark.parametrize("rows", [-1, 0, 1, 3, 2**62])
@pytest.mark.parametrize(
    "spec", [ColumnSpec("fixed", "float64"), ColumnSpec("ragged", "float64"), ColumnSpec("fixed", "float64", (-1,))]
)
def test_sizes_that_make_no_sense_are_refused(rows: int, spec: ColumnSpec) -> None:
    image = to_image({"x": pack("x", np.arange(2.0))})
    with pytest.raises(SchemaError):
        from_image(np.concatenate(image.parts), rows, {"x": spec})
    with pytest.raises(SchemaError):
        from_image(np.zeros(16, np.uint8), rows, {"x": spec})


def test_payload_on_a_command_that_takes_none(run: Served) -> None:
    connection = run.queue()._port.connection
    columns = {"x": pack("x", np.arange(3.0))}
    image = to_image(columns)
    put = cmd.Put(groups=3, group_size=1, columns={"x": columns["x"].spec}, timeout_s=1)
    for call in (
        Call(cmd.GetAudit(), payload=3),
        Call(cmd.Lease(task="t", count=1, timeout_s=0), payload=3),
        Call(put),  # payload that the call does not speak of
        Call(msgspec.structs.replace(put, columns={}), payload=3),
    ):
        answer = decode_answer(connection.wire.exchange(encode(call), 5, image.parts).body)
        if not isinstance(call.command, cmd.GetAudit):
            assert answer.error is not None, call
    assert run.server._remote.arena.blocks == 0
    assert run.queue("other").audit().put == 0


# ---- what is lost on the way


def test_over_a_connection_that_breaks_all_the_time_every_row_comes_once_and_whole(
    run: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given
    monkeypatch.setattr(rules, "RESEND_S", 0.1)
    proxy = FlakyProxy(int(run.address.rsplit(":", 1)[1]), pieces=(10, 30))
    queue = open_queue(Connection(proxy.address, "remote", key=run.key, shared_memory=False))
    queue.declare("work", needs=["x"], gives=["sum"])
    queue.declare("end", needs=["sum"])
    # when
    parts = [large(3, seed) for seed in range(12)]
    for number, part in enumerate(parts):
        queue.put(part, key=str(number))
    sums = {}
    for _ in parts:
        with queue.get("work", 3) as batch:
            sums.update(zip(batch.ids.tolist(), batch.array("x").sum(1).tolist(), strict=True))
            batch.complete({"sum": batch.array("x").sum(1)})
    # then
    assert proxy.cuts > 3
    assert sums == {3 * n + i: part["x"][i].sum() for n, part in enumerate(parts) for i in range(3)}
    with queue.get("end", 36) as batch:
        assert batch.rows == 36
        batch.ack()
    assert queue.audit().consumed == 36
    proxy.steady = True
    queue._port.connection.close()
    proxy.close()


def test_an_answer_on_its_way_to_a_reader_that_does_not_read_is_not_sent_again(run: Served) -> None:
    # given rows whose values no socket buffer holds, and a session that asks and does not read
    queue = run.queue()
    queue.declare("read", needs=["x"])
    queue.put(large(400))
    proxy = FlakyProxy(int(run.address.rsplit(":", 1)[1]), pieces=(10**9, 10**9))
    slow = Connection(proxy.address, "slow", key=run.key, shared_memory=False).wire
    socket = slow._thread_socket().socket
    proxy.halt(there=False)
    seq = slow._numbering.begin()
    request = slow._numbering.frame(seq, encode(Call(cmd.Lease(task="read", count=400, timeout_s=9), inline=True)))
    sent = []
    post = run.server._wire._post

    def noted(route: Any, envelope: bytes, data: Any = None) -> Any:
        sent.append(0 if data is None else len(data))
        return post(route, envelope, data)

    run.server._wire._post = noted  # type: ignore[method-assign]
    # when it asks again and again
    for _ in range(20):
        socket.send(request)
    more = slow._numbering.frame(slow._numbering.begin(), encode(Call(cmd.GetAudit())))
    socket.send(more)
    until(lambda: 0 in sent, "the last of them")
    # then a window of its rows is under way, and what fits into buffers beside it
    first = sum(sent)
    assert WINDOW_BYTES <= first < 4 * WINDOW_BYTES
    proxy.resume()
    assert socket.poll(30_000)
    slow.close()
    proxy.close()


def test_rows_that_ended_before_they_were_sent_are_given_back(run: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    # given an answer whose values cannot be read any more
    queue = run.queue()
    queue.declare("read", needs=["x"])
    queue.put({"x": np.arange(3.0)})

    def gone(*_: object) -> None:
        raise LeaseLost("gone")

    with monkeypatch.context() as patch:
        patch.setattr(run.server._remote._reader, "read", gone)
        # when / then
        with pytest.raises(LeaseLost, match="the rows ended before their values were sent"):
            queue.get("read", 3, timeout_s=5)
    with queue.get("read", 3, timeout_s=5) as batch:
        assert batch.array("x").tolist() == [0, 1, 2]
        batch.ack()


def test_what_a_put_that_failed_was_given_is_not_sent_after_it(run: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a proxy that stands still after the hello, so that a put ends without an answer
    monkeypatch.setattr(rules, "GRACE_S", 0.0)
    monkeypatch.setattr(rules, "SLOWEST_BYTES_PER_S", 1e12)
    proxy = FlakyProxy(int(run.address.rsplit(":", 1)[1]), pieces=(10**9, 10**9))
    queue = open_queue(Connection(proxy.address, "remote", key=run.key, shared_memory=False))
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
    batch = run.queue().get("read", 401)
    assert batch.array("x").tobytes() in (true[:1].tobytes(), true.tobytes() + true[:1].tobytes())
    proxy.close()


# ---- the end of the server


def test_who_waits_for_a_server_learns_of_its_death(tmp_path: Path) -> None:
    # given a server in another process, a thread and an event loop that wait for rows for long
    with Child(serve) as child:
        _, address = child.hear()
        queue = open_queue(Connection(address, "waiting"))
        queue.declare("never", needs=["nothing"])
        outcomes: list[BaseException] = []

        def wait(blocking: bool) -> None:
            try:
                if blocking:
                    queue.get("never", timeout_s=10_000)
                else:
                    asyncio.run(queue.aio.get("never", timeout_s=10_000))
            except BaseException as error:
                outcomes.append(error)

        threads = [threading.Thread(target=wait, args=(blocking,), daemon=True) for blocking in (True, False)]
        for thread in threads:
            thread.start()
        until(lambda: queue.status().parked_count == 2, "both to wait")
        # when
        child.kill()
        for thread in threads:
            thread.join(100)
        # then both say who ended, and so does every later call: not that the server gave no answer in time
        assert len(outcomes) == 2
        for _ in range(20):
            with pytest.raises(ServerLost) as later:
                queue.audit()
            outcomes.append(later.value)
        for error in outcomes:
            assert isinstance(error, ServerLost)
            assert f"the server at {address} is gone: its process {child.pid} has ended" in str(error)
        queue._port.connection.close()


@pytest.mark.parametrize("durability", ["process", "host"])
def test_a_server_that_is_killed_and_comes_back_has_what_came_over_the_wire(
    tmp_path: Path, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a client without its memory, with rows put, rows leased, and rows completed
    monkeypatch.setattr(rules, "RESEND_S", 0.2)
    directory, address = str(tmp_path / "journal"), "tcp://127.0.0.1:0"
    with Child(serve_durably, directory, address, durability) as child:
        address = child.hear()
        queue = open_queue(Connection(address, "remote", shared_memory=False))
        queue.declare("work", needs=["x"], gives=["y"])
        queue.declare("end", needs=["x", "y"])
        values = large(30)
        queue.put({"x": values["x"]}, key="all")
        first, second = queue.get("work", 10), queue.get("work", 10)
        first.complete({"y": first.array("x")[:, 0].astype(np.float64)})
        waiting: list[object] = []
        threading.Thread(target=lambda: waiting.append(queue.get("end", 30, timeout_s=60).rows), daemon=True).start()
        until(lambda: waiting, "what is complete")
        child.kill()
    # when another server serves the same directory, while the client waits for it
    outcome: list[object] = []
    thread = threading.Thread(target=lambda: outcome.append(queue.put({"x": values["x"]}, key="all").again))
    thread.start()
    with Child(serve_durably, directory, address, durability) as child:
        assert child.hear() == address
        thread.join(30)
        # then it knows the rows, whose they are, and what they are
        assert outcome == [True]
        second.complete({"y": second.array("x")[:, 0].astype(np.float64)})
        with queue.get("work", 30) as third:
            assert third.array("x").tobytes() == values["x"][20:].tobytes()
            third.complete({"y": third.array("x")[:, 0].astype(np.float64)})
        with queue.get("end", 30) as batch:
            assert batch.array("x").tobytes() == values["x"][10:].tobytes()
            assert batch.array("y").tolist() == values["x"][10:, 0].tolist()
            batch.ack()
        audit = queue.audit()
        assert (audit.put, audit.consumed, audit.live) == (30, 20, 10)  # ten are leased to the thread, still
        queue._port.connection.close()
        queue = open_queue(Connection(address, "last", shared_memory=False))
        with queue.get("end", 30) as batch:
            assert batch.array("x").tobytes() == values["x"][:10].tobytes()
            batch.ack()
        queue.end()
        queue._port.connection.close()


def test_a_client_of_another_sdk_is_told_both_versions(run: Served) -> None:
    wire = rules.Client(run.address, run.key)
    hello = connections.Hello("old", 1, "", "0.0.0-old")
    with pytest.raises(ProtocolError, match=r"is served by asyncflow-sdk .*; old has 0\.0\.0-old"):
        decode_answer(wire.ask(encode(Call(hello)), 5)).raise_error()
    wire.close()
