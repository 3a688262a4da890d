"""What receivers, publishers and trainers of the tests of the transport ``dist`` do in processes of their own."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from children import hear, say

from asyncflow_sdk.errors import AsyncFlowError
from asyncflow_sdk.interfaces import Host
from asyncflow_sdk.testing.ends import layout
from asyncflow_sdk.types import Chunk, Manifest
from asyncflow_sdk.types.manifest import digest

FD, TASK = "/proc/self/fd", "/proc/self/task"


def counts() -> list[int]:
    """Descriptors and threads of this process."""
    return [len(os.listdir(FD)), len(os.listdir(TASK))]


def peak_bytes() -> int:
    """The most memory this process had since ``forget_peak``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmHWM")


def forget_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def listening() -> list[tuple[str, int]]:
    """Addresses this process listens at, as hexadecimal words (that of IPv4 loopback is 0100007F), and ports."""
    own = {os.readlink(f"{FD}/{fd}") for fd in os.listdir(FD) if os.path.islink(f"{FD}/{fd}")}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                address, _, port = fields[1].partition(":")
                found.append((address, int(port, 16)))
    return found


def content(chunks: Any) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(chunk.tobytes() for chunk in chunks))


def stop_at(owner: Any, name: str, calls: int, number: int) -> None:
    """Send this process a signal at the so-manieth call of a method."""
    real, seen = getattr(owner, name), [0]

    def wrapped(*arguments: Any) -> Any:
        seen[0] += 1
        if seen[0] == calls:
            os.kill(os.getpid(), number)
        return real(*arguments)

    setattr(owner, name, wrapped)


def receive(name: str, address: str = "127.0.0.1") -> None:
    """Fetch what it is told to, and say what came of it."""
    from asyncflow_torch import dist_receiver
    from asyncflow_torch.transport_dist import DistTransport

    receiver = DistTransport().receiver(Host(directory=None, name=name, address=address))
    signal.signal(signal.SIGUSR1, lambda *_: (say("in the middle"), hear()))
    say("ready")
    held = None
    real = dist_receiver._Part._arrived
    while (order := hear()) is not None:
        if "count" in order:
            say([*counts(), listening()])
            continue
        dist_receiver._Part._arrived = real  # type: ignore[method-assign]
        if order["at"]:
            stop_at(dist_receiver._Part, "_arrived", order["at"], order["signal"])
        manifest = msgspec.json.decode(order["manifest"], type=Manifest)
        if held is not None:
            held.release()
        held, before = None, forget_peak()
        try:
            held = receiver.fetch(manifest, bytes.fromhex(order["where"]), timeout_s=order["timeout_s"])
        except AsyncFlowError as error:
            say({"error": type(error).__name__, "says": str(error)})
        else:
            grown = peak_bytes() - before
            say({"content": content(held.chunks), "grown": grown, "moved": held.moved})
    receiver.close()
    say("closed")


def model(version: int, nbytes: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(version).integers(0, 256, nbytes, np.uint8)


def write(sender: Any, version: int, nbytes: int, bucket: int = 1 << 16) -> tuple[Manifest, list[Any]]:
    """Fill rooms with random bytes; what would be sent, and the rooms' memory."""
    tensors = {"embed": model(version, nbytes // 2), "head": model(version + 1000, nbytes // 2)}
    infos, sizes = layout(tensors, 1 << 30)
    rooms = [sender.room(size) for size in sizes]
    for info in infos:
        at = slice(info.offset, info.offset + info.nbytes)
        rooms[info.chunk].memory[at] = tensors[info.name]
    chunks = tuple(
        Chunk(
            len(r.memory),
            tuple(digest(memoryview(r.memory[i : i + bucket])) for i in range(0, len(r.memory), bucket)),
        )
        for r in rooms
    )
    return Manifest(version, tuple(infos), chunks, bucket), [room.memory for room in rooms]


def publish(
    version: int,
    nbytes: int,
    starts: int,
    number: int,
    address: str = "127.0.0.1",
    stall_s: float = 2.0,
    looks: int = 0,
) -> None:
    """Publish one version; be stopped by a signal at the so-manieth bucket of its broadcast, or look at the board."""
    from asyncflow_torch import dist_board, dist_group
    from asyncflow_torch.transport_dist import DistTransport

    stop_at(dist_group.Group, "_start", starts, number)
    stop_at(dist_board.Board, "look", looks, number)
    host = Host(directory=None, name="trainer", address=address)
    sender = DistTransport(stall_s=stall_s, insecure=address != "127.0.0.1").sender(host)
    manifest, memory = write(sender, version, nbytes)
    say([msgspec.json.encode(manifest).decode(), sender.send(manifest).hex(), content(memory)])
    hear()


def train(rank: int, rendezvous: str, versions: int, nbytes: int) -> None:
    """A trainer of two ranks with a gloo group of its own, which works all the time; rank 0 publishes."""
    import torch
    import torch.distributed as dist

    from asyncflow_torch.transport_dist import DistTransport

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    ended = torch.zeros(1)
    if rank == 0:
        sender = DistTransport().sender(Host(directory=None, name="trainer"))

        def publish_all() -> None:
            for version in range(1, versions + 1):
                manifest, memory = write(sender, version, nbytes)
                say([msgspec.json.encode(manifest).decode(), sender.send(manifest).hex(), content(memory)])
                hear()  # all have it
                sender.keep([version])
            ended[0] = 1.0

        threading.Thread(target=publish_all, daemon=True).start()
    steps = 0
    while True:
        gradient = torch.full((50_000,), float(rank + 1))
        dist.all_reduce(gradient)
        assert gradient.eq(3.0).all(), gradient
        steps += 1
        over = ended.clone()
        dist.all_reduce(over)
        if over[0]:
            break
    dist.destroy_process_group()
    if rank == 0:
        sender.close()
    say({"steps": steps})
    sys.stdout.flush()
    signal.raise_signal(signal.SIGKILL)  # whatever is left of torch's threads at exit is not what is tested
