"""Where an end of a transport is reached by others."""

import pytest

from asyncflow_sdk.queue import Connection, QueueServer
from asyncflow_sdk.weights.host import host_of, own_address
from asyncflow_sdk.wire import server_keys


@pytest.mark.parametrize(
    "server", ["ipc:///x", "inproc://x", "tcp://127.0.0.1:5", "tcp://localhost:5", "tcp://[::1]:5"]
)
def test_where_all_are_on_one_host_loopback_does(server: str) -> None:
    assert own_address(server) == "127.0.0.1"
    assert own_address(server, ["tcp://127.0.0.1:7"]) == "127.0.0.1"


def test_an_address_that_cannot_be_reached_is_none() -> None:
    assert own_address("tcp://nowhere.invalid:7") == "127.0.0.1"


def test_on_the_servers_host_the_address_is_that_which_it_is_served_at(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("asyncflow_sdk.weights.host._way_to", lambda server: f"the way to {server}")
    keys = server_keys(tmp_path / "server.key", tmp_path / "run.key")
    server = QueueServer(["tcp://0.0.0.0:0"], keys=keys)
    try:
        connection = Connection(server.here, "trainer")
        assert host_of(connection, "x").address == f"the way to {server.addresses[-1]}"
        connection.close()
    finally:
        server.close()
