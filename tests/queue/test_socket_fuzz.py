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
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from queue_runs import Run, running
from waiting import until

from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.queue import TransferQueue
from asyncflow_sdk.queue.payload import to_image
from asyncflow_sdk.queue.protocol import Call, Hello, encode
from asyncflow_sdk.types.columns import pack
from asyncflow_sdk.wire.envelope import FRAGMENT_BYTES, PROTOCOL, Fragment, ProgressQuery, Pull, Request, RequestPart
from asyncflow_sdk.wire.envelope import encode as envelope

SECONDS = 60.0 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 1.5
"""For each kind of attack."""


def whole(session: str, seq: int) -> list[list[bytes]]:
    """Messages as a client sends them: what the attacks begin with."""
    columns = {"attack": pack("attack", np.arange(6.0)), "text": pack("text", ["a", "", "\u00e4", "b", "c", "d"])}
    specs = {name: column.spec for name, column in columns.items()}
    image = b"".join(part.tobytes() for part in to_image(columns).parts)
    put = cmd.Put(groups=6, group_size=2, columns=specs, key="", timeout_s=0.01)
    done = cmd.Complete(token=1, columns=specs, index=np.arange(6, dtype="<i4").tobytes())
    calls: list[tuple[Call, list[bytes]]] = [
        (Call(Hello("attacker", os.getpid(), "", "0")), []),
        (Call(put, payload=6, inline=True), [image]),
        (Call(put, payload=5, inline=True), [image[::-1]]),
        (Call(done, payload=6, inline=True), [image]),
        (Call(cmd.Lease(task="attacked", count=3, timeout_s=0.01), inline=True), []),
        (Call(cmd.GiveBack(token=3)), []),
        (Call(cmd.GetAudit()), []),
        (Call(cmd.GetStatus()), []),
        (Call(cmd.Renew(token=2)), []),
        (Call(cmd.Loaded(version=0)), []),
    ]
    messages = [
        [envelope(Request(PROTOCOL, session, seq + n, 1, (), (), encode(call))), *beside]
        for n, (call, beside) in enumerate(calls)
    ]
    body = encode(Call(put, payload=6, inline=True))
    sizes = len(body), 3 * FRAGMENT_BYTES
    parts: list[tuple[RequestPart, list[bytes]]] = [
        (Fragment(0, 0, sizes), [body]),
        (Fragment(0, 0, (len(body), len(image))), [body]),
        (Fragment(0, 0, (2 * FRAGMENT_BYTES, 1)), [bytes(FRAGMENT_BYTES)]),
        (Fragment(0, len(body), sizes), [bytes(FRAGMENT_BYTES)]),
        (Fragment(5, len(body), sizes), [bytes(FRAGMENT_BYTES)]),
        (Fragment(0, len(body), (len(body), len(image))), [image]),
        (Pull((0, FRAGMENT_BYTES, -1, 1 << 62)), []),
        (ProgressQuery(0, 1, False), []),
        (ProgressQuery(7, 1 << 62, True), []),
    ]
    number = seq + len(messages)
    for part, beside in parts:  # each is of the request before, or of one that has an answer
        number += isinstance(part, Fragment) and part.start == 0
        messages += (
            [envelope(Request(PROTOCOL, session, which, 1, (), (), b"", part)), *beside]
            for which in (number, seq + 5)
        )
    return messages


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
        frames[which:which] = [frame] * min(numbers.choice([1, 50, 5000]), (16 << 20) // (len(frame) + 1))
    elif how == "noise":
        frames[which] = numbers.randbytes(numbers.choice([0, 1, 30, 3000]))
    elif how == "splice" and frame:
        at = numbers.randrange(len(frame))
        piece = numbers.choice(
            [b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 2000, b"\xcf" + b"\xff" * 8]
        )
        frames[which] = frame[:at] + piece + frame[at + numbers.randrange(3) :]
    return frames or [b""]


def attack_with_messages(run: Served, numbers: random.Random) -> Iterator[None]:
    """Bent messages of sessions that are known, and of others."""
    attacker = run.queue("attacker")  # says hello, so that what is bent reaches further than the envelope
    known = attacker._port.connection.wire.session
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger = 0
    dealer.sndhwm = 1000
    dealer.connect(run.address)
    seq = 1000
    with dealer:
        while True:
            session = numbers.choice([known, known, known, numbers.randbytes(12).hex(), "", "x" * 65])
            messages = whole(session, seq)
            seq += len(messages)
            for message in messages:
                dealer.send_multipart(bent(numbers, message))
                while dealer.poll(0):
                    dealer.recv_multipart()
            yield


def attack_with_bytes(run: Served, numbers: random.Random) -> Iterator[None]:
    """Bytes below ZeroMQ's own framing: handshakes cut short and bent, frames of sizes that nobody sends."""
    host, port = run.address.removeprefix("tcp://").rsplit(":", 1)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    sizes = [0, 1, 255, 1 << 20, 1 << 31, (1 << 63) - 1, (1 << 64) - 1]
    while True:
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
        yield


class Worker:
    """Somebody else, who puts and takes rows of a column of its own, and sees to it that they are right."""

    def __init__(self, queue: TransferQueue) -> None:
        self.parts, self.stopping, self.failure = 0, False, None
        self._queue = queue
        queue.declare("attacked", needs=["attack"])
        queue.declare("honest-work", needs=["honest-value"])
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            while not self.stopping:
                values = np.arange(10.0) + self.parts
                self._queue.put({"honest-value": values}, timeout_s=30)
                with self._queue.get("honest-work", 10, timeout_s=30) as batch:
                    assert batch.array("honest-value").tolist() == values.tolist()
                    batch.ack()
                self.parts += 1
        except BaseException as error:
            self.failure = error

    def stop(self) -> None:
        self.stopping = True
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure


@pytest.mark.timeout(600)
@pytest.mark.parametrize("attack", [attack_with_messages, attack_with_bytes])
def test_a_server_under_attack_goes_on_and_so_do_others(
    attack: Callable[[Run, random.Random], Iterator[None]], caplog: pytest.LogCaptureFixture
) -> None:
    seed = random.SystemRandom().randrange(1 << 32) if SECONDS > 10 else 7
    # given somebody who works
    with running("tcp", insecure=True) as run:
        worker = Worker(run.queue("worker"))
        until(lambda: worker.parts > 3, "the first parts")
        began, memory = worker.parts, _resident()
        # when others send what they like
        with caplog.at_level(logging.WARNING):
            end = time.monotonic() + SECONDS
            for _ in attack(run, random.Random(seed)):
                if time.monotonic() > end or worker.failure is not None:
                    break
        # then the work went on, nothing went wrong inside the server, and all adds up
        until(lambda: worker.failure is not None or worker.parts > began + 3, "the work to go on")
        worker.stop()
        failed = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert not failed, f"seed {seed}: {failed[0].getMessage()}\n{failed[0].exc_text}"
        audit = run.queue("auditor").audit()
        assert audit.balanced, seed
        assert run.server._wire._thread.is_alive()
        assert _resident() < memory + (512 << 20), seed
        if attack is attack_with_messages:
            assert run.server._wire.garbage > 0


def _resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
