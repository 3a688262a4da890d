"""The kit catches wrong engines: each by the check that is for it, in words that name what is wrong."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import LEFT
from own_engine import NumpyPolicy, NumpyRollout
from wrong_rollouts import MADE, WrongRollout

import asyncflow_sdk as af
from asyncflow_sdk.memory.directory import PREFIX
from asyncflow_sdk.testing import Conformance, Report
from asyncflow_sdk.testing.kit import resources
from asyncflow_sdk.testing.kit.check import CheckFailed
from asyncflow_sdk.testing.kit.resources import Held, check_given_back
from asyncflow_sdk.testing.kit.rollout import swaps

CAUGHT = {
    "promises scores": ("capabilities", r"promise logprobs\(\), which it does not define"),
    "in flight without versions": ("capabilities", r'"in_flight" needs token_versions'),
    "yields twice": ("completions", r"response \d came twice|response 0 of 1 came twice"),
    "never yields the last": ("completions", r"of n=4 responses, \[3\] never came"),
    "fewer log-probs": ("completions", r"8 tokens have log-probs of shape \[7\]"),
    "packs fewer reasons": ("completions", r"not one index, one row of tokens, one of log-probs and one reason each"),
    "packs log-probs of the token beside": ("logprobs", r"each is that of the token beside it"),
    "probabilities": ("completions", r"natural logs of probabilities"),
    "drops the first token": ("greedy", r"those after the prompt without its first token"),
    "puts a special token twice": ("greedy", r"those after the prompt with token 1 put before it"),
    "pads prompts": ("company", r"in company are .*; asked for one by one, all are answered right"),
    "log-probs at temperature 1": ("logprobs", r"at temperature 0\.7 .* they are those at temperature 1"),
    "cuts log-probs": ("logprobs", r"cut from the probabilities too"),
    "log-probs to base 2": ("logprobs", r"they are to base 2, not natural"),
    "log-probs of the token beside": ("logprobs", r"each is that of the token beside it"),
    "draws the likeliest 20": ("draws", r"none was beyond the 20 likeliest, .* the draw is cut \(top_k"),
    "draws at a higher temperature": ("draws", r"drawn from a wider distribution"),
    "penalises tokens of the prompt": ("draws", r"are tokens of the prompt, .* made less likely \(repetition, presence"),
    "ignores top_k": ("restricted", r"drawn with top_k=3 some are not allowed"),
    "one seed for a group": ("draws", r"100% of neighbours of one group .* the same random numbers"),
    "one seed for all": ("draws", r"100% of responses of one place in groups of different seeds"),
    "looks at the first of stop_ids": ("stops", r"goes on after stop token \[\d+\], its token \[4\], to 8 tokens"),
    "looks for stops from the second token on": ("stops", r"goes on after stop token \[\d+\], its token \[0\]"),
    "looks at the length first": ("stops", r"as token 5 of 5, and says 'length', not stop: .* also at max_tokens"),
    "always stops": ("stops", r"says it ended for 'stop', not length"),
    "drops the stop token": ("stops", r"ends at stop token \d+ leaves it out"),
    "ignores stops": ("stops", r"goes on after stop token \[\d+\]"),
    "answers nothing": ("bad_requests", r"an empty prompt was answered|an empty prompt raised"),
    "asserts prompts": ("bad_requests", r"raised AssertionError .*write `raise EngineError\(str\(error\)\) from error`"),
    "cuts long prompts": ("bad_requests", r"longer than the context of 256 was answered"),
    "blocks": ("does_not_block", r"came round \d+ times: generate\(\) blocks it"),
    "ignores updates": ("update", r"those are of version 0; whichever tensor comes changed, its answers stay"),
    "takes all but one": ("update", r"change no answer when they come changed: mix\.bias$"),
    "leaves a thread": ("closes", r"threads are still alive after close\(\).*: 'never-joined' \(runs threading\.Event\.wait; started by faults \(.*faults\.py:\d+\)\)"),
    "leaves a process": ("closes", r"processes are still alive after close\(\): \d+ \(sleep 3000\)"),
    "leaves a server": ("closes", r"processes are still alive after close\(\): \d+ \(.*sleep 3100"),  # or the shell that is to be it
    "leaves a segment": (
        "closes", r"segments of shared memory are still there after close\(\): /dev/shm/.*/wrong-engine-",
    ),
    "leaves descriptors and threads": (
        "closes",
        r"made and closed left 1 descriptors open, 1 threads running; open are .*/dev/zero;"
        r" running are 'Thread-\d+ \(wait\)' \(runs threading\.Event\.wait; started by faults \(",
    ),
    "keeps the cache": ("stale_cache", r"of a prompt seen before the update"),
    "swallows the unknown": ("unknown_tensor", r"it took 'model\.layers\.0\.not_there\.weight', which no model has"),
    "never misses any": (
        "missing_tensor", r"took a version without 'embed\.weight', .* other 3 names, as if it were whole",
    ),
    "reshapes": ("misshapen_tensor", r"was taken as \[48, 64\], and the model has \[64, 48\]"),
    "writes as it reads": ("torn_update", r"broke off before tensor \d of 4: it answers from a mixture"),
    "hides that it broke off": ("torn_update", r"returned, as if all was well, when tensor \d of 4 could not be read"),
    "keeps views": ("keeps_no_view", r"after the update's memory was written over"),
    "stops following": ("updates_in_a_row", r"after version 3 are .* those are of version 2"),
    "never goes back": ("updates_in_a_row", r"EngineError: refused"),
    "leaks": ("memory", r"did not come back: (0\.9|1\.\d) times the model each"),
    "leaks segments": ("memory", r"took \d+ MB of shared memory that did not come back"),
    "leaks shared maps": ("memory", r"took \d+ MB of shared memory that did not come back"),
    "leaks descriptors and threads": (
        "memory", r"of a model of \d+ KB left \d+ descriptors open, and left \d+ threads running",
    ),
    "leaks in its worker": ("memory", r"took \d+ MB that did not come back"),
    "loses room": ("abort", r"that of cancelled ones has not come back"),
    "goes on": ("abort", r"what is cancelled is still decoded to its end"),
    "aborts all": ("abort", r"cancelling a generation ended another one too"),
    "forgets neighbours": ("abort", r"beside others that were cancelled: was it ended with them\?"),
    "names the next": ("versions", r"spans name versions \[2\], and 1 is held"),
    "names the last version": ("update_in_flight", r"are said to be of version \d+, and their log-probs are"),
    "waits for the end": ("update_in_flight", r"no response got tokens of both versions: the engine waits for"),
    "keeps states": ("update_in_flight", r"not read anew by it \(old keys and values\)"),
    "answers as it writes": ("during_load", r"began while version \d+ came, tokens .* said to be of version \d+"),
    "writes in a thread": ("during_load", r"began while version \d+ came .*: it comes from a mixture of both"),
    "caches while it loads": (
        "during_load", r"of prompts that were asked while the version came|began while version",
    ),
    "refuses during loads": ("during_load", r"was refused, and requests may run then: refused"),
    "throws away what it had": ("interrupted", r"the tokens it had are thrown away"),
    "never interrupts": ("interrupted", r"interrupt\(\) does not end what runs"),
    "goes on without what it had drawn": ("interrupted", r"of a response that goes on"),
    "ignores first": ("continued", r"100% of .* with first=0 and first=1 \(`first` is ignored\)"),
    "ignores drawn": ("continued", r"100% of .* with drawn=0 and drawn=1 \(`drawn` is ignored\)"),
    "adds drawn to first": ("continued", r"100% of .* with first=1 and drawn=1 \(they are confused\)"),
    "scores a copy": ("scores", r"by logprobs\(\) .* they are those of version 0"),
    "holds a copy": ("holds", r"that the engine holds are other ones: they are those of version 0"),
    "holds fused weights": ("holds", r"the engine holds 'mix\.weight' as float32\[48, 64\]"),
    "refuses the whole context": ("whole_context", r"EngineError: refused"),
}  # fmt: skip

ELSEWHERE = {"ends", "further_columns", "retokenised", "sampling_mask", "stop_texts"}
"""Checks of engines with a model's tokenizer (test_kit_catches_models; stop_texts, sampling_mask: test_torch_conformance), or
with columns of their own (test_engine_columns)."""

SLOW, SLOW_S = (
    ("loses room", "forgets neighbours", "waits for the end", "never interrupts", "throws away what it had"),
    3.0,
)
"""They are caught only after the kit has tried or waited in vain (seconds), so a right engine never needs this."""


@pytest.fixture(autouse=True)
def _nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What wrong engines leave in shared memory is in a folder that no kit of another process looks at."""
    MADE.clear()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix=f"{PREFIX}wrong-") as folder:
        monkeypatch.setattr(resources, "SHM", folder + "/")
        yield
        LEFT.close()


@pytest.fixture(scope="module")
def policy() -> NumpyPolicy:
    return NumpyPolicy()


def asked(fault: str, policy: NumpyPolicy, *checks: str, limit_s: float = 100.0) -> Report:
    methods = {"logprobs": af.RolloutEngine.logprobs} if fault == "promises scores" else {}  # which does nothing
    engine = type("Engine", (WrongRollout,), methods)
    options = {"fault": fault}
    return Conformance("rollout", engine, options=options, policy=policy, only=checks, limit_s=limit_s).run()


@pytest.mark.parametrize("fault", CAUGHT)
def test_a_wrong_engine_is_caught(fault: str, policy: NumpyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    check, reason = CAUGHT[fault]
    if fault.startswith("leaves"):
        monkeypatch.setattr(resources, "GONE_S", 0.2)  # what it leaves does not go, however long it is waited for
    if fault == "writes in a thread":  # it reads on when it has answered, if it does so before this time is over
        monkeypatch.setattr(swaps, "HELD_S", 30.0)
    limit_s = SLOW_S if fault in SLOW else 600.0 if check in ("memory", "closes") else 100.0  # leaks show late
    (result,) = asked(fault, policy, check, limit_s=limit_s).results
    if fault in SLOW and not re.search(reason, result.detail):  # a slow machine had not come so far
        (result,) = asked(fault, policy, check, limit_s=30 * limit_s).results

    assert result.outcome == "failed"
    assert re.search(reason, result.detail), result.detail


def test_every_check_catches_some_engine() -> None:
    checks = Conformance("rollout", NumpyRollout).checks  # any_order has a file of its own

    assert {check.name for check in checks} == {check for check, _ in CAUGHT.values()} | ELSEWHERE


def test_an_engine_that_a_process_can_make_once_gives_back_what_it_must(policy: NumpyPolicy) -> None:
    """It keeps a descriptor of its own, which is not more and more."""
    report = asked("can be made once", policy, "closes")

    assert [(result.outcome, result.detail) for result in report.results] == [("passed", "")]


def test_what_another_child_of_the_process_has_is_not_the_engines(policy: NumpyPolicy) -> None:
    path = f"{resources.SHM}test-kit"
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


@pytest.mark.parametrize(("folder", "counts"), [("", True), (PREFIX, False)])
def test_files_in_the_directory_of_a_run_are_not_the_engines(folder: str, counts: bool) -> None:
    """Runs that were killed beside the kit leave theirs, and those would look like a leak."""
    nbytes = 8 << 20
    before = Held.now()
    with tempfile.TemporaryDirectory(dir=resources.SHM, prefix=folder) as left:
        Path(left, "file").write_bytes(bytes(nbytes))
        grown = Held.now().beyond(before, nbytes=nbytes // 2, count=0)

    assert ("segments" in grown) == counts


@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "left, as an older one ends"])
def test_a_thread_of_each_engine_is_left_unless_the_next_one_replaces_it(replaced: bool) -> None:
    ends: list[threading.Event] = []

    def add() -> threading.Event:
        ends.append(threading.Event())
        threading.Thread(target=ends[-1].wait, daemon=True).start()
        return ends[-1]

    older = add()

    def start() -> None:
        (ends[-1] if replaced else older).set()
        add()

    expected = (
        contextlib.nullcontext()
        if replaced
        else pytest.raises(CheckFailed, match=r"left 1 threads running; .* started by test_kit_catches")
    )
    try:
        with expected:
            check_given_back(start, lambda: None, limit_s=600.0)
    finally:
        for end in ends:
            end.set()


def test_a_right_engine_passes(policy: NumpyPolicy) -> None:
    report = Conformance("rollout", NumpyRollout, policy=policy).run()

    assert {result.check.name for result in report.results if result.outcome != "passed"} == ELSEWHERE
    assert report.ok
    assert report.level == "full"


def test_a_right_engine_of_one_row_passes(policy: NumpyPolicy) -> None:
    """It refuses what is more: the kit never asks for that."""
    checks = [check.name for check in Conformance("rollout", NumpyRollout).checks if check.name != "draws"]
    options = {"fault": "refuses more", "max_rows": 1}
    report = Conformance("rollout", WrongRollout, options=options, policy=policy, only=checks).run()

    assert [result for result in report.results if result.bad] == []


def test_an_engine_may_refuse_weights_as_it_likes(policy: NumpyPolicy) -> None:
    report = asked("asserts weights", policy, "unknown_tensor", "misshapen_tensor", "torn_update")

    assert [result.detail for result in report.results if result.outcome != "passed"] == []
