"""Hosts on this machine: the network namespaces of the benchmarks, and a poor cable between two of them.

with network(2) as net, poor_cable(net) as cable:
    with Child(serve, within=net.within(1)) as server, Child(work, within=net.within(2)) as worker:
        cable({"delay_s": 0.02, "loss": 0.01})          # or {"loss": 1.0}; without the cable: net.cut(2)
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import random
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator

import pytest
from children import Child, say

from benchmarks.hosts.network import NET, Network, unavailable

HERE, THERE = f"{NET}.1", f"{NET}.2"


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    """Skips the test where namespaces may not be made."""
    reason = unavailable()
    if reason:
        pytest.skip(f"hosts cannot be made here: {reason}")
    with Network(count) as made:
        yield made


@contextlib.contextmanager
def poor_cable(net: Network) -> Iterator[Child]:
    """Let a process carry the frames between hosts 1 and 2. It is told ``delay_s`` and ``loss``, of IP packets."""
    for number in (1, 2):
        net.cut(number)
    for within, devices in ((net.within(1), ["eth0"]), (net.within(2), ["eth0"]), (net.switch, ["to1", "to2"])):
        with Child(leave_plain, devices, within=within) as child:
            assert child.wait() == 0, child.errors()
    with Child(carry, within=net.switch) as cable:
        assert cable.hear() == "ready"
        yield cable


def carry() -> None:
    everything = socket.htons(0x0003)
    ends = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, everything) for _ in range(2)]
    for number, end in enumerate(ends):
        end.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_RCVBUFFORCE", 33), 64 << 20)
        end.bind((f"to{number + 1}", 0))
        end.setblocking(False)
    others = {source.fileno(): (source, sink) for source, sink in (ends, ends[::-1])}
    rules = {"delay_s": 0.0, "loss": 0.0}
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
                    lost = frame[12:14] == b"\x08\x00" and numbers.random() < rules["loss"]
                    if origin[2] != socket.PACKET_OUTGOING and not lost:
                        count += 1
                        heapq.heappush(late, (time.monotonic() + rules["delay_s"], count, sink, frame))
        while late and late[0][0] <= time.monotonic():
            _, _, sink, frame = heapq.heappop(late)
            with contextlib.suppress(OSError):
                sink.send(frame)


def leave_plain(devices: list[str]) -> None:
    """Checksums and segments are made before a frame is carried by hand: no device will make them."""
    with socket.socket() as control:
        off = (0x17, 0x1F, 0x24, 0x2C)  # ETHTOOL_S{TXCSUM,TSO,GSO,GRO}
        for device, command in itertools.product(devices, off):
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", device.encode(), ctypes.addressof(value))
            with contextlib.suppress(OSError):
                fcntl.ioctl(control, 0x8946, request)  # SIOCETHTOOL
