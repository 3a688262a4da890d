"""Remote agent: ``python -m asyncflow_sdk.workflow remote``, the far end of a ``CommandLauncher``.

It starts one worker on its host as the launcher "process" does, and kills it with its children if
its own standard input ends or is silent, so a worker outlives neither its driver nor the connection.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from dataclasses import replace

import msgspec

from ...errors import ConfigError, ServerLost
from ...interfaces import FATAL_STATUS, WorkerHandle, WorkerSpec
from ...wire import probe
from .command_launcher import SILENCE_S, STOP, AgentMessage, has_input
from .process_launcher import ProcessLauncher, start_process

PIECE = 128
"""Characters of a text in one line. srun mixes lines of several ranks if they have over 1024 bytes."""


def main() -> int:
    """Run the worker given by standard input, or the one of this rank. Returns the exit status of the
    agent."""
    rank, received = int(os.environ[sys.argv[2]]) if len(sys.argv) > 2 else 0, b""
    while received.count(b"\n") <= rank:
        more = os.read(0, 1 << 16)
        if not more:  # the driver died before it sent the spec
            return 0
        received += more
    *lines, received = received.split(b"\n", rank + 1)
    spec = WorkerSpec.decoded(lines[rank])
    spec = replace(spec, placement=replace(spec.placement, hosts=(), launcher="process", launcher_options={}))
    host = socket.gethostname()
    try:
        ProcessLauncher().check(spec.placement)
        probe(spec.address)
        handle = start_process(spec, None)
    except ConfigError as error:
        _say_end(rank, FATAL_STATUS, f"host {host!r}: {error}")
        return 0
    except ServerLost as error:
        text = f"from host {host!r} the run cannot be reached: {error}; is its port open, and its address right (advertise=)?"
        _say_end(rank, 1, text)
        return 0
    _say(AgentMessage(rank, handle.pid, host))
    threading.Thread(target=_follow, args=(handle, received), daemon=True).start()
    ending = handle.wait()
    _say_end(rank, ending.status, ending.text)
    return 0


def _follow(handle: WorkerHandle, received: bytes) -> None:
    """Stop the worker as standard input says; kill it at the input's end, or if it is silent."""
    heard = time.monotonic()
    while time.monotonic() - heard < SILENCE_S:
        if STOP in received:
            handle.stop()
        if not has_input(0):
            os.write(1, b"\n")
            continue
        more, heard = os.read(0, 1 << 12), time.monotonic()
        if not more:
            break
        received = received[-len(STOP) :] + more
    handle.kill()


def _say_end(rank: int, status: int, text: str) -> None:
    for start in range(0, len(text), PIECE):
        _say(AgentMessage(rank, text=text[start : start + PIECE]))
    _say(AgentMessage(rank, status=status))


def _say(message: AgentMessage) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()
