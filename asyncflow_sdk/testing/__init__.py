"""For authors of plugins and for tests: engines that cost nothing, and what samplers must keep to."""

from .echo import EchoRollout, EchoTrain
from .samplers import check_sampler

__all__ = ["EchoRollout", "EchoTrain", "check_sampler"]
