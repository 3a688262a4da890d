"""The ``asyncflow`` command, its live view and its report page."""

from .entry import main

__all__ = ["main"]
