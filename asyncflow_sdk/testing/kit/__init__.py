"""The conformance kit: what engines and other plugins must keep to, asked check by check."""

from .check import TIERS, Check, CheckFailed, Result
from .conformance import Conformance, Report, checks_of
from .policy import EchoPolicy, Policy

__all__ = ["TIERS", "Check", "CheckFailed", "Conformance", "EchoPolicy", "Policy", "Report", "Result", "checks_of"]
