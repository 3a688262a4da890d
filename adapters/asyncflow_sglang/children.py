"""What the processes of an SGLang in this process begin with: they end with the process that has started them.

SGLang asks the kernel for that only when a process has imported all of it, which takes seconds, and does not look whether its
starter is still there by then: of a worker that was killed meanwhile, a process stayed for ever.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from typing import Any

_PDEATHSIG = 1  # prctl(2)


def scheduler(*arguments: Any, **named: Any) -> None:
    _end_with_starter()
    from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(*arguments, **named)


def detokenizer(*arguments: Any, **named: Any) -> None:
    _end_with_starter()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*arguments, **named)


def _end_with_starter() -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    starter = multiprocessing.parent_process()
    if starter is not None and starter.pid != os.getppid():
        os._exit(1)
