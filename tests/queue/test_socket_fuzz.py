"""Whatever arrives at a run's socket, valid messages bent at random above all, its server goes on, and so do others.

``HYPOTHESIS_PROFILE=long pytest tests/queue/test_socket_fuzz.py`` looks longer; a failure names its seed.
"""

import contextlib
import logging
import os
import random
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from queue_runs import Served, running
from waiting import until

from asyncflow_sdk.interfaces import TransferQueue

TURNS = 4000 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 60
"""Of each kind of attack."""


def bent(numbers: random.Random, message: list[bytes]) -> list[bytes]:
    """A message with something wrong, somewhere."""
    frames = list(message)
    which = numbers.randrange(len(frames))
    frame = frames[which]
    how = numbers.choice(["flip", "flip", "flip", "cut", "grow", "swap", "drop", "twice", "noise", "splice"])
    if how == "flip" and frame:
        changed = bytearray(frame)
        for _ in range(numbers.choice([1, 1, 2, 5])):
            changed[numbers.randrange(len(changed))] ^= 1 << numbers.randrange(8)
        frames[which] = bytes(changed)
    elif how == "cut":
        frames[which] = frame[: numbers.randrange(len(frame) + 1)]
    elif how == "grow":
        frames[which] = frame + numbers.randbytes(numbers.choice([1, 16, 100_000]))
    elif how == "swap":
        numbers.shuffle(frames)
    elif how == "drop":
        del frames[which]
    elif how == "twice":
        frames[which:which] = [frame] * min(numbers.choice([1, 50, 5000]), (4 << 20) // (len(frame) + 1))
    elif how == "noise":
        frames[which] = numbers.randbytes(numbers.choice([0, 1, 30, 3000]))
    elif how == "splice" and frame:
        at = numbers.randrange(len(frame))
        piece = numbers.choice(
            [b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 2000, b"\xcf" + b"\xff" * 8]
        )
        frames[which] = frame[:at] + piece + frame[at + numbers.randrange(3) :]
    return frames or [b""]


def attack_with_messages(run: Served, numbers: random.Random) -> None:
    """Bent copies of each message of a client precede it, or come from a session that nobody knows."""

    def changed(message: list[bytes]) -> list[list[bytes]]:
        copies = [bent(numbers, message) for _ in range(numbers.choice([0, 2, 5]))]
        return [*copies, [part.replace(b"a", b"b") for part in bent(numbers, message)], message]

    for far in (True, False):
        proxy, queue = run.proxied("attacker", shared_memory=not far)
        proxy.changed = changed
        large = np.zeros((3, 1 << 20), np.uint8) if far else np.zeros((3, 10), np.uint8)
        for turn in range(TURNS // 2):
            columns = {"attack": np.arange(6.0), "text": ["a", "", "\u00e4", "b", "c", "d"]}
            with contextlib.suppress(Exception):
                queue.put({"attack": np.zeros(3), "large": large} if turn % 10 == 0 else columns, timeout_s=0.01)
            with contextlib.suppress(Exception):
                with queue.get("attacked", 3, timeout_s=0.01) as batch:
                    batch.complete({"done": batch.array("attack")}, index=[0])
            with contextlib.suppress(Exception):
                queue.status()
        proxy.changed = lambda message: [message]
    assert run.run.queue.status().garbage > 0


def attack_with_bytes(run: Served, numbers: random.Random) -> None:
    """Bytes below ZeroMQ's own framing: handshakes cut short and bent, frames of sizes that nobody sends."""
    host, port = run.address.removeprefix("tcp://").rsplit(":", 1)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    sizes = [0, 1, 255, 1 << 20, 1 << 31, (1 << 63) - 1, (1 << 64) - 1]
    for _ in range(TURNS):
        stream = bytearray(greeting + ready)
        for _ in range(numbers.randrange(4)):
            body = numbers.randbytes(numbers.choice([0, 1, 100]))
            stream += struct.pack(">BQ", numbers.choice([0, 1, 2, 3, 4, 255]), numbers.choice(sizes)) + body
        for _ in range(numbers.choice([0, 0, 1, 3])):
            stream[numbers.randrange(len(stream))] = numbers.randrange(256)
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 5) as raw:
            raw.sendall(stream[: numbers.choice([len(stream), numbers.randrange(len(stream))])])
            raw.settimeout(0.005)
            raw.recv(1000)


class Worker:
    """Somebody else, who puts and takes rows of a column of its own, and checks them."""

    def __init__(self, queue: TransferQueue) -> None:
        self.parts, self.stopping, self.failure = 0, False, None
        self._queue = queue
        queue.declare("attacked", needs=["attack"], max_attempts=1000)
        queue.declare("honest-work", needs=["honest-value"])
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            while not self.stopping:
                values = np.arange(10.0) + self.parts
                self._queue.put({"honest-value": values}, timeout_s=100)
                with self._queue.get("honest-work", 10, timeout_s=100) as batch:
                    assert batch.array("honest-value").tolist() == values.tolist()
                    batch.ack()
                self.parts += 1
        except BaseException as error:
            self.failure = error

    def stop(self) -> None:
        self.stopping = True
        self._thread.join(200)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("attack", [attack_with_messages, attack_with_bytes])
def test_a_server_under_attack_goes_on_and_so_do_others(
    attack: Callable[[Served, random.Random], None], caplog: pytest.LogCaptureFixture
) -> None:
    seed = random.SystemRandom().randrange(1 << 32) if TURNS > 1000 else 7
    # given somebody who works
    with running("tcp", insecure=True) as run:
        worker = Worker(run.queue("worker"))
        until(lambda: worker.parts > 3, "the first parts")
        began, memory = worker.parts, _resident()
        # when others send what they like
        with caplog.at_level(logging.WARNING):
            attack(run, random.Random(seed))
        # then the work went on, nothing went wrong inside the server, and all adds up
        until(lambda: worker.failure is not None or worker.parts > began + 3, "the work to go on")
        worker.stop()
        failed = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert not failed, f"seed {seed}: {failed[0].getMessage()}\n{failed[0].exc_text}"
        assert run.queue("auditor").audit().balanced, seed
        assert _resident() < memory + (512 << 20), seed


def _resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
