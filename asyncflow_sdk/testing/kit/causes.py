"""Causes: group the failures of an engine by probable cause, the one with the most consequences
first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .check import Check, CheckResult


@dataclass
class ProbableCause:
    """Failures with one cause, and their consequences.

    ``title``: the cause in a line. ``evidence``: the failure with the best evidence. ``same``:
    further failures with this title or detail. ``consequences``: other failures of checks dependent
    on these.
    """

    title: str
    evidence: CheckResult
    same: list[CheckResult] = field(default_factory=list)
    consequences: list[CheckResult] = field(default_factory=list)


def title_of(result: CheckResult) -> str:
    """Return the cause of a failure in a line: the diagnosis, or the check's name and the last line
    of its detail."""
    return (
        result.cause or f"{result.check.name}: {result.detail.splitlines()[-1] if result.detail else result.outcome}"
    )


def probable_causes(results: Sequence[CheckResult], checks: Sequence[Check]) -> list[ProbableCause]:
    """Explain all failures. ``checks``: all checks of the kind, run or not.

    A failure of a check is a consequence if a check presupposed by it, also indirectly, failed. All
    other failures have causes of their own.
    """
    table = {check.name: check for check in checks}
    failed = {result.check.name: result for result in results if result.bad}
    broken = {name for name, result in failed.items() if result.outcome == "failed"}
    causes: dict[str, ProbableCause] = {}
    owner: dict[str, ProbableCause] = {}
    dependent: list[CheckResult] = []
    for name, result in failed.items():
        if broken.intersection(prerequisites(name, table)):
            dependent.append(result)
            continue
        owner[name] = _add(causes, result)
    for result in dependent:
        if title_of(result) in causes:
            _add(causes, result)
            continue
        root = owner[next(each for each in prerequisites(result.check.name, table) if each in owner)]
        (root.same if result.detail == root.evidence.detail else root.consequences).append(result)
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


def _add(causes: dict[str, ProbableCause], result: CheckResult) -> ProbableCause:
    """File a failure under its title. The check named in the title is the best evidence: `logprobs`
    of "logprobs: ..."."""
    title = title_of(result)
    cause = causes.get(title)
    if cause is None:
        causes[title] = cause = ProbableCause(title, result)
    elif title.startswith(f"{result.check.name}: "):
        cause.same.append(cause.evidence)
        cause.evidence = result
    else:
        cause.same.append(result)
    return cause
