"""How the ranks of a trainer end together, as processes that know nothing of each other."""

import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

import asyncflow_sdk as af
from asyncflow_sdk.workflow import ranks
from asyncflow_sdk.workflow.ranks import GroupEnding, Together

HANG = "import signal; signal.pause()"


class Program(af.WorkerHandle):
    """A process that runs ``code``."""

    def __init__(self, code: str) -> None:
        self._process = subprocess.Popen([sys.executable, "-S", "-c", code])
        self.pid = self._process.pid

    def wait(self) -> af.WorkerEnding:
        return af.WorkerEnding(self._process.wait(), "what it said")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.kill()


@pytest.mark.parametrize(
    "codes",
    [["raise SystemExit(7)", HANG], ["raise SystemExit(7)", HANG, HANG], [HANG, "raise SystemExit(7)", HANG, HANG]],
)
def test_ranks_that_hang_when_one_has_failed_are_killed_and_the_failure_is_its_own(
    codes: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many hang, as in a collective that one of them has left."""
    monkeypatch.setattr(ranks, "AFTER_S", 0.05)
    handles = [Program(code) for code in codes]

    ending = Together({f"w rank {rank}": each for rank, each in enumerate(handles)}).wait()

    assert ending == GroupEnding(7, "what it said", codes.index("raise SystemExit(7)"))
    assert all(each._process.returncode is not None for each in handles)
