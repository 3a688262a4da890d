"""The conformance kit: checks of engines and other plugins, and the explanation of their failures."""

from .check import TIERS, Check, CheckFailed, CheckResult, ProbableCause
from .conformance import Conformance, Report, checks_of
from .policy import EchoPolicy, Policy

__all__ = [
    "TIERS",
    "Check",
    "CheckFailed",
    "CheckResult",
    "Conformance",
    "EchoPolicy",
    "Policy",
    "ProbableCause",
    "Report",
    "checks_of",
]
