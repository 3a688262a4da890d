"""Check: one question that an engine must answer as its interface promises, and what comes of asking it."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

Tier = Literal["basic", "full", "chaos"]
TIERS: tuple[Tier, ...] = get_args(Tier)
Outcome = Literal["passed", "failed", "does not apply", "not asked", "failed as expected", "passed unexpectedly"]
"""The last one is a failure too: an expectation that is not true any more is to be taken out."""

Body = Callable[[Any], "Awaitable[str | None] | str | None"]
F = TypeVar("F", bound=Callable[..., Any])


class CheckFailed(AssertionError):
    """Raised by a check: what the engine did, and what it should have done."""


class DoesNotApply(Exception):
    """Raised by a check that has nothing to ask of this engine; the reason."""


class NotAsked(Exception):
    """Raised by a check that has something to ask and cannot, since what it asks with is not there; the reason."""


def expect(condition: object, message: str) -> None:
    """Raise CheckFailed with ``message`` unless ``condition`` holds. Not an assertion: -O leaves it in."""
    if not condition:
        raise CheckFailed(message)


@dataclass(frozen=True)
class Check:
    """``asks``: its question, in a line. ``means``: what a run suffers when it fails. ``look``: where the fault usually is.

    ``tier``: "basic": what every run needs; "full": what comes up in long ones; "chaos": what comes
    up in orders that nobody thought of, or with processes that are killed.
    ``body``: takes the lab of its kind, which holds the engine; a coroutine function where the engine has an event loop. What it
    returns, if anything, is what it has to say of its having passed: how much was tried.
    ``alone``: it makes an engine anew, and what a process can have only one of has another chance in a process of its own.
    """

    kind: str
    name: str
    tier: Tier
    asks: str
    means: str
    look: str
    body: Body
    alone: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Result:
    """What came of one check. ``detail``: of a failure what was seen, of an expected one the reason given, of one that does not
    apply or was not asked why; of one that passed how much was tried, where that can differ. ``seconds``: how long it took, for
    people; it is part of no verdict."""

    check: Check
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0

    @property
    def bad(self) -> bool:
        return self.outcome in ("failed", "passed unexpectedly")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        check = self.check
        said = {"check": check.name, "tier": check.tier, "outcome": self.outcome, "seconds": round(self.seconds, 3)}
        if self.detail:
            said["detail"] = self.detail
        return said | ({"means": check.means, "look": check.look} if self.outcome == "failed" else {})


_CHECKS: dict[str, dict[str, Check]] = {}


def check(kind: str, tier: Tier, *, means: str, look: str, alone: bool = False) -> Callable[[F], F]:
    """Make a function a check of engines of ``kind``. Its name is the check's, the first line of its docstring its question."""

    def register(body: F) -> F:
        name = body.__name__
        asks = (body.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
        known = _CHECKS.setdefault(kind, {})
        assert name not in known, f"two checks of {kind} engines are named {name}"
        known[name] = Check(kind, name, tier, " ".join(asks.split()), means, look, body, alone)
        return body

    return register


def known_checks(kind: str, tiers: Sequence[str] = TIERS) -> tuple[Check, ...]:
    """The checks of a kind that are registered, in the order of their tiers."""
    found = _CHECKS.get(kind, {}).values()
    return tuple(each for tier in TIERS if tier in tiers for each in found if each.tier == tier)


def needs(able: Callable[[Any], bool], otherwise: str) -> Callable[[F], F]:
    """Ask a check only of engines whose lab ``able`` is true of; ``otherwise``: why it is not asked."""

    def wrap(body: F) -> F:
        @functools.wraps(body)
        def asked(lab: Any) -> Any:
            if not able(lab):
                raise DoesNotApply(otherwise)
            return body(lab)

        return asked  # type: ignore[return-value]

    return wrap
