"""A repeated request has no second effect: late, over another socket, or after its answer."""

import asyncio
import contextlib
import random
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from flaky_proxy import FlakyProxy
from waiting import in_thread, until
from wire_handlers import Parrot, Raw, client_of, frame, serving

from asyncflow_sdk.wire import Client, request_table

pytestmark = pytest.mark.fast


@pytest.fixture
def parrot(tmp_path: Path) -> Iterator[Parrot]:
    with serving(f"ipc://{tmp_path}/s") as parrot:
        yield parrot


@pytest.fixture
def raw(parrot: Parrot) -> Iterator[Raw]:
    with Raw(parrot.server.addresses[0]) as raw:
        yield raw


def test_the_same_frame_twice_is_one_request(parrot: Parrot, raw: Raw) -> None:
    for _ in range(3):
        raw.send(frame(1, b"put"))
    assert [raw.hear() for _ in range(3)] == [(1, b"put 0")] * 3
    assert parrot.carried_out == [b"put"]


def test_an_answer_that_was_lost_is_sent_again(parrot: Parrot) -> None:
    # given a request whose socket dies before it reads the answer
    with Raw(parrot.server.addresses[0]) as first:
        first.send(frame(1, b"put"))
        assert not first.silent(30_000)
    # when it is repeated over another
    with Raw(parrot.server.addresses[0]) as second:
        second.send(frame(1, b"put"))
        # then
        assert second.hear() == (1, b"put 0")
    assert parrot.carried_out == [b"put"]


def test_a_parked_request_that_is_repeated_waits_once_and_is_answered_where_it_came_from_last(
    parrot: Parrot, raw: Raw
) -> None:
    with Raw(parrot.server.addresses[0]) as second:
        raw.send(frame(1, b"park"))
        until(lambda: parrot.parked, "the first")
        second.send(frame(1, b"park"))
        second.send(frame(2, b"after"))
        assert second.hear() == (2, b"after 1")
        parrot.let_go(b"park")
        assert second.hear() == (1, b"park at last")
    assert parrot.carried_out == [b"park", b"after"]


@pytest.mark.parametrize("how", ["done", "settled", "dropped", "dropped while parked"])
def test_a_late_copy_of_a_request_that_is_over_is_not_carried_out(parrot: Parrot, raw: Raw, how: str) -> None:
    # given a request that is over, in one of four ways
    body = b"park" if how == "dropped while parked" else b"put"
    raw.send(frame(1, body))
    until(lambda: parrot.carried_out, "the request")
    news = {"done": {"done": 2}, "settled": {"settled": (1,)}}.get(how, {"dropped": (1,)})
    raw.send(frame(0, b"", **news))
    raw.send(frame(2, b"next"))
    while raw.hear()[0] != 2:
        pass
    # when copies of it arrive
    with Raw(parrot.server.addresses[0]) as late:
        late.send(frame(1, body))
        late.send(frame(1, body))
        late.send(frame(3, b"last"))
        # then
        assert late.hear() == (3, b"last 2")
    assert parrot.carried_out == [body, b"next", b"last"]


@pytest.mark.parametrize("body", [b"give back", b"park"])
def test_a_request_that_was_dropped_before_it_came_is_carried_out_and_taken_back(
    parrot: Parrot, raw: Raw, body: bytes
) -> None:
    # given word over one socket that a request is dropped, which another socket is still bringing
    raw.send(frame(2, b"next", dropped=(1,), done=1))
    assert raw.hear() == (2, b"next 0")
    raw.send(frame(3, b"more", dropped=(1,), done=4))
    raw.hear()
    # when it comes, with a copy
    with Raw(parrot.server.addresses[0]) as late:
        late.send(frame(1, body))
        late.send(frame(1, body))
        late.send(frame(4, b"last"))
        while late.hear()[0] != 4:
            pass
    # then what it does is done once, and what it would have got is given back
    assert parrot.carried_out == [b"next", b"more", body, b"last"]
    ticket = parrot.parked.get(body, 0)
    assert parrot.dropped_ones == [(ticket, None if ticket else b"give back 2")]


def test_what_was_dropped_is_taken_back_once(parrot: Parrot, raw: Raw) -> None:
    # given one request that is parked and one that was answered
    raw.send(frame(1, b"park"))
    raw.send(frame(2, b"lease"))
    assert raw.hear() == (2, b"lease 1")
    # when both are dropped, and said to be so again and again
    for _ in range(3):
        raw.send(frame(0, b"", dropped=(1, 2)))
    raw.send(frame(3, b"next", dropped=(1, 2)))
    raw.hear()
    # then
    assert parrot.dropped_ones == [(parrot.parked[b"park"], None), (0, b"lease 1")]
    # and an answer that comes now goes nowhere
    parrot.let_go(b"park")
    raw.send(frame(4, b"more"))
    assert raw.hear()[0] == 4


def test_a_server_forgets_answers_that_arrived_though_an_older_request_waits(parrot: Parrot) -> None:
    # given a request that waits for long
    client = Client(parrot.server.addresses[0])
    waiting = in_thread(lambda: client.request(b"park", 60))
    until(lambda: parrot.parked, "the parked request")
    # when many others come and go, with large answers
    tracemalloc.start()
    for _ in range(100):
        assert len(client.request(b"large", 30)) == 100_000
    # then
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2_000_000
    parrot.let_go(b"park")
    assert waiting() == b"park at last"
    client.close()


def test_answers_after_a_restart_count_and_those_of_its_replay_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a session of an earlier server with an answered request and two that wait
    monkeypatch.setattr(request_table, "SESSION_BYTES", 1000)
    table = request_table.RequestTable()
    for ticket in (1, 2, 3):
        table.replay(SimpleNamespace(request=lambda *call: None), "s", ticket, 1, ticket, b"x")
    table.answer(1, bytes(2000), False, None)
    table.finish_replay()
    assert table.take_overfull() == []
    # when these are answered now, and nobody repeats them
    for ticket in (2, 3):
        table.answer(ticket, bytes(2000), False, None)
    # then they count
    assert table.take_overfull() == ["s"]


def test_several_threads_of_one_session_are_each_answered(parrot: Parrot) -> None:
    # given
    client = Client(parrot.server.addresses[0])
    wrong: list[bytes] = []

    def work(name: bytes) -> None:
        for number in range(200):
            body = b"%s-%d" % (name, number)
            if not client.request(body, 30).startswith(body + b" "):
                wrong.append(body)

    threads = [threading.Thread(target=work, args=(b"thread%d" % i,)) for i in range(4)]
    # when
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # then every one was carried out once
    assert wrong == []
    assert len(set(parrot.carried_out)) == len(parrot.carried_out) == 800
    client.close()


def test_no_call_into_the_server_thread_is_lost(parrot: Parrot) -> None:
    count = []
    joins = [in_thread(lambda: [parrot.server.call(lambda: count.append(1)) for _ in range(3000)]) for _ in range(3)]
    for join in joins:
        join()
    until(lambda: len(count) == 9000, "the last call")


def test_what_is_cancelled_over_a_connection_that_breaks_is_not_carried_out_or_taken_back() -> None:
    # given requests over a connection that is cut all the time
    numbers = random.Random(0)
    with serving("tcp://127.0.0.1:0", insecure=True) as parrot:
        proxy = FlakyProxy(int(parrot.server.addresses[0].rsplit(":", 1)[1]))
        client = client_of(proxy.address)
        answered: list[bytes] = []

        async def request(number: int) -> None:
            asking = asyncio.create_task(client.aexchange(b"request-%d" % number, 60))
            await asyncio.sleep(0.01 * numbers.random())
            if number % 2:
                asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                answered.append((await asking).body)

        async def scenario() -> None:
            # when every other one is cancelled, before or after its answer
            await asyncio.gather(*(request(number) for number in range(40)))
            proxy.steady = True
            await client.aexchange(b"last", 60)

        asyncio.run(scenario())
        # then each was carried out once at most, and the answers that nobody had were taken back
        assert len(set(parrot.carried_out)) == len(parrot.carried_out)
        assert {b"request-%d" % number for number in range(0, 40, 2)} <= {a.rsplit(b" ", 1)[0] for a in answered}
        known = {answer.rsplit(b" ", 1)[0] for answer in answered} | {b"last"}
        until(
            lambda: {a.rsplit(b" ", 1)[0] for _, a in parrot.dropped_ones if a} >= set(parrot.carried_out) - known,
            "the others to be taken back",
        )
        client.close()
        proxy.close()
