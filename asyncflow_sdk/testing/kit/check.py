"""Check: one question about an engine's behaviour, with the checks it presupposes; and its result."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

Tier = Literal["basic", "full", "chaos"]
TIERS: tuple[Tier, ...] = get_args(Tier)
Outcome = Literal["passed", "failed", "does not apply", "not asked", "failed as expected", "passed unexpectedly"]
"""The last one counts as a failure: remove the outdated expectation."""

Body = Callable[[Any], "Awaitable[str | None] | str | None"]
F = TypeVar("F", bound=Callable[..., Any])


class CheckFailed(AssertionError):
    """Raised by a check: the observed and the expected behaviour.

    ``cause``: the likely fault, as "part: fault", the same in every check that shows it; "" if
    unknown. ``hint``: where to look for that fault, "" for the hint of the check.
    """

    def __init__(self, message: str, cause: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.cause, self.hint = cause, hint


class DoesNotApply(Exception):
    """Raised by a check without a question for this engine; the text is the reason."""


class NotAsked(Exception):
    """Raised by a check that applies but cannot run because something it needs is missing; the text
    names it."""


def expect(condition: object, message: str, cause: str = "") -> None:
    """Raise CheckFailed unless ``condition`` is true. Unlike an assertion, it also works under
    ``python -O``."""
    if not condition:
        raise CheckFailed(message, cause)


@dataclass(frozen=True)
class Check:
    """One question. ``impact``: the harm to a run if the check fails. ``hint``: where the fault
    usually is.

    ``tier``: "basic": every run needs it; "full": long runs need it; "chaos": rare orders of
    events, killed processes. ``body``: takes the lab of its kind, which holds the engine; a
    coroutine function if the engine has an event loop. It may return a remark for a passed check:
    how much was tried. ``alone``: it makes a new engine, and runs again in a process of its own if
    a second engine in one process may fail. ``after``: names of checks it presupposes. If one of
    those fails, a failure of this check is its consequence.
    """

    kind: str
    name: str
    tier: Tier
    question: str
    impact: str
    hint: str
    body: Body
    alone: bool = False
    after: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. ``seconds``: its duration, for people; no verdict depends on it.

    ``detail``: of a failure the observation, of an expected failure the given reason, of a check
    that does not apply or was not asked the reason, of a passed check a remark or "". ``cause``,
    ``hint``: of a failure, see `CheckFailed`.
    """

    check: Check
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0
    cause: str = ""
    hint: str = ""

    @property
    def bad(self) -> bool:
        """True if the result fails the engine."""
        return self.outcome in ("failed", "passed unexpectedly")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        plain = {
            "check": self.check.name, "tier": self.check.tier, "outcome": self.outcome, "seconds": round(self.seconds, 3),
            "detail": self.detail, "cause": self.cause,
        }  # fmt: skip
        if self.outcome == "failed":
            plain |= {"impact": self.check.impact, "hint": self.hint or self.check.hint}
        return {name: value for name, value in plain.items() if value != ""}


_CHECKS: dict[str, dict[str, Check]] = {}


def check(
    kind: str, tier: Tier, *, impact: str, hint: str, alone: bool = False, after: Sequence[str] = ()
) -> Callable[[F], F]:
    """Register a function as a check: its name is the check's name, the first paragraph of its
    docstring the question."""

    def register(body: F) -> F:
        """Add the check to the table of its kind."""
        name = body.__name__
        question = (body.__doc__ or "").strip().split("\n\n")[0]
        known = _CHECKS.setdefault(kind, {})
        assert name not in known, f"two checks of {kind} engines are named {name}"
        known[name] = Check(kind, name, tier, " ".join(question.split()), impact, hint, body, alone, tuple(after))
        return body

    return register


def known_checks(kind: str, tiers: Sequence[str] = TIERS) -> tuple[Check, ...]:
    """Return the registered checks of a kind, sorted by tier."""
    found = _CHECKS.get(kind, {}).values()
    return tuple(each for tier in TIERS if tier in tiers for each in found if each.tier == tier)


def needs(applies: Callable[[Any], bool], otherwise: str) -> Callable[[F], F]:
    """Run a check only if ``applies(lab)``. ``otherwise``: the reason given if not."""

    def wrap(body: F) -> F:
        """Guard the check's body."""

        @functools.wraps(body)
        def guarded(lab: Any) -> Any:
            """Raise DoesNotApply, or run the body."""
            if not applies(lab):
                raise DoesNotApply(otherwise)
            return body(lab)

        return guarded  # type: ignore[return-value]

    return wrap
