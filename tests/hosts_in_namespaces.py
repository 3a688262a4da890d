"""Several hosts on this one: network namespaces on a bridge, as the benchmarks make them, and ssh to them.

with network(3) as net, ssh_servers(net, folder, {2: "two", 3: "three"}): ...     # for ssh -F folder/ssh_config
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from ssh_hosts import SshServer

from benchmarks.hosts.network import Network, unavailable


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    """Skips the test where namespaces may not be made."""
    reason = unavailable()
    if reason:
        pytest.skip(f"hosts cannot be made here: {reason}")
    with Network(count) as made:
        yield made


@contextlib.contextmanager
def ssh_servers(net: Network, folder: Path, names: Mapping[int, str]) -> Iterator[dict[str, SshServer]]:
    """An sshd on each of these hosts, and a file ``ssh_config`` that names them."""
    with contextlib.ExitStack() as running:
        servers = {
            name: running.enter_context(
                SshServer(folder / f"sshd-{name}", [name], net.address(number), net.within(number))
            )
            for number, name in names.items()
        }
        (folder / "ssh_config").write_text("".join(server.config.read_text() for server in servers.values()))
        yield servers
