"""Check: one question about an engine's behaviour, with the checks it presupposes; its result; and
the probable causes of failures."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    """Raised by a check that applies but lacks a thing it needs; the text names it."""


def expect(condition: object, message: str, cause: str = "") -> None:
    """Raise CheckFailed unless ``condition`` is true. Unlike an assertion, it also works under ``python -O``."""
    if not condition:
        raise CheckFailed(message, cause)


@dataclass(frozen=True)
class Check:
    """One question. ``impact``: the harm to a run if the check fails. ``hint``: where the fault usually is.

    ``tier``: "basic": every run needs it; "full": long runs need it; "chaos": rare orders of events, killed
    processes. ``body``: takes the lab of its kind, which holds the engine; a coroutine function if the engine has an
    event loop. It may return a remark for a passed check: how much was tried. ``alone``: it makes a new engine, and
    runs again in a process of its own if a second engine in one process may fail. ``after``: names of checks it
    presupposes. If one of those fails, a failure of this check is its consequence.
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

    @property
    def title(self) -> str:
        """The cause of a failure in a line: the diagnosis, or the check's name and the last line of its detail."""
        return self.cause or f"{self.check.name}: {self.detail.splitlines()[-1] if self.detail else self.outcome}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        plain = {
            "check": self.check.name,
            "tier": self.check.tier,
            "outcome": self.outcome,
            "seconds": round(self.seconds, 3),
            "detail": self.detail,
            "cause": self.cause,
        }
        if self.outcome == "failed":
            plain |= {"impact": self.check.impact, "hint": self.hint or self.check.hint}
        return {name: value for name, value in plain.items() if value != ""}


def checks(
    kind: str, table: Mapping[Body, tuple[Tier, tuple[str, ...], str, str]], *, alone: Sequence[str] = ()
) -> tuple[Check, ...]:
    """Return the checks of a module by a table of functions: the tier of each, the checks it
    presupposes, its impact, its hint. The first paragraph of a function's docstring is the question."""
    return tuple(
        Check(kind, body.__name__, tier, _first_paragraph(body), impact, hint, body, body.__name__ in alone, after)
        for body, (tier, after, impact, hint) in table.items()
    )


def _first_paragraph(body: Body) -> str:
    return " ".join((body.__doc__ or "").strip().split("\n\n")[0].split())


def needs(applies: Callable[[Any], bool], otherwise: str) -> Callable[[F], F]:
    """Run a check only if ``applies(lab)``. ``otherwise``: the reason given if not."""

    def _wrap(body: F) -> F:
        @functools.wraps(body)
        def _guarded(lab: Any) -> Any:
            if not applies(lab):
                raise DoesNotApply(otherwise)
            return body(lab)

        return _guarded  # type: ignore[return-value]

    return _wrap


@dataclass
class ProbableCause:
    """Failures with one cause, and their consequences.

    ``title``: the cause in a line. ``evidence``: the failure with the best evidence. ``same``: further failures with
    this title or detail. ``consequences``: other failures of checks dependent on these.
    """

    title: str
    evidence: CheckResult
    same: list[CheckResult] = field(default_factory=list)
    consequences: list[CheckResult] = field(default_factory=list)

    def add(self, result: CheckResult) -> None:
        """Add a failure with this title. The check named in the title is the best evidence: `logprobs`
        of "logprobs: ..."."""
        if self.title.startswith(f"{result.check.name}: "):
            self.evidence, result = result, self.evidence
        self.same.append(result)


def probable_causes(results: Sequence[CheckResult], checks: Sequence[Check]) -> list[ProbableCause]:
    """Group failures by cause, the cause of most failures first. ``checks``: all checks of the kind, run or not.

    A failure of a check is a consequence if a check presupposed by it, also indirectly, failed. All
    other failures have causes of their own.
    """
    table = {check.name: check for check in checks}
    failed = [result for result in results if result.bad]
    dependent = [result for result in failed if follows(result.check, results, checks)]
    causes: dict[str, ProbableCause] = {}
    owner: dict[str, ProbableCause] = {}
    for result in (*(each for each in failed if each not in dependent), *dependent):
        if result.title in causes:
            causes[result.title].add(result)
        elif result in dependent:
            root = owner[next(each for each in prerequisites(result.check.name, table) if each in owner)]
            (root.same if result.detail == root.evidence.detail else root.consequences).append(result)
            continue
        else:
            causes[result.title] = ProbableCause(result.title, result)
        if result not in dependent:
            owner[result.check.name] = causes[result.title]
    return sorted(causes.values(), key=lambda cause: -len(cause.same) - len(cause.consequences))


def follows(check: Check, results: Sequence[CheckResult], checks: Sequence[Check]) -> bool:
    """Return True if a check presupposed by ``check`` has failed."""
    table, failed = {each.name: each for each in checks}, {r.check.name for r in results if r.outcome == "failed"}
    return any(name in failed for name in prerequisites(check.name, table))


def prerequisites(name: str, table: Mapping[str, Check]) -> Iterator[str]:
    """Yield all checks presupposed by a check, directly or not, the nearest first."""
    found, rest = {name}, [name]
    for each in rest:  # grows while it is read
        new = [before for before in table[each].after if before not in found]
        found.update(new)
        rest += new
        yield from new
