"""The benchmarks' parts run, with a little work each, and what they say of themselves holds: the audit is checked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("contender", ["ours", "ours-journal", "ours-tcp", "zmq-tcp"])
def test_a_contender_puts_and_gets(contender: str) -> None:
    options = json.dumps({"batches": 4, "batch": 2, "take": 2, "repeats": 1})
    assert run("benchmarks.queue.drive", contender, "put_get", options)["rows"] == 8


def test_rows_stream_through_three_tasks() -> None:
    assert run("benchmarks.queue.drive", "ours", "stream", json.dumps({"batches": 2, "batch": 4}))["rows"] == 16


def test_the_ledger_is_measured_with_rows_leased_and_requests_parked() -> None:
    assert set(run("benchmarks.queue.ledger", "10", "1000")) == {"1000", "1000 held"}
