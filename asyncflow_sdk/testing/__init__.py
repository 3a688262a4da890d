"""For authors of plugins and for tests: engines that cost nothing, and what samplers, staleness policies and transports must
keep to."""

from .echo import EchoRollout, EchoTrain
from .samplers import check_sampler
from .staleness import check_staleness_policy
from .transports import check_transport

__all__ = ["EchoRollout", "EchoTrain", "check_sampler", "check_staleness_policy", "check_transport"]
