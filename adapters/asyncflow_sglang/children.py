"""Main functions of the child processes of an SGLang in this process. They end with their parent.

SGLang itself asks the kernel for this only after its imports, which take seconds, and does not
check whether the parent still lives: a child of a worker killed meanwhile would run for ever.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
from typing import Any

_PDEATHSIG = 1  # prctl(2)


def scheduler(*arguments: Any, **named: Any) -> None:
    """Run a scheduler."""
    _run("scheduler", "run_scheduler_process", *arguments, **named)


def detokenizer(*arguments: Any, **named: Any) -> None:
    """Run the detokenizer."""
    _run("detokenizer_manager", "run_detokenizer_process", *arguments, **named)


def _run(module: str, function: str, *arguments: Any, **named: Any) -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        os._exit(1)
    getattr(importlib.import_module(f"sglang.srt.managers.{module}"), function)(*arguments, **named)
