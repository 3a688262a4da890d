"""The last word on a batch rides with the request for the next: one request a batch, and nothing is lost by it."""

import asyncio
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from queue_runs import KINDS, WAITS, Served, in_threads, running, runs_over

import asyncflow_sdk as af
from asyncflow_sdk.errors import DeadlineExceeded, Ended, LeaseLost, SchemaError, WriteOnceError
from asyncflow_sdk.interfaces import LeasedBatch, TransferQueue
from asyncflow_sdk.types import events as ev

pytestmark = pytest.mark.fast
run = runs_over(*KINDS)


@pytest.fixture
def queue(run: Served) -> TransferQueue:
    return declared(run.queue())


def declared(queue: TransferQueue) -> TransferQueue:
    queue.declare("work", needs=["x"], gives=["y"], lease_s=60)
    queue.declare("train", needs=["y"])
    return queue


def through(stream: Iterable[LeasedBatch], finished: Callable[[LeasedBatch], dict[str, object]]) -> list[int]:
    """Finish every batch of a stream with what ``finished`` makes of it. Returns the rows of each."""
    rows = []
    for batch in stream:
        batch.finish(finished(batch))
        rows.append(batch.rows)
    return rows


def balance(queue: TransferQueue) -> tuple[int, int, int]:
    audit = queue.audit()
    assert audit.balanced
    return audit.put, audit.live, audit.consumed


def test_a_batch_of_a_stream_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WAITS, "RESEND_S", 1000.0)  # none is sent again
    with running() as run:
        # given
        proxy, queue = run.proxied()
        declared(queue).put({"x": np.arange(50.0)})
        queue.end()
        requests: list[int] = []
        proxy.changed = lambda message: [requests.append(1) or message]
        # when
        for batch in queue.stream("work", 10):
            batch.finish({"y": batch.array("x") * 2})
        for batch in queue.stream("train", 10):
            batch.finish()
        # then five batches and the end of the stream, twice
        assert len(requests) == 12
        assert balance(queue) == (50, 0, 50)


def test_a_stream_for_event_loops(queue: TransferQueue) -> None:
    queue.put({"x": np.arange(50.0)})
    queue.end()

    async def work() -> float:
        async with queue.aio.stream("work", 7) as stream:
            async for batch in stream:
                batch.finish({"y": batch.array("x") * 2})
        total = 0.0
        async for batch in queue.aio.stream("train", 20):
            total += batch.array("y").sum()
            batch.finish()
        return total

    assert asyncio.run(work()) == np.arange(50).sum() * 2
    assert balance(queue) == (50, 0, 50)


def test_an_acknowledgement_has_its_effect_before_the_next_lease_is_waited_for(
    run: Served, queue: TransferQueue
) -> None:
    # given one batch in hand, and a trainer that waits for it
    queue.put({"x": [1.0, 2.0]})
    batch = queue.get("work", 2)
    batch.finish({"y": [3.0, 4.0]})
    trainer = run.queue("trainer")

    def part(number: int) -> list[float]:
        if number:
            with trainer.get("train", 2, timeout_s=100) as trained:
                trained.ack()
                trainer.end()
                return trained.array("y").tolist()
        # when the worker asks for more, which will never come
        with pytest.raises(Ended):
            queue.get("work", 2, timeout_s=100, ack=batch)
        return []

    # then the trainer got the rows while the worker waited
    assert in_threads(2, part)[1] == [3.0, 4.0]
    assert balance(queue) == (2, 0, 2)


def test_an_acknowledgement_holds_when_no_lease_comes_of_it(queue: TransferQueue) -> None:
    queue.put({"x": [1.0, 2.0]})
    with queue.get("work", 2) as batch:
        batch.finish({"y": [3.0, 4.0]})
        with pytest.raises(DeadlineExceeded, match="task 'work' has nothing to give"):
            queue.get("work", 1, timeout_s=0, ack=batch)
    with queue.get("train", 2) as batch, pytest.raises(SchemaError, match="no task 'nothing'"):
        queue.get("nothing", 1, ack=batch)
    assert balance(queue) == (2, 0, 2)


def test_without_a_finish_ack_acknowledges_what_is_left(queue: TransferQueue) -> None:
    # given a batch of which some rows are done, and one of which all are
    queue.put({"x": np.arange(8.0)})
    with queue.get("work", 8) as work:
        work.complete({"y": work.array("x")})
    some = queue.get("train", 4)
    some.complete(index=[0])
    some.give_back(index=[3])
    # when
    rest = queue.get("train", 9, ack=some)
    rest.ack()
    with pytest.raises(DeadlineExceeded):
        queue.get("train", 9, timeout_s=0, ack=rest)
    # then
    assert rest.ids.tolist() == [3, 4, 5, 6, 7]
    assert balance(queue) == (8, 0, 8)


def test_a_lost_lease_is_reported_and_nothing_is_leased(queue: TransferQueue) -> None:
    # given a batch whose lease is gone, and rows that wait
    queue.put({"x": [1.0, 2.0, 3.0]})
    batch = queue.get("work", 1)
    other = queue.get("work", 1)
    batch.finish({"y": [1.0]})
    batch.give_back()
    # when
    with pytest.raises(LeaseLost, match=f"lease {batch.token} is not held by test"):
        queue.get("work", 3, ack=batch)
    # then every other row is still there to be had, and asking again goes on
    other.give_back()
    assert sorted(queue.get("work", 3, ack=batch).ids.tolist()) == [0, 1, 2]


def test_a_stream_goes_on_after_a_refused_word_with_the_rows_given_back(queue: TransferQueue) -> None:
    # given
    queue.put({"x": [1.0, 2.0]})
    stream = queue.stream("work", 2, timeout_s=100)
    with pytest.raises(WriteOnceError, match="column 'x' of row 0"):
        through(stream, lambda batch: {"y": [1.0, 1.0], "x": [0.0, 0.0]})
    # when the same stream is asked again
    queue.end()
    turns = through(stream, lambda batch: {"y": batch.array("x")})
    # then the rows came again, each alone
    assert turns == [1, 1]
    assert queue.get("train", 2).array("y").tolist() == [1.0, 2.0]


def test_leaving_a_stream_sends_what_was_said_and_gives_back_the_rest(queue: TransferQueue) -> None:
    # given
    queue.put({"x": np.arange(5.0)})
    # when a loop is left after a word, and another without one
    for batch in queue.stream("work", 2):
        batch.finish({"y": batch.array("x")})
        break
    with queue.stream("work", 2) as stream:
        for _ in stream:
            break
    # then the first is done, and the rest can be had
    assert queue.get("train", 9).rows == 2
    assert queue.get("work", 9).ids.tolist() == [2, 3, 4]


def test_an_exception_in_a_stream_blames_the_rows_in_hand_only(queue: TransferQueue) -> None:
    # given
    queue.put({"x": [0.0, 1.0, 2.0, 3.0]})
    # when each pass finishes one row and fails at the next, three times the same
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), queue.stream("work", 1, timeout_s=100) as stream:
            through(stream, lambda batch: {"y": [1 // int(batch.array("x")[0] != 1)]})
    # then
    audit = queue.audit()
    assert (queue.status().rows["train"]["ready"], audit.failed) == (1, 1)
    assert "ZeroDivisionError" in str(audit.reasons)


def test_what_was_finished_in_a_with_block_is_sent_at_its_end(queue: TransferQueue) -> None:
    queue.put({"x": [1.0, 2.0]})
    with queue.get("work", 1) as batch:
        batch.finish({"y": [1.0]})
        with pytest.raises(SchemaError, match="finished already"):
            batch.finish({"y": [2.0]})
        assert queue.status().rows["train"]["ready"] == 0
    assert queue.status().rows["train"]["ready"] == 1
    batch = queue.get("work", 1)
    batch.finish({"y": [1.0]})
    with pytest.raises(KeyboardInterrupt), batch:
        raise KeyboardInterrupt
    assert queue.status().rows["train"]["ready"] == 2
    queue.put({"x": [3.0]})
    with pytest.raises(SchemaError, match="gives 'y'"), queue.get("work", 1) as batch:
        batch.finish({"z": [1.0]})


def test_a_cancelled_request_keeps_its_acknowledgement_and_gives_its_lease_back(queue: TransferQueue) -> None:
    # given a parked request with an acknowledgement
    queue.put({"x": [1.0]})

    async def scenario() -> None:
        aio = queue.aio
        batch = await aio.get("work", 1)
        batch.finish({"y": [5.0]})
        asking = asyncio.create_task(aio.get("work", 1, timeout_s=100, ack=batch))
        with await asyncio.to_thread(queue.get, "train", 1) as trained:  # it was carried out
            trained.ack()
        # when it is cancelled, and rows come
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await aio.put({"x": [2.0]})
        # then they go to who asks now
        assert (await aio.get("work", 1, timeout_s=100)).array("x").tolist() == [2.0]

    asyncio.run(scenario())
    assert balance(queue) == (2, 1, 1)


def test_a_stream_reads_the_columns_it_is_asked_for(queue: TransferQueue) -> None:
    queue.declare("both", needs=["x", "z"])
    queue.put({"x": [1.0], "z": [2.0]})
    with queue.stream("both", columns=["z"]) as stream:
        for batch in stream:
            assert list(batch) == ["z"]
            break


def test_a_loop_that_finishes_nothing_comes_to_an_end(queue: TransferQueue) -> None:
    # given
    queue.put({"x": [1.0, 2.0]})
    queue.end()
    # when
    seen = [batch.rows for batch in queue.stream("work", 2)]
    # then each batch left behind was an attempt, and the rows did not come for ever
    assert seen == [2, 1, 1, 1, 1]  # alone after the first, in case that one of them is at fault
    assert queue.audit().failed == 2
    assert "left without completing" in queue.failed()[0].reasons[0]


def test_an_exception_whose_text_cannot_be_sent_gives_the_rows_back(queue: TransferQueue) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    queue.put({"x": [1.0]})
    for error in (ValueError("\ud800"), Mute(), ValueError("third")):
        with pytest.raises(type(error)), queue.get("work"):
            raise error
    assert queue.failed()[0].reasons == (
        "work: ValueError: \\ud800", "work: Mute: its __str__ raised ZeroDivisionError", "work: ValueError: third",
    )  # fmt: skip


def test_an_event_that_cannot_be_sent_is_left_out_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[af.Event] = []
    with running(on_event=seen.append) as run:
        client = run.client()
        for text in ("\ud800", object(), "fine"):
            client.report(ev.Note(time_s=0.0, text=text))  # type: ignore[arg-type]
        client.queue.put({"x": [1.0]})
    assert [event.text for event in seen if isinstance(event, ev.Note) and event.text == "fine"] == ["fine"]
    assert caplog.text.count("cannot be encoded and is dropped") == 2
