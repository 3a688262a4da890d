"""Errors of users' functions: stages, rewards and agents.

raise FunctionFailed(user_error_text("score() raised KeyError: 'x'", error)) from None
"""

from __future__ import annotations

from ...errors import ConfigError
from ...queue.error_text import user_trace


class FunctionFailed(ConfigError):
    """Internal: raised if a user's function raised or returned a wrong value. Its message holds the
    function's frames, and is shown without the SDK's. Users see a ConfigError."""


def user_error_text(what: str, error: BaseException) -> str:
    """Return ``what`` was wrong, with the frames of the user's code."""
    return f"{what}\n{user_trace(error)}".rstrip()
