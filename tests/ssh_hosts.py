"""Hosts that are reached by ssh: a real sshd with keys of its own, on a port of its own of this host or within a namespace.

with SshServer(folder) as server: ...          # ssh -F server.config: "here" and "there" are this server
with ssh_servers(net, folder, {2: "two"}): ...               # ssh -F folder/ssh_config
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from waiting import until

from asyncflow_sdk.workflow.processes.ranks import free_port
from benchmarks.hosts.network import Network

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin") or ""
_SERVER = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
"""
_CLIENT = """\
Host {names}
  HostName {address}
  Port {port}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
"""


class SshServer:
    """A running sshd for this user. ``address``: None: a free port of loopback, here. ``names``: by which ``config`` reaches
    it. ``within``: the command that starts it on another host. Skips the test where it cannot run."""

    def __init__(
        self, folder: Path, names: Iterable[str] = ("here", "there"), address: str | None = None, within: Sequence[str] = ()
    ) -> None:  # fmt: skip
        if not SSHD or os.geteuid():
            pytest.skip("needs root and sshd, of Debian's openssh-server: make test installs it")
        folder.mkdir(mode=0o700)
        with contextlib.suppress(FileExistsError):
            os.mkdir("/run/sshd", 0o755)
        for name in ("host_key", "user_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, timeout=60
            )
        self.port = free_port() if address is None else 22
        words = {"address": address or "127.0.0.1", "port": self.port, "folder": folder, "names": " ".join(names)}
        key = " ".join((folder / "host_key.pub").read_text().split()[:2])
        where = f"[{words['address']}]:{self.port}" if self.port != 22 else words["address"]
        (folder / "known_hosts").write_text(f"{where} {key}\n")
        (folder / "server").write_text(_SERVER.format(**words))
        self.config = folder / "client"
        self.config.write_text(_CLIENT.format(**words))
        self._folder, self._within = folder, within
        self.start()

    def start(self) -> None:
        """Start it, again after it was killed."""
        log = self._folder / "log"
        command = [*self._within, SSHD, "-D", "-e", "-f", self._folder / "server"]
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        until(lambda: "Server listening" in log.read_text(), "sshd to listen", 60)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(60)

    def __enter__(self) -> SshServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextlib.contextmanager
def ssh_servers(net: Network, folder: Path, names: Mapping[int, str]) -> Iterator[dict[int, SshServer]]:
    """An sshd on each of these hosts, and a file ``ssh_config`` that names them."""
    with contextlib.ExitStack() as running:
        servers = {
            n: running.enter_context(SshServer(folder / f"sshd-{n}", [name], net.address(n), net.within(n)))
            for n, name in names.items()
        }
        (folder / "ssh_config").write_text("".join(server.config.read_text() for server in servers.values()))
        yield servers
