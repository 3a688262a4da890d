"""A rollout engine under random sequences of steps, chosen and shrunk by Hypothesis (optional)."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

from ..check import CheckFailed, NotAsked, checks, expect
from ..parse_guard import whole_parses
from .lab import RolloutLab
from .world import RolloutWorld

with contextlib.suppress(ImportError):
    import hypothesis.stateful  # noqa: F401  # now: it is no part of the time that a check has

EXAMPLES, STEPS, SHARE, WHOLE = 80, 24, 0.25, 0.9
"""The most sequences, their steps, and their share of the limit; with fewer than ``LEAST``
steps, up to the share WHOLE."""
LEAST = 60
"""Steps needed for a result."""
CHEAP_S = 0.5
"""Seconds; an engine made faster is new in each sequence."""
Found = list[tuple[list[str], BaseException]]


def any_order(lab: RolloutLab) -> str:
    """In any order of generations, updates, torn loads, interruptions, cancellations and restarts,
    every answer is the policy's for its permitted versions."""
    try:
        import hypothesis
        from hypothesis.configuration import set_hypothesis_home_dir
        from hypothesis.stateful import run_state_machine_as_test
    except ImportError:
        raise NotAsked("it needs Hypothesis: pip install 'asyncflow-sdk[kit]'") from None
    found: Found = []
    if lab.had().version:
        lab.call(lab.update(0), "loading version 0 again")
    clock = _Clock(lab.limit_s, lab.making_s)
    settings = hypothesis.settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        derandomize=False,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    machine = hypothesis.seed(lab.seed or 0)(_machine(lab, found, clock))
    with tempfile.TemporaryDirectory(prefix="asyncflow-check-") as home:
        set_hypothesis_home_dir(home)  # else it leaves a folder wherever the command is called
        try:
            with whole_parses():
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
        cause, hint = (error.cause, error.hint) if isinstance(error, CheckFailed) else ("", "")
        raise CheckFailed(f"in any order of steps, this one fails:\n{listed}\n{said}", cause, hint) from None
    expect(
        clock.steps >= LEAST,
        f"only {clock.steps} steps could be taken in {WHOLE * lab.limit_s:.0f} s, none of them wrong, and fewer"
        f" than {LEAST} prove nothing: give the check more time (--limit, limit_s=), or the engine a smaller model",
    )
    return f"{clock.steps} steps in {clock.sequences} sequences"


class _Clock:
    """The remaining time and steps, for an engine with ``making_s`` seconds to make."""

    def __init__(self, limit_s: float, making_s: float) -> None:
        self.steps = self.sequences = 0
        self.costly = making_s > CHEAP_S
        self._allowed_s, self._making_s, self._least = SHARE * limit_s, making_s, LEAST
        now = time.monotonic()
        self._until_s, self._last_s = now + self._allowed_s, now + WHOLE * limit_s

    def shorten(self) -> None:
        """Allow time for shorter sequences with new engines, if enough for some."""
        enough = 4 * self._making_s < self._allowed_s
        self._until_s = self._last_s = time.monotonic() + (self._allowed_s if enough else 0.0)

    @property
    def over(self) -> bool:
        """True if no further step may be taken."""
        now = time.monotonic()
        return now > self._last_s or (now > self._until_s and self.steps >= LEAST)


def _machine(lab: RolloutLab, found: Found, clock: _Clock) -> Any:
    """Return the class of a state machine for the lab's engine; after the end of the time its steps do nothing."""
    from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
    from hypothesis.strategies import booleans, integers, lists, sampled_from

    numbers, tokens = integers(0, 3), sampled_from([24, 8, 1])
    seldom = sampled_from([False, False, False, True])

    def _step(name: str, when: Callable[[RolloutWorld], Any], **drawn: Any) -> Any:

        def _take(self: Any, **values: Any) -> None:
            self.take(lambda world: getattr(world, name)(**values))

        _take.__name__ = name
        guarded: Any = precondition(lambda self: self.world is not None and when(self.world))
        ruled: Any = rule(**drawn)
        return guarded(ruled(_take))

    def _is_running(world: RolloutWorld) -> bool:
        return bool(world.running)

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.world: RolloutWorld | None = None
            self.take(RolloutWorld.try_out)

        def take(self, step: Callable[[RolloutWorld], Any], *, always: bool = False) -> None:
            """Take a step of the world; after a failure keep its steps and drop the engine."""
            if clock.over and not always:
                return
            try:
                if self.world is None:
                    clock.sequences += 1
                    self.world = RolloutWorld(lab, anew=not clock.costly)
                step(self.world)
                clock.steps += 1
            except Exception as error:
                if not found:
                    clock.shorten()
                found.append((list(self.world.steps) if self.world else ["make the engine"], error))
                if self.world is not None:
                    self.world.release()
                self.world = None
                lab.renew()
                raise

        begin = _step(
            "begin", RolloutWorld.has_room, prompt=numbers, rows=integers(1, 2), tokens=tokens, greedy=booleans()
        )
        advance = _step("advance", _is_running, share=sampled_from([0.0, 0.1, 0.4, 1.0]))
        finish = _step("finish", _is_running, which=numbers)
        cancel = _step("cancel", _is_running, which=numbers)
        load = _step("load_next", lambda world: True, older=seldom)
        load_torn = _step("load_torn", lambda world: not world.unsure, share=sampled_from([0.5, 0.0, 0.99]))
        interrupt = _step("interrupt", lambda world: world.running and "partial" in lab.engine.capabilities.swap)
        score = _step("score", lambda world: lab.engine.capabilities.logprobs)
        refuse = _step("refuse", lambda world: world.running and world.rows < lab.rows)
        remake = _step("remake", lambda world: world.running and not clock.costly)

        @precondition(lambda self: self.world is not None and self.world.has_room())
        @rule(prompts=lists(numbers, min_size=2, max_size=3))
        def begin_some(self, prompts: list[int]) -> None:
            """Begin several, so that steps of other kinds meet running requests."""
            for prompt in prompts:
                if self.world is not None and self.world.has_room():
                    self.take(lambda world, prompt=prompt: world.begin(prompt, 1, 24, True))  # type: ignore[misc]

        @precondition(lambda self: self.world is None)
        @rule()
        def over(self) -> None:
            """Do nothing: a machine without a possible step is an error."""

        def teardown(self) -> None:
            """Finish all."""
            if self.world is not None:
                self.take(lambda world: world.end(back=clock.costly), always=True)

    return Machine


CHECKS = checks("rollout", {
    any_order: ("chaos", ("stale_cache", "torn_update", "abort", "bad_requests", "update_in_flight", "during_load", "interrupted", "scores", "holds"),
        "correct steps fail in combination, some hours into a run, and cannot be reproduced",
        "the last step of the list, and the state left by those before: caches, flags, capacity, unfinished rows"),
})  # fmt: skip
