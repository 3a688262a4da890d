"""Main functions of the child processes of an SGLang in this process. They end with their parent.

SGLang itself asks the kernel for this only after its imports, which take seconds, and does not
check whether the parent still lives: a child of a worker killed meanwhile would run for ever.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from typing import Any

_PDEATHSIG = 1  # prctl(2)


def scheduler(*arguments: Any, **named: Any) -> None:
    """Run a scheduler."""
    _end_with_parent()
    from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(*arguments, **named)


def detokenizer(*arguments: Any, **named: Any) -> None:
    """Run the detokenizer."""
    _end_with_parent()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*arguments, **named)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        os._exit(1)
