"""The ``asyncflow`` command. What draws here only listens to events."""

from .starting import main

__all__ = ["main"]
