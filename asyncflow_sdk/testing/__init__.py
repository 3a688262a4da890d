"""Test engines, an in-process transport, and conformance checks for authors of plugins."""

from .echo import EchoRollout, EchoTrain
from .kit import TIERS, Check, CheckFailed, CheckResult, Conformance, EchoPolicy, Policy, Report, checks_of
from .latency import Decoding, RolloutLatency
from .memory import MemoryTransport
from .samplers import check_sampler
from .staleness import check_staleness_policy
from .timed import TimedRollout, TimedTrain
from .transports import check_transport

__all__ = [
    "TIERS",
    "Check",
    "CheckFailed",
    "CheckResult",
    "Conformance",
    "Decoding",
    "EchoPolicy",
    "EchoRollout",
    "EchoTrain",
    "MemoryTransport",
    "Policy",
    "Report",
    "RolloutLatency",
    "TimedRollout",
    "TimedTrain",
    "check_sampler",
    "check_staleness_policy",
    "check_transport",
    "checks_of",
]
