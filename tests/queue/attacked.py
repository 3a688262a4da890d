"""A run on three hosts, each process on a host of its own, to be attacked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attacked_children as children
from children import Child

from benchmarks.hosts.network import Network

SERVER, NEAR, FAR = 1, 2, 3
PORT = 7000


class Process(Child):
    """A process that answers expressions. ``rows``: the next answer, numbers of rows, sorted."""

    def __call__(self, expression: str) -> Any:
        self.say(expression)
        return self.hear()

    def rows(self) -> list[int]:
        found = self.hear()
        assert isinstance(found, list), found
        return sorted(found)


class Attacked:
    """A run on three hosts. Host 1 has the server; NEAR and FAR have units and clients as they are started."""

    def __init__(self, network: Network, folder: Path, ends: contextlib.ExitStack) -> None:
        self.network, self.folder, self._ends = network, folder, ends
        self.address = f"tcp://{network.address(SERVER)}:{PORT}"
        self.key = str(folder / "run" / "run.key")
        self.disk, self._disks = folder / "own-disk", folder
        self.units: dict[int, Process] = {}
        self.options: dict[str, Any] = {}

    def start(self, host: int, function: Callable[..., None], *arguments: Any) -> Process:
        """Start a process on a host. It sees the host's own disk at ``disk``."""
        for folder in (self.disk, self.disk_of(host)):
            folder.mkdir(exist_ok=True)
        mount = [
            "bash",
            "-c",
            'mount --bind "$1" "$2"; shift 2; exec "$@"',
            "-",
            str(self.disk_of(host)),
            str(self.disk),
        ]
        return self._ends.enter_context(Process(function, *arguments, within=[*self.network.within(host), *mount]))

    def disk_of(self, host: int) -> Path:
        """The disk of a host, as this process sees it."""
        return self._disks / f"disk-of-{host}"

    def begin(self, *, batch_rows: int | None = None, **options: Any) -> list[Process]:
        """Serve the run, and start a unit and a client on NEAR and FAR. Returns the clients."""
        self.serve(**options)
        self.declare(batch_rows)
        return self.populate(NEAR, FAR)

    def serve(self, **options: Any) -> Any:
        """Serve the run, again after ``kill``. Returns what was recovered."""
        self.options = options
        self.server = self.start(SERVER, children.serve, str(self.folder / "run"), self.address, options)
        return self.server.hear()

    def kill_server(self) -> None:
        """Kill the server, and serve its run again. The journal gives the same answers."""
        live = self.audit()["live"]
        self.server.kill()
        found = self.serve(**self.options)
        assert found == {"rows": live, "differing": 0}, found

    def declare(self, batch_rows: int | None = None) -> None:
        """A lost attempt is a failed row. ``batch_rows``: of a step, if rows are trained in steps."""
        self.server("queue.declare('score', needs=['x', 'number'], gives=['y'], max_attempts=1)")
        needs = ["x", "ids", "text", "y", "number"]
        self.server(f"queue.declare('train', needs={needs}, max_attempts=1, batch_rows={batch_rows})")

    def unit(self, host: int, *, listen: str | None = None, key: str = "") -> Process:
        return self.start(host, children.unit, self.address, key or self.key, listen)

    def client(self, host: int, *, key: str = "", patience_s: float = 0.0) -> Process:
        name = f"client of host {host}"
        return self.start(host, children.client, self.address, key or self.key, name, patience_s)

    def populate(self, *hosts: int, patience_s: float = 0.0) -> list[Process]:
        """Start a unit and a client on each host, all at the same time. Returns the clients."""
        self.units |= {host: self.unit(host) for host in hosts}
        clients = [self.client(host, patience_s=patience_s) for host in hosts]
        for host in hosts:
            assert "is served at" in self.units[host].hear()
        for client in clients:
            assert client.hear() == "connected"
        return clients

    def audit(self) -> dict[str, int]:
        found: dict[str, int] = self.server("audit()")
        return found

    def home(self, host: int) -> dict[str, Any]:
        (found,) = (home for home in self.server("run.homes()") if home["name"].startswith(f"host{host}-"))
        return dict(found)

    def evict(self, host: int) -> None:
        name = self.home(host)["name"]
        self.server(f"run.evict_home(next(home for home in run.homes() if home.name == {name!r}), 'it burns')")

    def absent(self, host: int) -> bool:
        return not self.home(host)["address"]

    def folder_of(self, host: int) -> Path:
        """The directory of a host's unit, as this process sees it."""
        path = Path(self.home(host)["directory"])
        return (self.disk_of(host) if path.parent == self.disk else self.network.memory(host)) / path.name

    def ended(self, **states: int) -> None:
        """Each row ended once: ``states`` are all that there are."""
        audit = self.audit()
        assert audit == {**dict.fromkeys(audit, 0), **states, "put": sum(states.values())}
