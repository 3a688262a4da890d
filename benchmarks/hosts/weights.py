"""Weights from one host to others over limited links: each host's time and the publisher's bytes, beside the ideal.

python -m benchmarks.hosts.weights [--quick] [--hosts 8] [--rate 50] [--mbytes 256] [--markdown] [--json PATH]

Ideal: the publisher's link carries a copy for each host, and nothing else takes time. Versions are random, so none is sent
as a delta.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import asyncflow_sdk as af

from ..table import Row, finish, ratio, show_options
from .network import Network, line_of, unavailable

PORT = 7000
SHAPE = ("64kb", "256kb")
"""Burst and queue of a link: 40 ms at 50 Mbit/s. A longer queue delays requests behind megabytes of data, as no switch
does."""
LIMIT_S = 1800.0


def publish(address: str, directory: str, nbytes: int) -> None:
    """On a host: serve a run, and publish a version for each line."""
    with af.serve(directory, address=address) as run, run.weight_publisher("tcp") as publisher:
        print("ready", flush=True)
        numbers = np.random.default_rng(0)
        for version, _ in enumerate(sys.stdin, 1):
            weights = {"w": numbers.integers(0, 256, nbytes, np.uint8)}
            began = time.monotonic()
            publisher.publish(version, weights).wait(LIMIT_S)
            print(json.dumps(began), flush=True)


def replicate(address: str, key: str, name: str) -> None:
    """On a host: load each version, and print when it was verified."""
    with af.connect(address, key=key, name=name) as run:
        updates = run.weight_updates(timeout_s=LIMIT_S, fetch_timeout_s=LIMIT_S)
        print("ready", flush=True)
        for update in updates:
            done = time.monotonic()
            with update:
                for _ in update.arrays():
                    pass
            print(json.dumps(done), flush=True)


def measure(network: Network, hosts: int, nbytes: int) -> tuple[list[float], float]:
    """Return the seconds until each host has a version, and the copies sent by the publisher's host."""
    address = f"tcp://{network.address(1)}:{PORT}"
    module = ["-m", "benchmarks.hosts.weights"]
    with tempfile.TemporaryDirectory() as folder:
        options = {"address": address, "directory": folder, "nbytes": nbytes}
        trainer = network.start(1, [*module, "publish", json.dumps(options)])
        assert line_of(trainer.stdout) == "ready"
        key = str(Path(folder) / "run.key")
        replicas = []
        for host in range(2, 2 + hosts):
            options = {"address": address, "key": key, "name": f"host{host}"}
            replicas.append(network.start(host, [*module, "replicate", json.dumps(options)]))
        for replica in replicas:
            assert line_of(replica.stdout) == "ready"
        before = network.link_bytes(1)[1]
        assert trainer.stdin is not None
        trainer.stdin.write("go\n")
        trainer.stdin.flush()
        began = json.loads(line_of(trainer.stdout))
        took = [json.loads(line_of(replica.stdout)) - began for replica in replicas]
        sent = (network.link_bytes(1)[1] - before) / nbytes
        for process in (*replicas, trainer):
            process.kill()
            process.wait(60)
        return sorted(took), sent


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] in ("publish", "replicate"):
        {"publish": publish, "replicate": replicate}[sys.argv[1]](**json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few bytes: whether it runs, not how fast")
    parser.add_argument("--rate", type=int, default=50, help="of each host's link, in Mbit/s")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--mbytes", type=int, default=256)
    show_options(parser)
    arguments = parser.parse_args()
    if why := unavailable():
        raise SystemExit(why)
    nbytes = (8 if arguments.quick else arguments.mbytes) << 20
    with Network(1 + arguments.hosts, f"{arguments.rate}mbit", shape=SHAPE) as network:
        took, sent = measure(network, arguments.hosts, nbytes)
    ideal = arguments.hosts * nbytes * 8 / (arguments.rate * 1e6)
    rows = [
        Row("the last host", "s", took[-1], None, None, ideal, ratio(took[-1], ideal)),
        Row("the first host", "s", took[0], None, None, ideal, ratio(took[0], ideal)),
        Row("on the publisher's link", "copies", sent, None, None, arguments.hosts, ratio(sent, arguments.hosts)),
    ]
    finish(f"{nbytes >> 20} MiB to {arguments.hosts} hosts, links of {arguments.rate} Mbit/s", rows, arguments)


if __name__ == "__main__":
    main()
