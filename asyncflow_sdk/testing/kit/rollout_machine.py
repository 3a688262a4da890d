"""A rollout engine in any order of steps, chosen and shortened by Hypothesis, which need not be installed."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

from .check import CheckFailed, NotAsked, check
from .rollout_lab import RolloutLab
from .rollout_world import RolloutWorld

with contextlib.suppress(ImportError):
    # Now and not in the check: deep in calls, under pytest and with torch loaded, CPython 3.11.7 fails to compile its modules
    # ("AST constructor recursion depth mismatch").
    import hypothesis.stateful  # noqa: F401

EXAMPLES, STEPS, SHARE = 40, 24, 0.25
"""So many sequences of so many steps at most, in this share of what a check may take."""
Found = list[tuple[list[str], BaseException]]


@check(
    "rollout", "chaos",
    means="what is right by itself goes wrong together, some hours into a run, and cannot be repeated",
    look="the last step of the list, and what the ones before it leave behind: caches, flags, room, rows half done",
)  # fmt: skip
def any_order(lab: RolloutLab) -> None:
    """In whatever order generations, updates, torn loads, interruptions, cancellations and restarts come, every answer is the policy's for the versions it may be of."""
    try:
        import hypothesis
        from hypothesis.configuration import set_hypothesis_home_dir
        from hypothesis.stateful import run_state_machine_as_test
    except ImportError:
        raise NotAsked("it needs Hypothesis: pip install 'asyncflow-sdk[kit]'") from None
    found: Found = []
    clock = _Clock(SHARE * lab.limit_s)
    machine = _machine(lab, found, clock)
    if lab.seed is not None:
        hypothesis.seed(lab.seed)(machine)
    settings = hypothesis.settings(
        max_examples=EXAMPLES, stateful_step_count=STEPS, derandomize=lab.seed is None, database=None, deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck), print_blob=False, report_multiple_bugs=False,
        verbosity=hypothesis.Verbosity.quiet,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="asyncflow-check-") as home:
        set_hypothesis_home_dir(home)  # else it leaves a folder wherever the command is called
        try:
            run_state_machine_as_test(machine, settings=settings)
        except Exception:
            if not found and not clock.over:  # one that is cut short by the clock looks to it as if it were no test
                raise
        finally:
            set_hypothesis_home_dir(None)
    if found:  # the shortest; also when it did not happen each time, as what hangs on the clock may not
        steps, error = min(reversed(found), key=lambda each: len(each[0]))
        listed = "\n".join(f"  {number}. {step}" for number, step in enumerate(steps, 1))
        said = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        raise CheckFailed(f"in any order of steps, this one fails:\n{listed}\n{said}") from None


class _Clock:
    def __init__(self, allowed_s: float) -> None:
        self._allowed_s = allowed_s
        self.again()

    def again(self) -> None:
        self._until_s = time.monotonic() + self._allowed_s

    @property
    def over(self) -> bool:
        return time.monotonic() > self._until_s


def _machine(lab: RolloutLab, found: Found, clock: _Clock) -> Any:
    """The class of a machine that moves the lab's engine until the time is over, and then does nothing."""
    from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
    from hypothesis.strategies import booleans, integers, sampled_from

    shares, which = sampled_from([0.0, 0.1, 0.4, 1.0]), integers(0, 3)

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.world: RolloutWorld | None = None
            self.take(lambda world: None)

        def take(self, step: Callable[[RolloutWorld], Any]) -> None:
            if clock.over:
                if self.world is not None:
                    self.world.release()
                return
            try:
                if self.world is None:
                    self.world = RolloutWorld(lab)
                step(self.world)
            except Exception as error:
                if not found:
                    clock.again()  # to shorten it
                found.append((list(self.world.steps) if self.world else ["make the engine"], error))
                if self.world is not None:
                    self.world.release()
                self.world = None
                lab.renew()
                raise

        def has(self, what: Callable[[RolloutWorld], Any]) -> bool:
            return self.world is not None and bool(what(self.world))

        @precondition(lambda self: self.has(lambda world: world.rows + 2 <= max(lab.rows, 2)))
        @rule(prompt=which, rows=integers(1, 2), tokens=sampled_from([24, 8, 1]), greedy=booleans())
        def begin(self, prompt: int, rows: int, tokens: int, greedy: bool) -> None:
            self.take(lambda world: world.begin(prompt, min(rows, lab.rows), tokens, greedy))

        @precondition(lambda self: self.has(lambda world: world.running))
        @rule(share=shares)
        def advance(self, share: float) -> None:
            self.take(lambda world: world.advance(share))

        @precondition(lambda self: self.has(lambda world: world.running))
        @rule(number=which)
        def finish(self, number: int) -> None:
            self.take(lambda world: world.finish(number))

        @precondition(lambda self: self.has(lambda world: world.running))
        @rule(number=which)
        def cancel(self, number: int) -> None:
            self.take(lambda world: world.cancel(number))

        @precondition(lambda self: self.has(lambda world: True))
        @rule(older=sampled_from([False, False, False, True]))
        def load(self, older: bool) -> None:
            self.take(lambda world: world.load(max(lab.version + (-1 if older else 1), 0)))

        @precondition(lambda self: self.has(lambda world: not world.unsure))
        @rule(share=sampled_from([0.5, 0.0, 0.99]))
        def load_torn(self, share: float) -> None:
            self.take(lambda world: world.load_torn(share))

        @precondition(
            lambda self: self.has(lambda world: "partial" in lab.engine.capabilities.swap and world.running)
        )
        @rule()
        def interrupt(self) -> None:
            self.take(lambda world: world.interrupt())

        @precondition(lambda self: self.has(lambda world: lab.engine.capabilities.logprobs))
        @rule()
        def score(self) -> None:
            self.take(lambda world: world.score())

        @precondition(lambda self: self.has(lambda world: world.running))
        @rule()
        def refuse(self) -> None:
            self.take(lambda world: world.refuse())

        @precondition(lambda self: self.has(lambda world: world.cheap))
        @rule()
        def remake(self) -> None:
            self.take(lambda world: world.remake())

        @precondition(lambda self: self.world is None)
        @rule()
        def over(self) -> None:
            """The time is up, and a machine without a step that it can take is an error."""

        def teardown(self) -> None:
            if self.world is not None:
                self.take(lambda world: world.end())

    return Machine
