"""A service of a member, and its clients."""

import os
import socket
import time
from types import SimpleNamespace

import pytest
from waiting import in_thread, until

from asyncflow_sdk.errors import ServerLost
from asyncflow_sdk.wire import Service, ServiceAddress, ServiceClient, service

pytestmark = pytest.mark.fast
MB = 1 << 20


class Counter:
    """Answers a call with the bytes of its body, and writes down who is gone."""

    def __init__(self) -> None:
        self.gone_ones: list[str] = []
        self.service = Service("127.0.0.1", self, insecure=True, max_call_bytes=8 * MB)

    def request(self, peer: str, ticket: int, body: bytes) -> None:
        self.service.answer(ticket, b"%d" % len(body))

    def gone(self, peer: str) -> None:
        self.gone_ones.append(peer)


def test_a_client_that_was_forgotten_makes_a_large_call_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a client whose service has forgotten it
    later = [0.0]
    monkeypatch.setattr(service, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later[0]))
    counter = Counter()
    client, other = (ServiceClient(counter.service.where, max_call_bytes=8 * MB) for _ in range(2))
    assert client.call(bytes(3 * MB), 60).body == b"%d" % (3 * MB)
    later[0] = 3 * service.FORGET_S
    other.call(b"", 60)  # the service looks at its peers after each round
    until(lambda: counter.gone_ones, "word that the client is forgotten")
    # then it calls again as before
    assert client.call(bytes(3 * MB), 60).body == b"%d" % (3 * MB)
    for each in (client, other, counter.service):
        each.close()


def test_a_call_waits_its_own_time_and_not_that_of_another_thread() -> None:
    # given a service that answers no greeting, and a call that waits for it
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = ServiceAddress(f"tcp://127.0.0.1:{silent.getsockname()[1]}", None, os.getpid(), "")
        client = ServiceClient(where)
        waiting = in_thread(client.call, b"", 60)
        silent.settimeout(60)
        silent.accept()
        # when
        began = time.monotonic()
        with pytest.raises(ServerLost, match="no answer in 0"):
            client.call(b"", 0.2)
        # then
        assert time.monotonic() - began < 20
        client.close()
        assert isinstance(waiting(), ServerLost)
