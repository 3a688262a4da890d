"""A server closing for good sends a goodbye over every connection; one to be continued sends none."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import in_thread, until
from wire_handlers import Parrot, Raw, client_of, frame, serving

from asyncflow_sdk.errors import ServerLost
from asyncflow_sdk.wire import Client, RunKey, ensure_keys

pytestmark = pytest.mark.fast

CLOSED = "the run at {} was closed by the process that served it"


@pytest.fixture(params=["inproc", "ipc", "tcp", "keys"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Parrot, Client]]:
    keys = ensure_keys(tmp_path / "server.key", tmp_path / "run.key").server if request.param == "keys" else None
    insecure = keys is None
    address = {"inproc": f"inproc://{tmp_path.name}", "ipc": f"ipc://{tmp_path}/s"}.get(request.param)
    with serving(address or "tcp://127.0.0.1:0", keys=keys, insecure=insecure) as parrot:
        client = Client(
            parrot.server.addresses[0], RunKey.load(tmp_path / "run.key") if keys else None, insecure=insecure
        )
        yield parrot, client
        client.close()


def close_for_good(parrot: Parrot) -> None:
    parrot.server.stop(for_good=lambda: True)


def test_who_waits_hears_what_was_said_before_and_then_goodbye(served: tuple[Parrot, Client]) -> None:
    parrot, client = served
    # given threads and a loop that wait, and two of them whose answers leave just before the end

    async def request(body: bytes) -> bytes:
        return (await client.aexchange(body, 1000)).body

    async def requests() -> list[object]:
        return await asyncio.gather(*(request(b"park-loop-%d" % n) for n in range(2)), return_exceptions=True)

    waits = [in_thread(client.request, b"park-%d" % n, 1000) for n in range(2)]
    loop = in_thread(lambda: asyncio.run(requests()))
    until(lambda: len(parrot.parked) == 4, "all requests")
    parrot.let_go(b"park-0")
    parrot.let_go(b"park-loop-0")
    # when
    close_for_good(parrot)
    # then
    heard = [*(wait() for wait in waits), *loop()]
    assert [heard[0], heard[2]] == [b"park-0 at last", b"park-loop-0 at last"]
    for lost in heard[1], heard[3]:
        assert isinstance(lost, ServerLost)
        assert str(lost) == CLOSED.format(client.address)


def test_who_asks_later_learns_so_on_any_thread_and_any_loop(served: tuple[Parrot, Client]) -> None:
    parrot, client = served
    client.request(b"x", 10)
    # when nobody waits
    close_for_good(parrot)
    # then a thread that has no socket yet is told what came over another's
    outcome = in_thread(client.request, b"y", 1000)()
    assert str(outcome) == CLOSED.format(client.address)
    with pytest.raises(ServerLost, match="was closed by"):
        client.request(b"z", 1000)
    with pytest.raises(ServerLost, match="was closed by"):
        asyncio.run(client.aexchange(b"z", 1000))
    assert parrot.carried_out == [b"x"]


def test_a_loop_that_asked_before_learns_so_at_its_next_request(served: tuple[Parrot, Client]) -> None:
    parrot, client = served

    async def scenario() -> None:
        await client.aexchange(b"x", 10)
        close_for_good(parrot)  # while this loop reads nothing
        with pytest.raises(ServerLost, match="was closed by"):
            await client.aexchange(b"y", 1000)

    asyncio.run(scenario())
    assert client.server_closed


def test_a_first_request_that_comes_too_late_is_not_carried_out_and_its_sender_told(tmp_path: Path) -> None:
    with serving(f"inproc://{tmp_path.name}-late") as parrot, Raw(parrot.server.addresses[0]) as raw:

        def after_the_last_round() -> bool:
            raw.send(frame(1, b"late"))  # is there at once
            return True

        raw.send(frame(1, b"early", session="another over this connection"))
        assert raw.hear() == (1, b"early 0")
        parrot.server.stop(after_the_last_round)
        assert raw.hear() == (0, b"")
        assert parrot.carried_out == [b"early"]


def test_a_server_that_may_come_back_is_waited_for(tmp_path: Path) -> None:
    with serving(f"ipc://{tmp_path}/s") as first:
        client = client_of(first.server.addresses[0])
        client.request(b"x", 10)
        wait = in_thread(client.request, b"park", 1000)
        until(lambda: first.parked, "the request")
    with serving(f"ipc://{tmp_path}/s") as second:
        until(lambda: second.parked, "the same request")
        second.let_go(b"park")
        assert wait() == b"park at last"
        assert client.request(b"y", 10) == b"y 1"
        client.close()
