"""The kit catches wrong engines: each by the check that is for it, in words that name what is wrong."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import wrong_engines as wrong
import wrong_leaks as leaks
import wrong_updates as updates
from own_engine import NumpyPolicy, NumpyRollout

from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.testing.kit import resources

CAUGHT = [
    (wrong.PromisesScores, "capabilities", r"promise logprobs\(\), which it does not define"),
    (wrong.FliesUnversioned, "capabilities", r'"in_flight" needs token_versions'),
    (wrong.YieldsTwice, "completions", r"response \d came twice|response 0 of 1 came twice"),
    (wrong.NeverYieldsTheLast, "completions", r"of n=4 responses, \[3\] never came"),
    (wrong.FewerLogprobs, "completions", r"8 tokens have log-probs of shape \[7\]"),
    (wrong.PacksFewerReasons, "completions", r"not one index, one row of tokens, one of log-probs and one reason each"),
    (wrong.PacksFewerLogprobs, "completions", r"8 tokens have log-probs of shape \[7\]"),
    (wrong.PacksLogprobsOfOthers, "logprobs", r"log-probs are (up to|on average) .* from those of version"),
    (wrong.Probabilities, "completions", r"natural logs of probabilities"),
    (wrong.DropsTheFirstToken, "greedy", r"those after the prompt without its first token"),
    (wrong.PutsBeginTwice, "greedy", r"those after the prompt with token 1 put before it"),
    (wrong.Padded, "company", r"in company are .*; asked for one by one, all are answered right"),
    (wrong.OtherTemperature, "logprobs", r"at temperature 0\.7 .* they are those at temperature 1"),
    (wrong.CutLogprobs, "logprobs", r"cut from the probabilities too"),
    (wrong.BaseTwo, "logprobs", r"they are to base 2, not natural"),
    (wrong.ShiftedLogprobs, "logprobs", r"each is that of the token beside it"),
    (wrong.TopK, "draws", r"none was beyond the 20 likeliest, .* the draw is cut \(top_k"),
    (wrong.Flatter, "draws", r"drawn from a wider distribution"),
    (wrong.OneSeedForAGroup, "draws", r"100% of neighbours of one group .* the same random numbers"),
    (wrong.OneSeedForAll, "draws", r"100% of responses of one place in groups of different seeds"),
    (wrong.AlwaysStops, "stops", r"says it ended for 'stop', not length"),
    (wrong.DropsTheStopToken, "stops", r"ends at stop token \d+ leaves it out"),
    (wrong.IgnoresStops, "stops", r"goes on after stop token \d+"),
    (wrong.AnswersNothing, "bad_requests", r"an empty prompt was answered|an empty prompt raised"),
    (wrong.RaisesKeyError, "bad_requests", r"an empty prompt: generate\(\) raised KeyError .*, not EngineError"),
    (wrong.AssertsPrompts, "bad_requests", r"raised AssertionError .*write `raise EngineError\(str\(error\)\) from error`"),
    (wrong.CutsLongPrompts, "bad_requests", r"longer than the context of 256 was answered"),
    (wrong.Blocks, "does_not_block", r"came round \d+ times: generate\(\) blocks it"),
    (updates.IgnoresUpdates, "update", r"those are of version 0; whichever tensor comes changed, its answers stay"),
    (updates.TakesAllButOne, "update", r"change no answer when they come changed: mix\.bias$"),
    (leaks.LeavesAThread, "closes", r"threads \['never-joined'\] are still alive after close\(\)"),
    (leaks.LeavesAProcess, "closes", r"processes are still alive after close\(\): \d+ \(sleep 30\)"),
    (leaks.LeavesAServer, "closes", r"processes are still alive after close\(\): \d+ \(sleep 31\)"),
    (leaks.LeavesASegment, "closes", r"segments of shared memory are still there after close\(\): /dev/shm/wrong-engine-"),
    (leaks.LeavesDescriptors, "closes", r"closed left 1 descriptors open; open are .*/dev/zero"),
    (leaks.LeavesADaemonThread, "closes", r"each engine that was made and closed left 1 threads running"),
    (updates.KeepsTheCache, "stale_cache", r"of a prompt seen before the update"),
    (updates.SwallowsTheUnknown, "unknown_tensor", r"it took 'model\.layers\.0\.not_there\.weight', which no model has"),
    (updates.NeverMissesAny, "missing_tensor", r"took a version without 'embed\.weight', .* other 3 names, as if it were whole"),
    (updates.Reshapes, "misshapen_tensor", r"was taken as \[48, 64\], and the model has \[64, 48\]"),
    (updates.WritesAsItReads, "torn_update", r"broke off before tensor \d of 4: it answers from a mixture"),
    (updates.HidesThatItBroke, "torn_update", r"returned, as if all was well, when tensor \d of 4 could not be read"),
    (updates.KeepsViews, "keeps_no_view", r"after the update's memory was written over"),
    (updates.StopsFollowing, "updates_in_a_row", r"after version 3 are .* those are of version 2"),
    (updates.NeverGoesBack, "updates_in_a_row", r"EngineError: an older version"),
    (leaks.Leaks, "memory", r"did not come back: (0\.9|1\.\d) times the model each"),
    (leaks.LeaksSegments, "memory", r"took \d+ MB of shared memory that did not come back"),
    (leaks.LeaksSharedMaps, "memory", r"took \d+ MB of shared memory that did not come back"),
    (leaks.LeaksDescriptors, "memory", r"updates of a model of \d+ KB left \d+ descriptors open"),
    (leaks.LeaksThreads, "memory", r"updates of a model of \d+ KB left \d+ threads running"),
    (leaks.LeaksInItsWorker, "memory", r"took \d+ MB that did not come back"),
    (wrong.LosesRoom, "abort", r"that of cancelled ones has not come back"),
    (wrong.GoesOn, "abort", r"what is cancelled is still decoded to its end"),
    (wrong.AbortsAll, "abort", r"cancelling a generation ended another one too"),
    (wrong.ForgetsNeighbours, "abort", r"beside others that were cancelled: was it ended with them\?"),
    (updates.NamesTheNext, "versions", r"spans name versions \[2\], and 1 is held"),
    (updates.NamesTheFirst, "versions", r"spans name versions \[0\], and 1 is held"),
    (updates.OneSpan, "update_in_flight", r"are said to be of version \d+, and their log-probs are"),
    (updates.WaitsForTheEnd, "update_in_flight", r"no response got tokens of both versions: the engine waits for"),
    (updates.KeepsStates, "update_in_flight", r"not read anew by it \(old keys and values\)"),
    (updates.AnswersAsItWrites, "during_load", r"began while version \d+ came, tokens .* said to be of version \d+"),
    (updates.WritesInAThread, "during_load", r"began while version \d+ came .*: it comes from a mixture of both"),
    (updates.CachesWhileItLoads, "during_load", r"of prompts that were asked while the version came|began while version"),
    (updates.RefusesDuringLoads, "during_load", r"was refused, and requests may run then: it loads"),
    (updates.ThrowsAway, "interrupted", r"the tokens it had are thrown away"),
    (updates.NeverInterrupts, "interrupted", r"interrupt\(\) does not end what runs"),
    (updates.NumbersNew, "interrupted", r"of a response that goes on"),
    (updates.ScoresACopy, "scores", r"by logprobs\(\) .* they are those of version 0"),
    (updates.HoldsACopy, "holds", r"that the engine holds are other ones: they are those of version 0"),
    (updates.HoldsFused, "holds", r"the engine holds 'mix\.weight' as float32\[48, 64\]"),
    (wrong.RefusesTheWholeContext, "whole_context", r"EngineError: too long"),
]  # fmt: skip

OF_MODELS = {"ends", "retokenised"}
"""Those that need a model folder with a tokenizer; see test_kit_catches_models."""

HANGS = {wrong.LosesRoom, wrong.ForgetsNeighbours}
HANG_S = 10.0
"""How long the kit waits for these two (seconds). They make it wait for as long as it may, so a right engine never needs this."""


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    leaks.LeavesAThread.END.clear()
    yield
    leaks.LeavesAThread.END.set()
    while leaks.LeavesAProcess.STARTED:
        process = leaks.LeavesAProcess.STARTED.pop()
        process.kill()
        process.wait(10)
    while leaks.LeavesAServer.PIDS:
        os.kill(leaks.LeavesAServer.PIDS.pop(), signal.SIGKILL)
    while leaks.LeavesASegment.MADE:
        leaks.LeavesASegment.MADE.pop().unlink()
    while leaks.OPEN:
        os.close(leaks.OPEN.pop())


@pytest.fixture(scope="module")
def policy() -> NumpyPolicy:
    return NumpyPolicy()


@pytest.mark.parametrize(("engine", "check", "reason"), CAUGHT, ids=lambda each: getattr(each, "__name__", "-"))
def test_a_wrong_engine_is_caught(
    engine: type[NumpyRollout], check: str, reason: str, policy: NumpyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine.__module__ == leaks.__name__ and engine.__name__.startswith("Leaves"):
        monkeypatch.setattr(resources, "GONE_S", 0.2)  # what it leaves does not go, however long it is waited for
    limit_s = (
        HANG_S if engine in HANGS else 600.0 if check == "memory" else 60.0
    )  # what leaks shows after many updates
    report = Conformance("rollout", engine, policy=policy, only=[check], limit_s=limit_s).run()

    (result,) = report.results
    assert result.outcome == "failed"
    assert re.search(reason, result.detail), result.detail


def test_every_check_catches_somebody() -> None:
    report = Conformance("rollout", NumpyRollout)  # any_order has a file of its own

    assert {check.name for check in report.checks} == {check for _, check, _ in CAUGHT} | OF_MODELS


def test_an_engine_that_a_process_can_make_once_gives_back_what_it_must(policy: NumpyPolicy) -> None:
    report = Conformance("rollout", leaks.MadeOnce, policy=policy, only=["closes"]).run()

    assert [(result.outcome, result.detail) for result in report.results] == [("passed", "")]


def test_what_another_child_of_the_process_has_is_not_the_engines(policy: NumpyPolicy) -> None:
    path = f"/dev/shm/test-kit-{os.getpid()}"
    code = f"open({path!r}, 'xb').write(bytes(4096)); kept = open({path!r}); print('there', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline()
        report = Conformance("rollout", NumpyRollout, policy=policy, only=["closes"]).run()
    finally:
        child.communicate()
        os.unlink(path)

    assert [(result.outcome, result.detail) for result in report.results] == [("passed", "")]


def test_a_right_engine_passes(policy: NumpyPolicy) -> None:
    report = Conformance("rollout", NumpyRollout, policy=policy).run()

    assert {result.check.name for result in report.results if result.outcome != "passed"} == OF_MODELS
    assert report.ok
    assert report.level == "full"


@pytest.mark.parametrize("max_rows", [1, 2])
def test_a_right_engine_of_few_rows_passes(max_rows: int, policy: NumpyPolicy) -> None:
    """It refuses what is more: the kit never asks for that."""
    options, tiers = {"max_rows": max_rows}, ["basic", "full", "chaos"]
    report = Conformance("rollout", wrong.RefusesMore, options=options, policy=policy, tiers=tiers).run()

    assert [result for result in report.results if result.bad] == []


def test_an_engine_may_refuse_weights_as_it_likes(policy: NumpyPolicy) -> None:
    checks = ["unknown_tensor", "misshapen_tensor", "torn_update"]
    report = Conformance("rollout", wrong.AssertsWeights, policy=policy, only=checks).run()

    assert [result.detail for result in report.results if result.outcome != "passed"] == []
