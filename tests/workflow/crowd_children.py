"""A run that is served by a process with few file descriptors, and peers that take them."""

from __future__ import annotations

import os
import resource
import socket
from typing import Any

from children import hear, say

import asyncflow_sdk as af
from asyncflow_sdk.types import Event
from asyncflow_sdk.types.events import Note

NULL_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
NULL_HANDSHAKE = NULL_GREETING + b"\x04" + bytes([len(_READY)]) + _READY
"""What a peer without keys sends before its first message."""


def serve_with_few(directory: str, soft: int, hard: int) -> None:
    """Say the addresses and the soft limit of a run, then each note; hear any word, and say how many descriptors are open."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def tell(event: Event) -> None:
        if isinstance(event, Note):
            say(["note", event.text])

    with af.serve(directory, address="tcp://127.0.0.1:0", key=f"{directory}/server.key", on_event=tell) as run:
        say([run.addresses, resource.getrlimit(resource.RLIMIT_NOFILE)[0]])
        while hear():
            say(["open", len(os.listdir("/proc/self/fd"))])


def note_of(child: Any, part: str) -> str:
    """The next note of the child with ``part`` in it."""
    while True:
        kind, text = child.hear()
        if kind == "note" and part in text:
            return str(text)


def open_descriptors(child: Any) -> int:
    child.say(1)
    while True:
        kind, count = child.hear()
        if kind == "open":
            return int(count)


def knock(address: str, count: int) -> list[socket.socket]:
    """Begin ``count`` tcp connections, and send nothing."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    sockets = []
    for _ in range(count):
        sockets.append(peer := socket.socket())
        peer.setblocking(False)
        peer.connect_ex((host, int(port)))
    return sockets
