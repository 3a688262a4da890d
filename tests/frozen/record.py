"""Record what the ledger does today: see replaying.py. No part of the suite; looks inside.

python tests/frozen/record.py tests FILE KEEP LONGEST EXAMPLES TEST...   what tests do with ledgers, KEEP ledgers of each test
python tests/frozen/record.py runs FILE DIRECTORY...                     ledgers of real runs, from their journals

The real runs were workflows of echo engines with ``Checkpoint(every=2, keep=2, history=True)``: each policy, a rollout killed
twice, a trainer killed twice, two train ranks, a rollback, an evaluation, three stages, and one killed with all its workers and
resumed. ``scenarios`` also has leases that expire until their rows fail, driven by hand. ``schedules`` is of two seeds.
"""

from __future__ import annotations

import json
import lzma
import random
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from replaying import HERE, OUTPUTS, Json, difference
from today import LedgerOfToday, effects_of, plain

import asyncflow_sdk as af
from asyncflow_sdk.ledger import Ledger

LOOK_EVERY = 40
Lines = list[dict[str, Json]]
INPUTS = {
    "apply": ("session", "command", "now", "ticket"), "tick": ("now",), "forget": ("ticket", "now"),
    "session_died": ("session", "now", "reason"), "unheard": ("session", "version", "now"),
    "lose": ("ids", "now", "reason", "tickets"),
}  # fmt: skip
DEFAULTS: dict[str, Json] = {"lose": {"tickets": ()}, "session_died": {"blame": True}}


class Recorder:
    """Notes every input of every ledger, and what it led to. A pytest plugin."""

    def __init__(self, keep: int, longest: int, examples: int = 0) -> None:
        self.keep, self.longest, self.examples = keep, longest, examples
        self.ledgers: weakref.WeakKeyDictionary[Ledger, Lines] = weakref.WeakKeyDictionary()
        self.made: list[Lines] = []  # since the last test
        self.chosen: dict[str, tuple[str, Lines]] = {}  # by their inputs
        self.originals = {name: getattr(Ledger, name) for name in INPUTS}
        for name, original in self.originals.items():
            setattr(Ledger, name, self._noting(name, original))

    def pytest_configure(self) -> None:
        import hypothesis  # not before pytest

        settings, examples = hypothesis.settings.__init__, self.examples

        def fewer(this: Any, *args: Any, **more: Any) -> None:
            if "max_examples" in more:
                more["max_examples"] = min(more["max_examples"], examples)
            settings(this, *args, **more)

        hypothesis.settings.__init__ = fewer  # type: ignore[method-assign]

    def _noting(self, name: str, original: Callable[..., None]) -> Callable[..., None]:
        def noting(ledger: Ledger, *args: Any, **more: Any) -> None:
            if ledger not in self.ledgers:
                self.ledgers[ledger] = []
                self.made.append(self.ledgers[ledger])
            given = {**DEFAULTS.get(name, {}), **dict(zip(INPUTS[name], args, strict=False)), **more}
            if name == "lose":
                given["ids"] = given["ids"].tolist()
            line = {"input": name, **{key: plain(value, key, lean=True) for key, value in given.items()}}
            effects = ledger._effects
            before = len(effects.answers), len(effects.events), len(effects.retired)
            original(ledger, *args, **more)
            parts = zip((effects.answers, effects.events, effects.retired), before, strict=True)
            line |= effects_of(*(part[count:] for part, count in parts))
            self.ledgers[ledger].append(json.loads(json.dumps(line)))

        return noting

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self.choose(item.nodeid)

    def choose(self, name: str) -> None:
        """Keep some of the recordings that were made since the last time."""
        made, self.made = [lines for lines in self.made if len(lines) <= self.longest], []
        self.ledgers.clear()
        kept = 0
        for lines in random.Random(name).sample(made, len(made)):
            inputs = json.dumps([{key: each for key, each in line.items() if key not in OUTPUTS} for line in lines])
            if kept < self.keep and inputs not in self.chosen:
                kept += 1
                self.chosen[inputs] = f"{name} {kept}", lines

    def write(self, file: str) -> None:
        """Write what a new ledger does as well, which no test has changed."""
        for name, original in self.originals.items():
            setattr(Ledger, name, original)
        recordings = inputs = 0
        with lzma.open(HERE / file, "wt", preset=9 | lzma.PRESET_EXTREME) as out:
            for name, lines in self.chosen.values():
                if told := with_looks(lines):
                    print(f"left out {name}: {told[:300]}")
                    continue
                recordings, inputs = recordings + 1, inputs + len(lines)
                for line in [{"recording": name}, *lines]:
                    out.write(json.dumps(line, separators=(",", ":")) + "\n")
        print(f"{file}: {recordings} recordings, {inputs} inputs")


def with_looks(lines: Lines) -> str:
    """Add what the ledger says of itself now and then. Return what a new ledger does otherwise."""
    ledger, whole = LedgerOfToday(), list[dict[str, Json]]()
    for number, line in enumerate(lines, 1):
        if told := difference(ledger, line):
            return told
        whole.append(line)
        if line["input"] == "apply" and line["command"].get("key") and line["command"]["type"] == "Put":
            ask = {
                **line,
                "command": {"type": "GetPut", "prefix": line["command"]["key"][:1]},
                "ticket": -number - 10**6,
            }
            ask = {name: value for name, value in ask.items() if name not in OUTPUTS}
            whole.append({**ask, **ledger.carry_out(ask)})
        if number % LOOK_EVERY == 0 or number == len(lines):
            whole.append({"input": "look", **ledger.carry_out({"input": "look"})})
    lines[:] = json.loads(json.dumps(whole))
    return ""


def record_tests(file: str, keep: str, longest: str, examples: str, *arguments: str) -> None:
    recorder = Recorder(int(keep), int(longest), int(examples))
    pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=7", *arguments], plugins=[recorder])
    recorder.write(file)


def record_runs(file: str, *directories: str) -> None:
    recorder = Recorder(1, 1 << 30)
    for directory in directories:
        assert af.replay(directory).differing == 0
        recorder.choose(Path(directory).name)
    recorder.write(file)


if __name__ == "__main__":
    {"tests": record_tests, "runs": record_runs}[sys.argv[1]](*sys.argv[2:])
