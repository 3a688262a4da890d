"""A server listens over tcp only with keys or insecure=True, and the error explains it."""

from pathlib import Path

import pytest
from wire_handlers import serving

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.wire import Client, RouterSockets

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0:0",
        "tcp://*:0",
        "tcp://10.0.0.1:7000",
        "tcp://[::]:0",
        "tcp://127.0.0.1:0",
        "tcp://localhost:7000",
    ],
)
def test_tcp_is_refused_without_keys(address: str) -> None:
    with pytest.raises(ConfigError, match="is served with keys only.*key=, the path of a server.key.*insecure=True"):
        RouterSockets([address])


@pytest.mark.parametrize("address", ["ws://0.0.0.0:7000", "TCP://0.0.0.0:0", "udp://127.0.0.1:1", "7000", ""])
def test_other_transports_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="known transports"):
        RouterSockets([address])


def test_an_address_in_use_is_refused_by_name(tmp_path: Path) -> None:
    with (
        serving("tcp://127.0.0.1:0", insecure=True) as parrot,
        pytest.raises(ConfigError, match="cannot listen on tcp://127.0.0.1:"),
    ):
        RouterSockets([f"ipc://{tmp_path}/s", parrot.server.addresses[0]], insecure=True)
    # and what was bound before is let go: it may be bound again
    with serving(f"ipc://{tmp_path}/s"):
        pass


def test_one_server_at_several_addresses(tmp_path: Path) -> None:
    with serving("inproc://several", f"ipc://{tmp_path}/s", "tcp://127.0.0.1:0", insecure=True) as parrot:
        for number, address in enumerate(parrot.server.addresses):
            client = Client(address, insecure=True)
            assert client.request(b"x", 5) == b"x %d" % number
            client.close()
