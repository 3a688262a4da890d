"""Exceptions as text that can be sent: messages, and tracebacks without the SDK's own frames.

f"{error_text(error)}\n{user_trace(error)}"      # KeyError: 'x', then: Traceback ... File "rewards.py", line 7, in score ...
"""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType

SDK = f"{Path(__file__).parent.parent}/"
FRAMES = 8
"""The number of innermost frames shown."""


def user_trace(error: BaseException) -> str:
    """Return the traceback of an error from its first frame outside the SDK on, without its message.
    Thread-safe.

    Return "" if there is none, for example for a function called with wrong arguments.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(SDK):
        trace = trace.tb_next
    if trace is None:
        return ""
    return plain_text(trace_text(error, trace, FRAMES))


def trace_text(error: BaseException, trace: TracebackType | None, frames: int) -> str:
    """Return the innermost frames of a traceback, without the error's message: callers begin with it."""
    try:
        lines = traceback.format_exception(type(error), error, trace, limit=-frames)
        message = next(line for line in traceback.format_exception_only(error) if not line.startswith(" "))
    except Exception:  # str(error) fails
        return "".join(traceback.format_tb(trace, limit=-frames)).rstrip()
    return "".join(line for line in lines if line != message).rstrip()


def error_text(error: BaseException) -> str:
    """Return an exception's class name and message, even if its ``str`` raises."""
    try:
        text = str(error)
    except Exception as wrong:
        text = f"its __str__ raised {type(wrong).__name__}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def plain_text(text: str, most: int = 4000) -> str:
    """Return text that can be encoded as UTF-8. Text longer than ``most`` is cut in the middle."""
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return text.encode(errors="backslashreplace").decode()
