"""Client: answers survive a bad connection, cancellation reaches the server, and every wait times out."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from children import Child, hear, say
from flaky_proxy import FlakyProxy
from waiting import in_thread, until
from wire_handlers import Parrot, client_of, serving

from asyncflow_sdk.errors import AsyncFlowError, ServerLost
from asyncflow_sdk.wire import Client, process_key
from asyncflow_sdk.wire.client_sockets import LoopSocket, ServerWatch, ThreadSocket
from asyncflow_sdk.wire.envelope import PROTOCOL, ResponseEnvelope, encode


@pytest.fixture
def parrot(tmp_path: Path) -> Iterator[Parrot]:
    with serving(f"ipc://{tmp_path}/s", "tcp://127.0.0.1:0", insecure=True) as parrot:
        yield parrot


@pytest.fixture
def client(parrot: Parrot) -> Iterator[Client]:
    client = client_of(parrot.server.addresses[0])
    yield client
    client.close()


def test_over_a_connection_that_breaks_all_the_time_each_request_is_carried_out_once(
    parrot: Parrot,
) -> None:
    # given
    proxy = FlakyProxy(int(parrot.server.addresses[1].rsplit(":", 1)[1]))
    client = client_of(proxy.address)
    bodies = [b"request-%d" % number for number in range(60)]
    # when threads and an event loop ask through it
    joins = [in_thread(lambda part=part: [client.request(b, 60) for b in bodies[part::3]]) for part in range(2)]

    async def request() -> list[bytes]:
        replies = await asyncio.gather(*(client.aexchange(body, 60) for body in bodies[2::3]))
        return [reply.body for reply in replies]

    answers = [*asyncio.run(request()), *joins[0](), *joins[1]()]
    # then
    assert proxy.cuts > 3
    assert sorted(parrot.carried_out) == sorted(bodies)
    assert sorted(answer.rsplit(b" ", 1)[0] for answer in answers) == sorted(bodies)
    proxy.steady = True
    client.close()
    proxy.close()


def test_a_cancelled_request_is_taken_back_before_and_after_its_answer(parrot: Parrot, client: Client) -> None:
    async def scenario() -> list[object]:
        # given one request that waits, and one whose answer arrives about when it is cancelled
        parked = asyncio.create_task(client.aexchange(b"park", 30))
        answered = asyncio.create_task(client.aexchange(b"lease", 30))
        await asyncio.sleep(0)  # both are sent
        until(lambda: len(parrot.carried_out) == 2, "both requests")  # while this loop reads nothing
        # when
        parked.cancel()
        answered.cancel()
        outcome = await asyncio.gather(parked, answered, return_exceptions=True)
        await client.aexchange(b"next", 30)
        return [type(each) for each in outcome]

    # then
    assert asyncio.run(scenario()) == [asyncio.CancelledError] * 2
    assert sorted(parrot.dropped_ones) == [(0, b"lease 1"), (parrot.parked[b"park"], None)]


def interrupted(address: str) -> None:
    """Ctrl-C, which comes while it waits, then another request over the same socket."""
    client = Client(address)
    try:
        client.request(b"park", 1000)
    except KeyboardInterrupt:
        say(client.request(b"after", 10).decode())
        time.sleep(0.1)
    client.close()


def test_ctrl_c_takes_a_blocking_request_back(parrot: Parrot) -> None:
    with Child(interrupted, parrot.server.addresses[0]) as child:
        until(lambda: parrot.parked, "its request")
        os.kill(child.pid, signal.SIGINT)
        assert child.hear() == "after 1"
        assert child.wait() == 0
    assert parrot.dropped_ones == [(parrot.parked[b"park"], None)]


@pytest.fixture
def peer(request: pytest.FixtureRequest) -> Iterator[zmq.Socket[bytes]]:
    """What a socket is connected to that reads it at any place."""
    with zmq.Context.instance().socket(zmq.DEALER) as peer:
        peer.bind(f"inproc://{request.node.name}")
        yield peer


def answer(seq: int) -> tuple[bytes, bytes]:
    return encode(ResponseEnvelope(PROTOCOL, seq, b"")), b"payload %d" % seq


def test_a_signal_in_the_middle_of_an_answer_takes_no_payload_from_it(peer: zmq.Socket[bytes]) -> None:
    channel = ThreadSocket(zmq.Context.instance(), ServerWatch(peer.last_endpoint.decode()), None, None)
    handlers = [channel.receive]
    handled = []

    class Interrupted:
        def __getattr__(self, name: str) -> object:
            return getattr(socket, name)

        def recv(self, *arguments: object, **options: object) -> object:
            frame = socket.recv(*arguments, **options)
            if handlers:
                handled.append(handlers.pop()())
            return frame

    # given two answers, and a signal whose handler asks, between the frames of the first
    socket, channel.socket = channel.socket, Interrupted()
    for seq in (1, 2):
        peer.send_multipart(answer(seq))
    # when / then: none without its payload
    with pytest.raises(zmq.Again):
        channel.receive()
    ((response, payload),) = handled
    assert (response.seq, bytes(payload)) == (2, b"payload 2")
    channel.socket = socket
    channel.close()


def test_the_rest_of_an_interrupted_answer_harms_nobody_else(peer: zmq.Socket[bytes]) -> None:
    # given a thread and a loop that were interrupted between the frames of an answer
    context, server = zmq.Context.instance(), ServerWatch(peer.last_endpoint.decode())

    async def interrupted_loop() -> LoopSocket:
        return LoopSocket(context, server, None)

    loop, errors = asyncio.new_event_loop(), []
    loop.set_exception_handler(lambda loop, context: errors.append(context))
    for channel in (ThreadSocket(context, server, None, None), loop.run_until_complete(interrupted_loop())):
        peer.send_multipart(answer(1))
        channel.socket.recv()
        assert channel.has_message()
        # when another thread looks there, and the loop goes on
        if isinstance(channel, ThreadSocket):
            channel.drain()
        else:
            channel.send([])
            loop.run_until_complete(asyncio.sleep(0))
        # then
        assert not channel.has_message()
        assert not errors
        channel.close()
    loop.close()


def test_a_server_that_is_gone_is_named_within_the_deadline_and_the_grace(parrot: Parrot, client: Client) -> None:
    client.request(b"x", 30)
    parrot.server.stop()
    with pytest.raises(ServerLost, match=f"{client.address} gave no answer"):
        client.request(b"y", 0.1, grace_s=0.2)


def test_closing_ends_what_other_threads_wait_for(parrot: Parrot, client: Client) -> None:
    # given a thread and an event loop of another thread that wait
    waits = [
        in_thread(lambda: client.request(b"park1", 1000)),
        in_thread(lambda: asyncio.run(client.aexchange(b"park2", 1000))),
    ]
    until(lambda: len(parrot.parked) == 2, "both requests")
    # when
    client.close()
    client.close()
    # then
    for wait in waits:
        outcome = wait()
        assert isinstance(outcome, ServerLost)
        assert "is closed" in str(outcome)
    with pytest.raises(ServerLost, match="is closed"):
        client.request(b"x", 1)


def connections(parrot: Parrot) -> int:
    """Connections at the server's local socket."""
    path = parrot.server.addresses[0].removeprefix("ipc://")
    return sum(line.endswith(path) for line in Path("/proc/net/unix").read_text().splitlines()) - 1


def test_sockets_go_with_their_threads_and_loops(parrot: Parrot, client: Client) -> None:
    # given threads and loops that come and go
    client.request(b"x", 5)
    for _ in range(20):
        thread = threading.Thread(target=client.request, args=(b"x", 5))
        thread.start()
        thread.join()
        asyncio.run(client.aexchange(b"x", 5))
    # then only those of the last are open
    until(lambda: connections(parrot) <= 3, "the others' connections to close")

    async def tidy() -> None:
        await client.aexchange(b"x", 5)
        await client.aclose_loop()
        await client.aexchange(b"x", 5)  # opened again where needed
        await client.aclose_loop()

    asyncio.run(tidy())
    until(lambda: connections(parrot) <= 2, "the loops' connections to close")


def test_a_loop_may_begin_while_another_looks_for_those_that_have_ended(client: Client) -> None:
    begun: list[bytes] = []

    class Another(asyncio.SelectorEventLoop):
        """A loop; when it is checked for its end, a thread begins another one."""

        def is_closed(self) -> bool:
            if not begun:
                begun.append(b"")
                begun.append(in_thread(lambda: asyncio.run(client.aexchange(b"x", 5)).body)())
            return super().is_closed()

    # given a loop that the client knows
    known = Another()
    begun.append(b"not yet")
    known.run_until_complete(client.aexchange(b"x", 5))
    begun.clear()
    # when a further one begins
    answer = asyncio.run(client.aexchange(b"x", 5)).body
    # then so could the one that came meanwhile
    assert {answer.split()[0], begun[1].split()[0]} == {b"x"}
    known.close()


def ask_after_fork(address: str) -> None:
    """Use a connection, then fork: the child is refused, the parent goes on."""
    client = Client(address)
    client.request(b"before", 10)
    if not (child := os.fork()):
        with pytest.raises(AsyncFlowError, match=r"fork\(\)"):
            client.request(b"in the child", 10)
        client.close()
        os._exit(7)
    say([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), client.request(b"after", 10).decode()])


def test_a_forked_child_is_refused_and_its_parent_goes_on(parrot: Parrot) -> None:
    with Child(ask_after_fork, parrot.server.addresses[0]) as child:
        assert child.hear() == [7, "after 1"]
    assert parrot.carried_out == [b"before", b"after"]


def identify(address: str = "") -> None:
    """Say the key of this process; ask for something that does not come."""
    say(process_key(os.getpid()))
    if address:
        Client(address).request(b"park", 1000)
    hear()


def test_the_death_of_a_process_is_seen_at_once_and_its_silence_is_none(parrot: Parrot) -> None:
    # given a session of another process
    with Child(identify, parrot.server.addresses[0]) as child:
        key = child.hear()
        until(lambda: parrot.parked, "its request")
        parrot.server.call(lambda: parrot.server.watch("its session", child.pid, key))
        # when it is frozen, then nothing
        child.stop()
        client = Client(parrot.server.addresses[0])
        client.request(b"x", 5)
        assert parrot.gone_ones == []
        # when it is killed
        child.kill()
        # then
        until(lambda: parrot.gone_ones == ["its session"], "word of its death")
        # and a session whose process is dead already is gone too
        parrot.server.call(lambda: parrot.server.watch("late", child.pid, key))
        until(lambda: parrot.gone_ones == ["its session", "late"], "word of the other")
        client.close()


def watches(pid: int) -> int:
    """Count the pidfds of this process for another one."""
    return sum(f"\nPid:\t{pid}\n" in said for said in map(read, Path("/proc/self/fdinfo").iterdir()))


def read(path: Path) -> str:
    """Return a file of /proc; "" if it is gone."""
    try:
        return path.read_text()
    except OSError:
        return ""


def test_a_session_that_left_is_watched_no_more(parrot: Parrot) -> None:
    # given many sessions of one living process, as a notebook makes them
    with Child(identify) as child:
        key = child.hear()
        for number in range(50):
            parrot.server.call(lambda number=number: parrot.server.watch(f"s{number}", child.pid, key))  # type: ignore[misc]
        until(lambda: watches(child.pid) == 1, "it to be watched, for all of them")
        # when
        for number in range(50):
            parrot.server.call(lambda number=number: parrot.server.forget(f"s{number}"))  # type: ignore[misc]
        # then
        until(lambda: watches(child.pid) == 0, "it to be watched no more")


def test_a_process_is_known_by_more_than_its_number(parrot: Parrot) -> None:
    with Child(identify) as child:
        key = child.hear()
        assert key == process_key(child.pid)
        assert key != process_key(os.getpid())
        # another host, another container, or a process that does not say: they cannot be watched from here
        for unknown in ("other-boot " + key.split(" ", 1)[1], ""):
            parrot.server.call(lambda unknown=unknown: parrot.server.watch("unseen", child.pid, unknown))  # type: ignore[misc]
        # the number of a process that ended, given to another
        other = key[:-1] + ("1" if key[-1] != "1" else "2")
        parrot.server.call(lambda: parrot.server.watch("ended", child.pid, other))
        until(lambda: parrot.gone_ones, "word of the one that ended")
        assert parrot.gone_ones == ["ended"]


def test_a_deadline_that_is_infinite_stops_no_server(parrot: Parrot, client: Client) -> None:
    for wants in (float("inf"), 1e300, -1.0, 0.001):
        parrot.wants = wants
        client.request(b"x", 5)
    parrot.wants = None
    assert client.request(b"x", 5) == b"x 4"
