"""For authors of plugins and for tests: engines that cost nothing."""

from .echo import EchoRollout, EchoTrain

__all__ = ["EchoRollout", "EchoTrain"]
