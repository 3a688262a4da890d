"""Bare ZeroMQ sockets with keys, from the producer to the consumer of each pair, in pieces of 1 MiB from one buffer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from .drive import Job, ready, receive

PORT = 7000
PIECE_BYTES = 1 << 20
BUFFER_BYTES = 64 << 20


def serve(job: Job) -> None:
    keys = [[key.decode() for key in zmq.curve_keypair()] for _ in range(2)]
    _file(job).write_text(json.dumps(keys))
    ready()


def produce(job: Job) -> None:
    socket, (own, _) = _socket(job, zmq.PUSH)
    socket.curve_publickey, socket.curve_secretkey = own
    socket.curve_server = True
    socket.bind(f"tcp://{job.own}:{PORT}")
    values = np.random.default_rng(0).integers(0, 256, BUFFER_BYTES, dtype=np.uint8)
    ready()
    nbytes = job.batches * job.batch_bytes
    for start in range(0, nbytes, PIECE_BYTES):
        at = start % BUFFER_BYTES
        socket.send(memoryview(values[at : at + min(PIECE_BYTES, nbytes - start)]), copy=False)
    ready()


def consume(job: Job) -> None:
    socket, (server, own) = _socket(job, zmq.PULL)
    socket.curve_serverkey = server[0]
    socket.curve_publickey, socket.curve_secretkey = own
    socket.connect(f"tcp://{job.producer}:{PORT}")
    into = np.empty(BUFFER_BYTES, np.uint8)

    def pieces() -> Iterator[int]:
        done = 0
        while done < job.batches * job.batch_bytes:
            frame = socket.recv(copy=False)
            at = done % BUFFER_BYTES
            into[at : at + len(frame)] = np.frombuffer(frame.buffer, np.uint8)
            done += len(frame)
            yield len(frame)

    receive(pieces())


def _socket(job: Job, kind: int) -> tuple[Any, list[list[bytes]]]:
    keys = [[key.encode() for key in pair] for pair in json.loads(_file(job).read_text())]
    return zmq.Context.instance().socket(kind), keys


def _file(job: Job) -> Path:
    return Path(job.folder, "keys.json")
