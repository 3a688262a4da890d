"""``make bench-hosts``: columns that stay on their host, beside columns through the server, bare sockets with keys, and others.

python -m benchmarks.hosts [--quick] [--rate 500mbit] [--pairs N] [--rounds N] [--markdown] [--json PATH]

Hosts are network namespaces with limited links: one for the server, and one each for ``pairs`` producers and consumers.
All processes share the machine's processors. Interleaved rounds, medians. Ascend's TransferQueue, Mooncake and Ray each have an
environment of their own; one that is missing is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics as st
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from ..table import Row, finish, ratio, show_options
from .drive import Job
from .network import Network, line_of, unavailable

ROOT = Path(__file__).parents[2]
SHAPES = {"3 KB": (256, 3 << 10), "1 MB": (16, 1 << 20)}
"""Rows of a batch, and bytes of a row."""


@dataclass(frozen=True)
class Contender:
    """``module``: with its roles. ``python``: of its environment. ``store``: of a run of ours."""

    module: str
    python: str = sys.executable
    store: str = ""


OURS = {
    "hosts": Contender("ours", store="hosts"),
    "local": Contender("ours", store="local"),
    "bare": Contender("bare"),
}
PEERS = {
    "TransferQueue": ("peer_queue", ".venv-peer", "transfer_queue"),
    "Mooncake": ("peer_mooncake", ".venv-mooncake", "mooncake.store"),
    "Ray": ("peer_ray", ".venv-ray", "ray"),
}
"""Module, environment, and what it has to import."""


@dataclass(frozen=True)
class Outcome:
    """``rate``: MB/s of all pairs together. ``through_server``: bytes on the server's link, in and out, for each byte of payload."""

    rate: float
    through_server: float


def found_peers(console: Console) -> dict[str, Contender]:
    """The peers that can be had."""
    found = {}
    for name, (module, folder, imports) in PEERS.items():
        python = ROOT / folder / "bin" / "python"
        try:
            done = subprocess.run([python, "-c", f"import {imports}"], capture_output=True, text=True, check=False)
            why = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else ""
        except FileNotFoundError:
            why = f"there is no {folder}"
        if why:
            console.print(f"{name} is left out: {why}", style="yellow", highlight=False)
        else:
            found[name] = Contender(module, str(python))
    return found


def measure(network: Network, contender: Contender, shape: str, pairs: int, nbytes: int) -> Outcome:
    """``nbytes``: of each pair's payload."""
    rows, width = SHAPES[shape]
    with tempfile.TemporaryDirectory() as folder:

        def start(host: int, role: str, pair: int = 0) -> subprocess.Popen[str]:
            job = Job(
                server=network.address(1), own=network.address(host), producer=network.address(2 + pair), pair=pair, pairs=pairs,
                batches=max(nbytes // (rows * width), 1), rows=rows, width=width, folder=folder, store=contender.store,
            )  # fmt: skip
            command = ["-m", "benchmarks.hosts.drive", contender.module, role, json.dumps(asdict(job))]
            return network.start(host, command, contender.python)

        server = start(1, "serve")
        hear(server)
        senders = [start(2 + pair, "produce", pair) for pair in range(pairs)]
        receivers = [start(2 + pairs + pair, "consume", pair) for pair in range(pairs)]
        for process in (*senders, *receivers):
            hear(process)
        before = network.link_bytes(1)
        for process in (*receivers, *senders):
            say(process)
        found = [json.loads(line_of(process.stdout)) for process in receivers]
        after = network.link_bytes(1)
        for process in senders:
            hear(process)
        for process in (*senders, server):
            say(process)
        for process in (*senders, *receivers, server):
            if process.wait(60):
                raise SystemExit(f"a process of {contender} failed; see its output above")
    for host in range(1, 2 + 2 * pairs):
        # Killed units leave their memory. Once it is full, payload goes to the disk that all hosts share.
        network.kill(host)
    total = sum(each["bytes"] for each in found)
    return Outcome(total / 1e6 / max(each["seconds"] for each in found), (sum(after) - sum(before)) / total)


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> None:
    if (line := line_of(process.stdout)) != "ready":
        raise SystemExit(f"a process of the benchmark says {line!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few bytes, and no peers: whether it runs, not how fast")
    parser.add_argument("--rate", default="500mbit", help="of each host's link; none: unlimited")
    parser.add_argument("--pairs", type=int, default=2, help="producers, and consumers, each on a host of its own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=256, help="of each pair")
    show_options(parser)
    arguments = parser.parse_args()
    if why := unavailable():
        raise SystemExit(why)
    console, rows = Console(stderr=True), list[Row]()
    peers = {} if arguments.quick else found_peers(console)
    nbytes, rounds = (16, 1) if arguments.quick else (arguments.megabytes, arguments.rounds)
    with Network(1 + 2 * arguments.pairs, "" if arguments.rate == "none" else arguments.rate) as network:
        for shape in SHAPES:
            outcomes: dict[str, list[Outcome]] = {name: [] for name in (*OURS, *peers)}
            for number in range(rounds):
                for name, contender in (OURS | peers).items():
                    outcomes[name].append(measure(network, contender, shape, arguments.pairs, nbytes << 20))
                    rate = outcomes[name][-1].rate
                    console.print(f"rows of {shape}, round {number + 1}, {name}: {rate:.1f} MB/s", style="dim")
            rates = {name: st.median(each.rate for each in found) for name, found in outcomes.items()}
            bound = rates.pop("bare")
            ours = rates.pop("hosts")
            for name, rate in rates.items():
                work = f"rows of {shape}, store hosts beside {'store local' if name == 'local' else name}"
                rows.append(Row(work, "MB/s", ours, rate, ratio(ours, rate), bound, ratio(ours, bound)))
            link = [st.median(each.through_server for each in outcomes[name]) for name in ("hosts", "local")]
            rows.append(Row(f"rows of {shape}, on the server's link, in and out", "bytes/byte", *link))
    title = f"Store hosts (ours), others (peer), bare sockets with keys (limit); {arguments.pairs} pairs of hosts, links of"
    finish(f"{title} {arguments.rate}", rows, arguments)


if __name__ == "__main__":
    main()
