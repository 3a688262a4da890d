"""Mooncake over tcp: one hard-pinned object for each batch, in the segment of its producer, from and into registered buffers.

It has no keys, and tells nobody that an object is there: consumers look until it is.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}

import numpy as np
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from .drive import Job, ready, receive

PORT = 7000
BUFFER_BYTES = 16 << 20
EMPTY_S = 0.0005


def serve(job: Job) -> None:
    master = Path(sys.executable).with_name("mooncake_master")
    subprocess.Popen([str(master), f"--rpc_port={PORT}", f"--metrics_port={PORT + 1}"])
    while True:  # the first that listens
        try:
            socket.create_connection((job.server, PORT), 1).close()
            break
        except OSError:
            time.sleep(0.1)
    ready()


def produce(job: Job) -> None:
    client = _client(job, 2 * job.batches * job.batch_bytes)
    values = job.values()
    client.register_buffer(values.ctypes.data, values.nbytes)
    config = ReplicateConfig()
    config.with_hard_pin, config.preferred_segment = True, client.get_hostname()
    ready()
    for number in range(job.batches):
        if code := client.put_from(_name(job, number), values.ctypes.data, values.nbytes, config):
            raise SystemExit(f"Mooncake wrote no object: {code}")
    ready()


def consume(job: Job) -> None:
    client = _client(job, 0)
    into = np.empty(job.batch_bytes, np.uint8)
    client.register_buffer(into.ctypes.data, into.nbytes)

    def batches() -> Iterator[int]:
        for number in range(job.batches):
            name = _name(job, number)
            while client.is_exist(name) != 1:
                time.sleep(EMPTY_S)
            if (code := client.get_into(name, into.ctypes.data, into.nbytes)) != into.nbytes:
                raise SystemExit(f"Mooncake read no object: {code}")
            client.remove(name, True)
            yield into.nbytes

    receive(batches())


def _client(job: Job, segment_bytes: int) -> Any:
    client = MooncakeDistributedStore()
    code = client.setup(job.own, "P2PHANDSHAKE", segment_bytes, BUFFER_BYTES, "tcp", "", f"{job.server}:{PORT}")
    if code:
        raise SystemExit(f"Mooncake's setup failed: {code}")
    return client


def _name(job: Job, number: int) -> str:
    return f"{job.pair}-{number}"
