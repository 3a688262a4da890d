"""Tracebacks of functions that users wrote, without the SDK's frames that called them.

user_trace(error)                # Traceback (most recent call last): ... File "rewards.py", line 7, in score ...
"""

from __future__ import annotations

import traceback
from pathlib import Path

from .arguments import plain_text

_SDK = f"{Path(__file__).parent.parent}/"
FRAMES = 8
"""The innermost frames of a traceback that are shown."""


def user_trace(error: BaseException) -> str:
    """The traceback of an error from the first frame on that is not the SDK's; "" if there is none, as of a function that was
    called with wrong arguments. Text that can be sent, whatever the error says. Thread-safe."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_SDK):
        trace = trace.tb_next
    if trace is None:
        return ""
    try:
        lines = traceback.format_exception(type(error), error, trace, limit=-FRAMES)
    except Exception:  # of an error whose text cannot be made
        lines = traceback.format_tb(trace, limit=-FRAMES)
    return plain_text("".join(lines).rstrip())


def error_text(error: BaseException) -> str:
    """What an exception says, whatever it does when it is asked."""
    try:
        text = str(error)
    except Exception as wrong:
        text = f"its text cannot be made: {type(wrong).__name__}"
    return f"{type(error).__name__}: {text}"
