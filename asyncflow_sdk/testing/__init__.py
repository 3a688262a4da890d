"""Test engines, an in-process transport, and conformance checks for authors of plugins."""

from .echo import EchoRollout, EchoTrain
from .kit import TIERS, Check, CheckFailed, CheckResult, Conformance, EchoPolicy, Policy, Report, checks_of
from .kit.sampler_checks import check_sampler
from .kit.staleness_checks import check_staleness_policy
from .kit.transport_checks import check_transport
from .latency import Decoding, RolloutLatency
from .memory import MemoryTransport
from .timed import TimedRollout, TimedTrain

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
