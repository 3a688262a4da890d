"""Processes that come to a run over tcp: of its user, and of another."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from children import say

import asyncflow_sdk as af
from asyncflow_sdk.errors import AsyncFlowError
from asyncflow_sdk.weights.service import ServiceClient
from asyncflow_sdk.weights.tcp_messages import TcpWhere

NOBODY = 65534


def count_rows(address: str) -> None:
    """Connect with the address alone, and say how many rows were put."""
    with af.connect(address) as run:
        say(run.queue.audit().put)


def try_as_another_user(address: str, directory: str, where: str) -> None:
    """As the user nobody: say what came of each way to the run's rows and weights."""
    connect, _ = af.connect, "x".encode("idna")  # what loads lazily, from files that the other user may not see
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    place = msgspec.msgpack.decode(bytes.fromhex(where), type=TcpWhere)
    assert place.bulk is not None
    found = {}
    for name, attempt in {
        "connect": lambda: connect(address, timeout_s=20.0),
        "connect without a key": lambda: connect(address, timeout_s=20.0, insecure=True),
        "connect to the directory": lambda: connect(directory, timeout_s=1.0),
        "read the key": lambda: Path(directory, "run.key").read_bytes(),
        "call the weights without a key": lambda: ServiceClient(_without_key(place.service)).call(b"", 20.0),
        "open the weights' socket file": lambda: os.stat(place.bulk.host),
    }.items():
        try:
            attempt()
            found[name] = "it worked"
        except (AsyncFlowError, OSError) as error:
            found[name] = type(error).__name__
    say(found)


def _without_key(service: bytes) -> bytes:
    """A service as somebody knows it who has seen no more than its address."""
    address, _, pid, pid_key = msgspec.msgpack.decode(service)
    return msgspec.msgpack.encode((address, None, pid, pid_key))
