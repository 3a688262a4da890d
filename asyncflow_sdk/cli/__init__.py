"""The ``asyncflow`` command. What draws here only listens to events."""

from .app import main

__all__ = ["main"]
