"""Two hosts on one: network namespaces joined by a third, where a process carries every Ethernet frame by hand, late,
not at all, or not for now. Each host has a /dev/shm and process numbers of its own.

with two_hosts() as hosts:
    with Child(serve, within=hosts.here) as server, Child(work, within=hosts.there) as worker:
        hosts.link.say({"delay_s": 0.02, "loss": 0.01})      # or {"cut": True}
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from children import Child, say

HERE, THERE = "10.231.7.1", "10.231.7.2"
_OWN = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'


@dataclass(frozen=True)
class Hosts:
    """``here`` and ``there``: what starts a process on each. ``link``: told what befalls the frames between them."""

    here: list[str]
    there: list[str]
    link: Child


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Skips the test where namespaces may not be made."""
    names = [f"af-{os.getpid()}-{part}" for part in ("here", "there", "link")]
    here, there, link = names
    try:
        try:
            for name in names:
                _run(*f"ip netns add {name}".split())
            for number, (name, address) in enumerate(((here, HERE), (there, THERE))):
                _run(*f"ip -n {link} link add m{number} type veth peer name e0 netns {name}".split())
                _run(*f"ip -n {name} addr add {address}/24 dev e0".split())
                for space, device in ((name, "lo"), (name, "e0"), (link, f"m{number}")):
                    _run(*f"ip -n {space} link set {device} up".split())
            for name, devices in ((here, ["e0"]), (there, ["e0"]), (link, ["m0", "m1"])):
                with Child(leave_plain, devices, within=_within(name)) as child:
                    assert child.wait() == 0, child.errors()
            host = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", _OWN, "sh"]
            _run(*_within(here), *host, "true")
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", "") or error
            pytest.skip(f"network namespaces cannot be made here: {said}")
        with Child(carry, within=_within(link)) as child:
            assert child.hear() == "ready"
            yield Hosts([*_within(here), *host], [*_within(there), *host], child)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _within(name: str) -> list[str]:
    return ["ip", "netns", "exec", name]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


def carry() -> None:
    """The process between: it carries frames and is told ``delay_s``, ``loss`` (of IP packets) and ``cut``."""
    everything = socket.htons(0x0003)
    ends = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, everything) for _ in range(2)]
    for number, end in enumerate(ends):
        end.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_RCVBUFFORCE", 33), 64 << 20)
        end.bind((f"m{number}", 0))
        end.setblocking(False)
    others = {ends[0].fileno(): (ends[0], ends[1]), ends[1].fileno(): (ends[1], ends[0])}
    rules = {"delay_s": 0.0, "loss": 0.0, "cut": False}
    numbers = random.Random(0)
    late: list[tuple[float, int, socket.socket, bytes]] = []
    count = 0
    say("ready")
    while True:
        left = max(0.0, late[0][0] - time.monotonic()) if late else None
        ready, _, _ = select.select([0, *others], [], [], left)
        if 0 in ready:
            line = sys.stdin.readline()
            if not line:
                return
            rules.update(json.loads(line))
            say("done")
        for fd in (fd for fd in ready if fd):
            source, sink = others[fd]
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    frame, origin = source.recvfrom(65536)
                    if origin[2] == socket.PACKET_OUTGOING or rules["cut"]:
                        continue
                    if frame[12:14] == b"\x08\x00" and numbers.random() < rules["loss"]:
                        continue
                    count += 1
                    heapq.heappush(late, (time.monotonic() + rules["delay_s"], count, sink, frame))
        while late and late[0][0] <= time.monotonic():
            _, _, sink, frame = heapq.heappop(late)
            with contextlib.suppress(OSError):
                sink.send(frame)


def leave_plain(devices: list[str]) -> None:
    """Checksums and segments are made before a frame is carried by hand: no device will make them."""
    with socket.socket() as control:
        for device, command in itertools.product(
            devices, (0x17, 0x1F, 0x24, 0x2C)
        ):  # ETHTOOL_S{TXCSUM,TSO,GSO,GRO}: off
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", device.encode(), ctypes.addressof(value))
            with contextlib.suppress(OSError):
                fcntl.ioctl(control, 0x8946, request)  # SIOCETHTOOL
