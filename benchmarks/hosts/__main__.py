"""``make bench-hosts``: columns that stay on their host, beside columns through the server, and a bare socket with keys.

python -m benchmarks.hosts [--quick] [--rate 500mbit] [--pairs N] [--rounds N] [--markdown] [--json PATH]

Hosts are network namespaces with limited links: one for the server, and one each for ``pairs`` producers and consumers.
All processes share the machine's processors. Interleaved rounds, medians.
"""

from __future__ import annotations

import argparse
import json
import statistics as st
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import zmq
from rich.console import Console

from ..table import Row, finish, ratio, show_options
from .network import Network, line_of, unavailable

PORT = 7000
SHAPES = {"3 KB": (256, 3 << 10), "1 MB": (16, 1 << 20)}
"""Rows of a batch, and bytes of a row."""
DRIVE = ["-m", "benchmarks.hosts.drive"]


@dataclass(frozen=True)
class Work:
    """``nbytes``: of each pair's payload."""

    shape: str
    pairs: int
    nbytes: int

    @property
    def batches(self) -> int:
        rows, width = SHAPES[self.shape]
        return max(self.nbytes // (rows * width), 1)


@dataclass(frozen=True)
class Outcome:
    """``rate``: MB/s of all pairs together. ``through_server``: bytes on the server's link, in and out, for each byte of payload."""

    rate: float
    through_server: float


def role(network: Network, host: int, name: str, **options: object) -> subprocess.Popen[str]:
    process = network.start(host, [*DRIVE, name, json.dumps(options)])
    assert line_of(process.stdout) == "ready"
    return process


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def outcome(
    network: Network, senders: list[subprocess.Popen[str]], receivers: list[subprocess.Popen[str]]
) -> Outcome:
    before = network.link_bytes(1)
    for process in (*receivers, *senders):
        say(process)
    found = [json.loads(line_of(process.stdout)) for process in receivers]
    after = network.link_bytes(1)
    for process in senders:
        line_of(process.stdout)
        say(process)
    for process in (*senders, *receivers):
        process.wait(60)
    total = sum(each["bytes"] for each in found)
    return Outcome(total / 1e6 / max(each["seconds"] for each in found), (sum(after) - sum(before)) / total)


def through_queue(network: Network, store: str, work: Work) -> Outcome:
    rows, width = SHAPES[work.shape]
    address = f"tcp://{network.address(1)}:{PORT}"
    with tempfile.TemporaryDirectory() as folder:
        key = str(Path(folder) / "run.key")
        server = role(network, 1, "serve", address=address, directory=folder, store=store)
        producers = range(2, 2 + work.pairs)
        if store == "hosts":
            for host in producers:
                unit = network.start(host, ["-m", "asyncflow_sdk.cli", "store", address, "--key", key])
                line_of(unit.stdout)
        senders = [
            role(network, host, "produce", address=address, key=key, batches=work.batches, rows=rows, nbytes=width)
            for host in producers
        ]
        receivers = [
            role(network, host, "consume", address=address, key=key, batches=work.batches, rows=rows)
            for host in range(2 + work.pairs, 2 + 2 * work.pairs)
        ]
        found = outcome(network, senders, receivers)
        say(server)
        audit = json.loads(line_of(server.stdout))
        if not audit["balanced"] or audit["consumed"] != work.pairs * work.batches * rows:
            raise SystemExit(f"rows are missing: {audit}")
        server.wait(60)
        return found


def bare(network: Network, work: Work) -> Outcome:
    (server, server_secret), (client, client_secret) = (
        tuple(map(bytes.decode, zmq.curve_keypair())) for _ in range(2)
    )
    keys = {"server": server, "server_secret": server_secret, "client": client, "client_secret": client_secret}
    senders, receivers = [], []
    for host in range(2, 2 + work.pairs):
        address = f"tcp://{network.address(host)}:{PORT}"
        senders.append(role(network, host, "send", address=address, keys=keys, nbytes=work.nbytes))
        receivers.append(role(network, host + work.pairs, "receive", address=address, keys=keys, nbytes=work.nbytes))
    return outcome(network, senders, receivers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few bytes: whether it runs, not how fast")
    parser.add_argument("--rate", default="500mbit", help="of each host's link; none: unlimited")
    parser.add_argument("--pairs", type=int, default=2, help="producers, and consumers, each on a host of its own")
    parser.add_argument("--rounds", type=int, default=3)
    show_options(parser)
    arguments = parser.parse_args()
    if why := unavailable():
        raise SystemExit(why)
    console, rows = Console(stderr=True), []
    nbytes = (16 if arguments.quick else 256) << 20
    with Network(1 + 2 * arguments.pairs, "" if arguments.rate == "none" else arguments.rate) as network:
        for shape in SHAPES:
            work = Work(shape, arguments.pairs, nbytes)
            hosts, local, floor = list[Outcome](), list[Outcome](), list[Outcome]()
            for number in range(1 if arguments.quick else arguments.rounds):
                console.print(f"rows of {shape}, round {number + 1}", style="dim")
                hosts.append(through_queue(network, "hosts", work))
                local.append(through_queue(network, "local", work))
                floor.append(bare(network, work))
            rate, through, bound = (st.median(each.rate for each in found) for found in (hosts, local, floor))
            rows.append(
                Row(
                    f"rows of {shape}, one hop",
                    "MB/s",
                    rate,
                    through,
                    ratio(rate, through),
                    bound,
                    ratio(rate, bound),
                )
            )
            on_link, by_server = (st.median(each.through_server for each in found) for found in (hosts, local))
            rows.append(Row("  on the server's link, in and out", "bytes/byte", on_link, by_server))
    finish(
        f"Store hosts (ours), store local (peer), bare sockets with keys (limit); {arguments.pairs} pairs of hosts, links of"
        f" {arguments.rate}",
        rows,
        arguments,
    )


if __name__ == "__main__":
    main()
