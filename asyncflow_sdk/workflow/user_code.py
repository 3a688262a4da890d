"""Failures of functions that users wrote: stages, rewards and agents.

raise FunctionFailed(told("score() raised KeyError: 'x'", error)) from None
"""

from __future__ import annotations

from ..errors import ConfigError
from ..queue.error_text import user_trace


class FunctionFailed(ConfigError):
    """Raised when a user's function raised, or returned what it should not. The message has the frames of the function, and is shown
    without those of the SDK."""


def told(what: str, error: BaseException) -> str:
    """``what`` was wrong, and where in the user's code."""
    return f"{what}\n{user_trace(error)}".rstrip()
