"""python -m asyncflow_sglang.launch: an SGLang server that ends with its parent.

The first line of standard input has the arguments of ``sglang.launch_server`` as JSON, which keeps keys off the
command line. The end of the input, also by the parent's death, ends the server and all processes started by it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import signal
import sys
import threading
from collections.abc import Iterable

_LEFT = re.compile(r"/dev/shm/(?:sglang_loads_|sgl_shm_)\S+")


def main() -> None:
    """Read the arguments and run the server."""
    line = sys.stdin.buffer.readline()
    ends = os.dup(0)  # the server's children must not read from it
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_end, args=(ends,), name="parent", daemon=True).start()
    sys.argv = ["sglang.launch_server", *json.loads(line)]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def in_group(group: int) -> set[int]:
    """Return the pids of a process group."""
    found = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal() and os.getpgid(int(name)) == group:
                found.add(int(name))
    return found


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Return files of shared memory mapped by these processes of SGLang, which leave them when killed."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
            found.update(_LEFT.findall(maps.read()))
    return found


def remove(files: set[str]) -> None:
    """Remove files; missing ones are ignored."""
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file)


def _end(ends: int) -> None:
    while os.read(ends, 1 << 10):
        pass
    remove(shared_memory(in_group(os.getpgid(0))))
    os.killpg(0, signal.SIGKILL)  # also processes just being started


if __name__ == "__main__":
    main()
