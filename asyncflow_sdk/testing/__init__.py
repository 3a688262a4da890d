"""For authors of plugins and for tests: engines that cost nothing, and what samplers and transports must keep to."""

from .echo import EchoRollout, EchoTrain
from .samplers import check_sampler
from .transports import check_transport

__all__ = ["EchoRollout", "EchoTrain", "check_sampler", "check_transport"]
