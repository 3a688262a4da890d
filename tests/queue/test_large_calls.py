"""Calls larger than a fragment: what is sent again after a silence, and what becomes of uploads that never finish."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import Child
from flaky_proxy import FlakyProxy
from queue_children import serve_durably
from queue_runs import Run, arena_of, in_threads, running
from waiting import in_thread, until

from asyncflow_sdk.errors import ServerLost
from asyncflow_sdk.queue import Connection, TransferQueue, open_queue
from asyncflow_sdk.wire import client as rules
from asyncflow_sdk.wire import server as server_rules
from asyncflow_sdk.wire import transfers
from asyncflow_sdk.wire.envelope import FRAGMENT_BYTES, WINDOW_BYTES
from asyncflow_sdk.wire.exchange import Exchange

MIB = 1 << 20
WHOLE = (10**9, 10**9)
"""Pieces of a connection that is never cut."""


@pytest.fixture
def run() -> Iterator[Run]:
    with running("remote") as run:
        yield run


@pytest.fixture
def silences(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each time that a client heard nothing for long, which is soon here."""
    monkeypatch.setattr(rules, "RESEND_S", 0.1)
    seen, again = [], Exchange.again

    def counted(exchange: Exchange) -> Any:
        seen.append(exchange.seq)
        return again(exchange)

    monkeypatch.setattr(Exchange, "again", counted)
    return seen


def values(mib: int) -> "np.ndarray[Any, Any]":
    return np.random.default_rng(mib).integers(0, 255, (mib, MIB), np.uint8)


def beyond(address: str, key: Any, **options: Any) -> tuple[FlakyProxy, TransferQueue]:
    """A queue behind a proxy. ``key``: the run's, or the path of a file that has it."""
    proxy = FlakyProxy(int(address.rsplit(":", 1)[1]), **{"pieces": WHOLE, **options})
    return proxy, open_queue(Connection(proxy.address, "remote", key=key, shared_memory=False))


def test_a_put_whose_answers_are_late_is_not_sent_again(run: Served, silences: list[int]) -> None:
    # given a link that brings nothing back once 20 MiB of a put are through
    proxy, queue = beyond(run.address, run.key)
    queue.declare("read", needs=["x"])
    proxy.halt_after = {"back": 20 * MIB}
    # when the client hears nothing, again and again
    putting = in_thread(queue.put, {"x": values(48)})
    until(lambda: len(silences) > 5, "the silences")
    proxy.resume()
    # then each byte of it went over the link once
    assert putting().count == 48
    assert 48 * MIB < proxy.there < 49 * MIB
    with queue.get("read", 48) as batch:
        assert batch.array("x").tobytes() == values(48).tobytes()
    proxy.close()


def test_rows_that_are_late_are_not_sent_again(run: Served, silences: list[int]) -> None:
    # given the same on the way of rows to a client
    run.queue().put({"x": values(48)})
    proxy, queue = beyond(run.address, run.key)
    queue.declare("read", needs=["x"])
    proxy.halt_after = {"back": 20 * MIB}
    getting = in_thread(queue.get, "read", 48)
    until(lambda: len(silences) > 5, "the silences")
    proxy.resume()
    # then
    assert getting().array("x").tobytes() == values(48).tobytes()
    assert 48 * MIB < proxy.back < 49 * MIB
    proxy.close()


@pytest.mark.parametrize("face", ["thread", "event loop"])
def test_a_connection_that_is_cut_costs_what_was_under_way(run: Served, silences: list[int], face: str) -> None:
    # given a link that is cut again and again
    import asyncio

    proxy, queue = beyond(run.address, run.key, pieces=(200, 300))
    queue.declare("read", needs=["x"])
    # when
    if face == "thread":
        queue.put({"x": values(48)}, key="all")
        batch: Any = queue.get("read", 48)
    else:
        asyncio.run(queue.aio.put({"x": values(48)}, key="all"))
        batch = asyncio.run(queue.aio.get("read", 48))
    # then a window for each cut is sent again, and no more
    assert proxy.cuts > 1
    assert batch.array("x").tobytes() == values(48).tobytes()
    assert proxy.there + proxy.back < 97 * MIB + proxy.cuts * WINDOW_BYTES
    assert run.queue("other").audit().put == 48
    proxy.steady = True
    proxy.close()


def test_a_put_goes_on_with_the_next_server_when_one_is_killed_in_the_midst_of_it(
    tmp_path: Path, silences: list[int]
) -> None:
    # given
    directory = str(tmp_path / "journal")
    with Child(serve_durably, directory, "tcp://127.0.0.1:0", "process") as child:
        address = child.hear()
        proxy, queue = beyond(address, Path(directory) / "run.key")
        queue.declare("read", needs=["x"])
        proxy.halt_after = {"there": 20 * MIB}
        putting = in_thread(queue.put, {"x": values(48)}, key="all")
        until(lambda: proxy.there >= 20 * MIB, "the half of it")
        child.kill()
    # when
    with Child(serve_durably, directory, address, "process") as child:
        assert child.hear() == address
        proxy.resume()
        # then
        rows = putting()
        assert (rows.count, rows.again) == (48, False)
        assert queue.put({"x": values(48)}, key="all").again
        with queue.get("read", 48) as batch:
            assert batch.array("x").tobytes() == values(48).tobytes()
        assert queue.audit().put == 48
        queue._port.connection.close()
    proxy.close()


@pytest.mark.parametrize("ends", ["its caller gives up", "its session ends", "nothing is heard of it"])
def test_an_upload_that_never_finishes_is_released(
    run: Served, ends: str, monkeypatch: pytest.MonkeyPatch, silences: list[int]
) -> None:
    # given a put of which a half has arrived
    proxy, queue = beyond(run.address, run.key)
    server, arena = run.server, arena_of(run.queue("near"))
    session = queue._port.connection.wire.session
    monkeypatch.setattr(rules, "SLOWEST_BYTES_PER_S", 1e12)
    monkeypatch.setattr(rules, "GRACE_S", 0.5 if ends == "its caller gives up" else 60.0)
    proxy.halt_after = {"there": 20 * MIB}
    putting = in_thread(queue.put, {"x": values(48)}, timeout_s=0.0)
    until(lambda: server._wire._uploads.nbytes > 48 * MIB and proxy.there >= 20 * MIB, "the half of it")
    assert arena.blocks == 1
    # when
    if ends == "its caller gives up":
        assert isinstance(putting(), ServerLost)
        proxy.resume()
    elif ends == "its session ends":
        server._wire.call(lambda: server.gone(session, "it was evicted"))
    else:
        monkeypatch.setattr(server_rules, "SILENCE_S", 0.0)
        monkeypatch.setattr(transfers, "SILENCE_S", 0.0)
        monkeypatch.setattr(server_rules, "SWEEP_S", 0.01)
        server._wire.call(lambda: setattr(server._wire, "_next_sweep", 0.0))
    # then its memory is free
    until(lambda: not arena.blocks and not server._wire._uploads, "its release")
    assert server._wire._uploads.nbytes == 0
    assert run.queue("other").audit().put == 0
    if ends == "nothing is heard of it":  # and when more comes of it, it begins anew
        monkeypatch.undo()
        proxy.resume()
        assert putting().count == 48
    proxy.resume()
    proxy.close()


def test_uploads_wait_for_each_other_when_together_they_would_take_too_much() -> None:
    # given a server that has room for the payload of one
    with running("remote", max_call_bytes=24 * MIB) as run:
        uploads, most = run.server._wire._uploads, [0]
        make = uploads._make_sink

        def make_sink(*what: Any) -> Any:
            most.append(uploads.nbytes + what[2])
            return make(*what)

        uploads._make_sink = make_sink
        queue = run.queue()
        # when four come at once
        in_threads(4, lambda number: queue.put({"x": values(20)}, key=str(number)))
        # then all were taken, one after another
        assert queue.audit().put == 80
        assert len(most) >= 5
        assert 20 * MIB < max(most) <= 24 * MIB


@pytest.mark.parametrize("kind", ["ipc", "remote"])
def test_calls_about_very_many_rows(kind: str) -> None:
    """What is said of rows, beside their payload, is more than a fragment here, too."""
    count = 300_000
    with running(kind) as run:
        queue = run.queue()
        queue.configure(capacity_rows=count)
        queue.declare("read", needs=["x"], gives=["y"])
        queue.declare("end", needs=["y"])
        queue.put({"x": np.arange(count), "response_ids": [[1]] * count})
        batch = queue.get("read", count)
        assert (batch.array("x") == np.arange(count)).all()
        batch.complete({"y": np.arange(count)[::-1].copy()}, index=np.arange(count)[::-1])
        end = queue.get("end", count)
        assert 8 * end.rows > FRAGMENT_BYTES
        assert (end.array("y") == end.ids).all()


def test_threads_of_one_session_move_payload_at_once(run: Served) -> None:
    queue = run.queue()
    queue.declare("read", needs=["x"])
    lock, seen = threading.Lock(), []

    def work(number: int) -> None:
        for part in range(3):
            queue.put({"x": np.full((12, MIB), 3 * number + part, np.uint8)})
            with queue.get("read", 12) as batch:
                got = batch.array("x")
                assert (got == got[:, :1]).all()
                with lock:
                    seen.extend(got[:, 0].tolist())
                batch.ack()

    in_threads(4, work)
    assert sorted(seen) == [n for n in range(12) for _ in range(12)]
