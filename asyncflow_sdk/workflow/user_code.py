"""Failures of functions written by users: stages, rewards and agents.

raise FunctionFailed(with_user_trace("score() raised KeyError: 'x'", error)) from None
"""

from __future__ import annotations

from ..errors import ConfigError
from ..queue.error_text import user_trace


class FunctionFailed(ConfigError):
    """Raised when a user's function raised an error or returned an invalid value. The message has
    the function's frames; the SDK's are not shown."""


def with_user_trace(text: str, error: BaseException) -> str:
    """Return ``text`` with the frames of the user's code in ``error``."""
    return f"{text}\n{user_trace(error)}".rstrip()
