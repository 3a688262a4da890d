"""Calls larger than a piece: what is sent again after a silence, and what becomes of uploads that never finish."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flaky_proxy import FlakyProxy
from queue_runs import Durable, Served, in_threads, running
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ProtocolError
from asyncflow_sdk.interfaces import TransferQueue

pytestmark = pytest.mark.usefixtures("soon")
MIB = 1 << 20
WINDOW = 8 * MIB
"""Bytes of one call that may be under way."""
WHOLE = (10**9, 10**9)
"""Pieces of a connection that is never cut."""


@pytest.fixture
def run() -> Iterator[Served]:
    with running("remote", insecure=True) as run:
        yield run


def values(mib: int) -> "np.ndarray[Any, Any]":
    return np.random.default_rng(mib).integers(0, 255, (mib, MIB), np.uint8)


def beyond(run: Served, pieces: tuple[int, int] = WHOLE) -> tuple[FlakyProxy, TransferQueue]:
    """A queue behind a proxy."""
    proxy = FlakyProxy(int(run.address.rsplit(":", 1)[1]), pieces=pieces)
    return proxy, run.queue("beyond", address=proxy.address)


def asks_again(proxy: FlakyProxy) -> None:
    """Wait until the client has asked several times what has become of its call."""
    for _ in range(5):
        before = proxy.there
        until(lambda before=before: proxy.there > before, "a question")


def test_what_is_late_is_not_sent_again(run: Served) -> None:
    # given a link that brings nothing back once the half of a put is through
    proxy, queue = beyond(run)
    queue.declare("read", needs=["x"])
    proxy.halt_after = {"back": 12 * MIB}
    # when the client hears nothing, again and again
    putting = in_thread(queue.put, {"x": values(24)})
    until(lambda: not proxy.halt_after, "the half of it")
    asks_again(proxy)
    proxy.resume()
    # then each byte of it went over the link once
    assert putting().count == 24
    assert 24 * MIB < proxy.there < 25 * MIB
    # and the same on the way of rows to a client
    before = proxy.there + proxy.back
    proxy.halt_after = {"back": before + 12 * MIB}
    getting = in_thread(queue.get, "read", 24)
    until(lambda: not proxy.halt_after, "the half of it")
    asks_again(proxy)
    proxy.resume()
    assert getting().array("x").tobytes() == values(24).tobytes()
    assert 24 * MIB < proxy.back < 25 * MIB


@pytest.mark.parametrize("face", ["thread", "event loop"])
def test_a_connection_that_is_cut_costs_what_was_under_way(run: Served, face: str) -> None:
    # given a link that is cut again and again
    proxy, queue = beyond(run, (100, 150))
    queue.declare("read", needs=["x"])
    # when
    if face == "thread":
        queue.put({"x": values(24)}, key="all")
        batch: Any = queue.get("read", 24)
    else:
        asyncio.run(queue.aio.put({"x": values(24)}, key="all"))
        batch = asyncio.run(queue.aio.get("read", 24))
    # then a window for each cut is sent again, and no more
    assert proxy.cuts > 1
    assert batch.array("x").tobytes() == values(24).tobytes()
    assert proxy.there + proxy.back < 49 * MIB + proxy.cuts * WINDOW
    assert run.queue("other").audit().put == 24
    proxy.steady = True


def test_a_put_goes_on_with_the_next_server_when_one_is_killed_in_the_midst_of_it(tmp_path: Path) -> None:
    # given
    with Durable(tmp_path / "run", address="tcp://127.0.0.1:0") as run:
        run.options["address"] = run.address
        proxy = FlakyProxy(int(run.address.rsplit(":", 1)[1]), pieces=WHOLE)
        key = run.directory / "run.key"
        with af.connect(proxy.address, key=key, shared_memory=False) as client:
            queue = client.queue
            queue.declare("read", needs=["x"])
            proxy.halt_after = {"there": 12 * MIB}
            putting = in_thread(queue.put, {"x": values(24)}, key="all")
            until(lambda: not proxy.halt_after, "the half of it")
            # when
            run.again()
            proxy.resume()
            # then
            rows = putting()
            assert (rows.count, rows.again) == (24, False)
            assert queue.put({"x": values(24)}, key="all").again
            with queue.get("read", 24) as batch:
                assert batch.array("x").tobytes() == values(24).tobytes()
            assert queue.audit().put == 24


@pytest.mark.parametrize("ends", ["its caller gives up", "its session ends"])
def test_an_upload_that_never_finishes_keeps_others_out_until_it_is_released(ends: str) -> None:
    # given a server with room for one upload at a time, and one of which a half has arrived
    with running("remote", insecure=True, max_call_bytes=20 * MIB) as run:
        proxy, queue = beyond(run)
        other = run.queue("other")
        proxy.halt_after = {"there": 12 * MIB}
        giving_up = asyncio.Event()

        async def upload() -> None:
            putting = asyncio.create_task(queue.aio.put({"x": values(16)}))
            while not giving_up.is_set() and not putting.done():
                await asyncio.sleep(0.01)
            putting.cancel()
            await putting

        async def scenario() -> None:
            with contextlib.suppress(asyncio.CancelledError, ProtocolError):
                await upload()

        uploading = in_thread(asyncio.run, scenario())
        until(lambda: not proxy.halt_after, "the half of it")
        putting = in_thread(other.put, {"x": values(16)})
        # when it ends
        if ends == "its caller gives up":
            proxy.resume()
        else:
            (session,) = (each.id for each in other.status().sessions if each.name == "beyond")
            run.run.evict(session)
        giving_up.set()
        # then the other's takes its place
        assert putting().count == 16
        assert run.run.audit().put in (16, 32)
        proxy.resume()
        uploading()


def test_uploads_wait_for_each_other_when_together_they_would_take_too_much() -> None:
    with running("remote", insecure=True, max_call_bytes=12 * MIB) as run:
        queue = run.queue()
        in_threads(4, lambda number: queue.put({"x": values(10)}, key=str(number)))
        assert queue.audit().put == 40


@pytest.mark.parametrize("kind", ["ipc", "remote"])
def test_calls_about_very_many_rows(kind: str) -> None:
    """What is said of rows, beside their payload, is more than a piece here, too."""
    count = 150_000
    with running(kind, capacity_rows=count) as run:
        queue = run.queue()
        queue.declare("read", needs=["x"], gives=["y"])
        queue.declare("end", needs=["y"])
        queue.put({"x": np.arange(count), "response_ids": [[1]] * count})
        batch = queue.get("read", count)
        assert (batch.array("x") == np.arange(count)).all()
        batch.complete({"y": np.arange(count)[::-1].copy()}, index=np.arange(count)[::-1])
        end = queue.get("end", count)
        assert end.ids.nbytes > MIB
        assert (end.array("y") == end.ids).all()


def test_threads_of_one_session_move_payload_at_once(run: Served) -> None:
    queue = run.queue()
    queue.declare("read", needs=["x"])
    seen: list[int] = []

    def work(number: int) -> None:
        for part in range(2):
            queue.put({"x": np.full((6, MIB), 2 * number + part, np.uint8)})
            with queue.get("read", 6) as batch:
                got = batch.array("x")
                assert (got == got[:, :1]).all()
                seen.extend(got[:, 0].tolist())
                batch.ack()

    in_threads(3, work)
    assert sorted(seen) == [n for n in range(6) for _ in range(6)]
