"""What processes of the tests of version directories do."""

import ctypes
import os
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from children import hear, say

from asyncflow_sdk.errors import ConfigError, MemoryFull
from asyncflow_sdk.testing.ends import Ends
from asyncflow_sdk.weights.file import FileTransport

_NEW_MOUNTS = 0x00020000


def publish_and_stay(path: str) -> None:
    """Publish version 1, say so, and stay alive; say what a second attempt says."""
    with Ends(lambda: FileTransport(path), FileTransport, run="run") as ends:
        ends.publish(1, {"w": np.zeros(1000, np.uint8)})
        say("there")
        hear()


def publish_and_fork(path: str) -> None:
    """Publish, and leave a child that does nothing; say its process, and stay alive."""
    with Ends(lambda: FileTransport(path), FileTransport, run="run") as ends:
        ends.publish(1, {"w": np.zeros(1000, np.uint8)})
        ready, done = os.pipe()
        child = os.fork()
        if not child:
            os.write(done, b"x")
            while True:
                signal.pause()
        os.read(ready, 1)
        say(child)
        hear()


def publish_in_a_run(directory: str, path: str) -> None:
    """Publish version 1 in a durable run, say so, and stay alive; or say why that cannot be."""
    import asyncflow_sdk as af

    with af.serve(directory, durability="process") as run:
        try:
            publisher = run.weight_publisher("file", path=path)
        except ConfigError as error:
            say(str(error))
            return
        publisher.publish(1, {"w": np.ones(4)}.items()).wait()
        say("there")
        hear()


def attempt(path: str, run: str = "") -> None:
    """Say why nobody else can publish there; "" when one can."""
    try:
        with Ends(lambda: FileTransport(path), FileTransport, run=run):
            say("")
    except ConfigError as error:
        say(str(error))


def fill(path: str, how: str) -> None:
    """Publish versions of 3 MB until there is no room, then free some and publish again; say what happened."""
    if how == "tmpfs" and not mount(path, 8):
        return
    outcome: dict[str, Any] = {}
    with Ends(lambda: FileTransport(Path(path) / "weights"), FileTransport) as ends:
        sent = [ends.publish(1, {"w": np.full(3 << 20, 1, np.uint8)})]
        ends.keep(1)
        receiver = ends.receiver()
        if how == "tmpfs":
            sent.append(ends.publish(2, {"w": np.full(3 << 20, 2, np.uint8)}))
            ends.keep(1, 2)
        manifest, _ = ends.write(3, {"w": np.full(6 << 20, 3, np.uint8)}, chunk=64 << 20)
        if how == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, resource.RLIM_INFINITY))
        try:
            ends.send(manifest)
        except MemoryFull as error:
            outcome["error"] = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        outcome["left"] = sorted(each.name for each in (Path(path) / "weights").iterdir())
        for each in sent:
            each.check(ends.fetch(receiver, each))
        ends.keep(1)
        last = ends.publish(4, {"w": np.full(2 << 20, 4, np.uint8)})
        last.check(ends.fetch(receiver, last))
        outcome["after"] = 4
    say(outcome)


def mount(path: str, megabytes: int) -> bool:
    """A little file system of this process alone. Says why not."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS):
        say(f"cannot unshare: {os.strerror(ctypes.get_errno())}")
        return False
    for arguments in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", path]):
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
        if done.returncode:
            say(f"cannot mount: {done.stderr}")
            return False
    return True
