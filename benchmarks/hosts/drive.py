"""What runs on a host: ``python -m benchmarks.hosts.drive ROLE JSON``. Each says "ready", and then what it has measured."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import zmq

import asyncflow_sdk as af

PIECE_BYTES = 1 << 20


def serve(address: str, directory: str, store: str) -> None:
    with af.serve(directory, address=address, store=store, capacity_bytes=256 << 20) as run:
        run.queue.declare("work", needs=["x"])
        print("ready", flush=True)
        sys.stdin.readline()
        audit = run.audit()
        print(json.dumps({"consumed": audit.consumed, "balanced": audit.balanced}), flush=True)
        run.queue.end(cancel=True)


def produce(address: str, key: str, batches: int, rows: int, nbytes: int) -> None:
    with af.connect(address, key=key, name="producer") as run:
        values = np.random.default_rng(0).integers(0, 256, (rows, nbytes), dtype=np.uint8)
        print("ready", flush=True)
        sys.stdin.readline()
        for _ in range(batches):
            run.queue.put({"x": values}, timeout_s=120.0)
        print("put", flush=True)
        sys.stdin.readline()


def consume(address: str, key: str, batches: int, rows: int) -> None:
    with af.connect(address, key=key, name="consumer") as run:
        print("ready", flush=True)
        sys.stdin.readline()
        began, nbytes = time.monotonic(), 0
        for _ in range(batches):
            with run.queue.get("work", rows, timeout_s=120.0) as batch:
                nbytes += batch["x"].nbytes
                batch.ack()
        print(json.dumps({"bytes": nbytes, "seconds": time.monotonic() - began}), flush=True)


def send(address: str, keys: dict[str, str], nbytes: int) -> None:
    """A bare ZeroMQ socket with keys, in pieces of 1 MiB from one buffer."""
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.curve_secretkey, socket.curve_publickey = keys["server_secret"].encode(), keys["server"].encode()
    socket.curve_server = True
    socket.bind(address)
    values = np.random.default_rng(0).integers(0, 256, 64 << 20, dtype=np.uint8)
    print("ready", flush=True)
    sys.stdin.readline()
    for start in range(0, nbytes, PIECE_BYTES):
        at = start % len(values)
        socket.send(memoryview(values[at : at + min(PIECE_BYTES, nbytes - start)]), copy=False)
    print("put", flush=True)
    sys.stdin.readline()


def receive(address: str, keys: dict[str, str], nbytes: int) -> None:
    socket = zmq.Context.instance().socket(zmq.PULL)
    socket.curve_serverkey = keys["server"].encode()
    socket.curve_publickey, socket.curve_secretkey = keys["client"].encode(), keys["client_secret"].encode()
    socket.connect(address)
    into = np.empty(64 << 20, np.uint8)
    print("ready", flush=True)
    sys.stdin.readline()
    began, done = time.monotonic(), 0
    while done < nbytes:
        frame = socket.recv(copy=False)
        at = done % len(into)
        into[at : at + len(frame)] = np.frombuffer(frame.buffer, np.uint8)
        done += len(frame)
    print(json.dumps({"bytes": done, "seconds": time.monotonic() - began}), flush=True)


def main() -> None:
    roles: dict[str, Any] = {
        "serve": serve, "produce": produce, "consume": consume, "send": send, "receive": receive,
    }  # fmt: skip
    roles[sys.argv[1]](**json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
