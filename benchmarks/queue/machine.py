"""What this machine allows: memory copies, and round trips of ZeroMQ between two processes."""

from __future__ import annotations

import json
import multiprocessing as mp
import statistics as st
import tempfile
import time
from typing import Any

import numpy as np
import zmq

COPY_BYTES = 256 << 20
TRIPS = 3000


def copies(fresh: bool) -> float:
    """GB/s of copying; ``fresh``: into pages that are touched for the first time."""
    source = np.ones(COPY_BYTES, np.uint8)
    target = np.ones(COPY_BYTES, np.uint8)

    def once() -> float:
        began = time.perf_counter()
        if fresh:
            source.copy()
        else:
            np.copyto(target, source)
        return COPY_BYTES / (time.perf_counter() - began) / 1e9

    return st.median(once() for _ in range(3))


def _echo(address: str, ready: Any) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(address)
        ready.send(socket.get_string(zmq.LAST_ENDPOINT))
        for _ in range(TRIPS):
            socket.send_multipart(socket.recv_multipart())
        ready.recv()


def round_trip(address: str) -> float:
    """Microseconds of a 64-byte request and its echo, median."""
    here, there = mp.Pipe()
    process = mp.get_context("spawn").Process(target=_echo, args=(address, there), daemon=True)
    process.start()
    times = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(here.recv())
        for _ in range(TRIPS):
            began = time.perf_counter()
            socket.send(b"x" * 64)
            socket.recv()
            times.append(time.perf_counter() - began)
    here.send(None)
    process.join(10)
    return st.median(times) * 1e6


def limits() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return {
            "copy_gb_s": copies(fresh=False),
            "copy_fresh_gb_s": copies(fresh=True),
            "ipc_us": round_trip(f"ipc://{folder}/echo"),
            "tcp_us": round_trip("tcp://127.0.0.1:*"),
        }


if __name__ == "__main__":
    print(json.dumps(limits()))
