"""The benchmarks' parts run, with a little work each, and what they say of themselves holds: the audit is checked."""

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from children import warm_python

from benchmarks.hosts.network import unavailable
from benchmarks.overlap.plan import GROUP, Plan

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [warm_python(), "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("contender", ["ours", "ours-journal", "ours-tcp", "zmq-tcp"])
def test_a_contender_puts_and_gets(contender: str) -> None:
    options = json.dumps({"batches": 4, "batch": 2, "take": 2, "repeats": 1})
    assert run("benchmarks.queue.drive", contender, "put_get", options)["rows"] == 8


def test_rows_stream_through_three_tasks() -> None:
    assert run("benchmarks.queue.drive", "ours", "stream", json.dumps({"batches": 2, "batch": 4}))["rows"] == 16


def test_the_ledger_is_measured_with_rows_leased_and_requests_parked() -> None:
    assert set(run("benchmarks.queue.ledger", "10", "1000")) == {"1000", "1000 held"}


@pytest.mark.parametrize("contender", ["shm", "shm-bare", "gloo", "floor-shm", "floor-staged"])
def test_versions_arrive_as_they_were_sent(contender: str) -> None:
    options = json.dumps({"gb": 0.004, "versions": 2})
    versions = run("benchmarks.weights.drive", contender, options)["versions"]
    assert all(version["copy_s"] > 0 < version["swap_s"] <= version["seconds"] for version in versions)


def test_the_table_of_weights_is_made(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = [warm_python(), "-m", "benchmarks.weights", "--quick", "--only", "files on tmpfs", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    ours, machine = json.loads(path.read_text())
    assert ours["ratio_to_peer"] == pytest.approx(ours["ours"] / ours["peer"])
    assert machine["unit"] == "GB/s"


def test_the_updates_of_a_model_are_encoded_and_decoded() -> None:
    found = run("benchmarks.weights.delta", json.dumps({"millions": 0.1, "steps": 2}))
    assert 0 < found["percent"] < 100
    assert 0 < found["moved"] < 100


def test_replicas_in_numbers_are_run_and_further_ones_simulated(tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    command = [
        warm_python(),
        "-m",
        "benchmarks.scale",
        "--quick",
        "--sizes",
        "8",
        "--simulate",
        "16",
        "--json",
        str(path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    run, simulated = json.loads(path.read_text())
    assert (run["replicas"], simulated["replicas"]) == (8, 16)
    assert run["of linear"] == 1
    assert 0 < run["of simulated"] == pytest.approx(run["rows/s"] / run["simulated"])
    assert 0 < run["server ms/row"] * 8 * 16 == pytest.approx(run["server ms/step"])
    assert 0 < run["lease p50 ms"] <= run["lease p99 ms"]
    assert simulated["rows/s"] is None
    assert simulated["of linear, simulated"] == pytest.approx(simulated["simulated"] / run["simulated"] / 2)
    assert "The server needs" in done.stdout


@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "hosts can be made")
@pytest.mark.starts("asyncflow store", "docs/queue.md: asyncflow store tcp://10.0.0.1:7000 --key run.key")
def test_columns_stay_off_the_link_of_the_server(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    small = ["--quick", "--pairs", "1", "--rate", "none", "--json"]
    command = [warm_python(), "-m", "benchmarks.hosts", *small, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    assert all(row["ours"] > 0 for row in rows)
    for row in rows[1::2]:  # bytes on the server's link, for each byte of payload
        assert row["ours"] < 0.05
        assert row["peer"] > 2


@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "hosts can be made")
def test_weights_leave_their_publisher_once_for_each_host(tmp_path: Path) -> None:
    path = tmp_path / "weights.json"
    small = ["--quick", "--hosts", "2", "--rate", "400", "--json"]
    command = [warm_python(), "-m", "benchmarks.hosts.weights", *small, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    last, first, copies = (row["ours"] for row in json.loads(path.read_text()))
    assert last >= first > 0
    assert 2 <= copies < 2.4


@pytest.mark.parametrize(
    ("mode", "policy", "max_staleness"),
    [
        ("synchronous", "wait", 0),
        ("streaming", "wait", 0),
        ("streaming and asynchronous", "wait", 1),
        ("staggered", "wait", 2),
        ("in flight", "count", 4),
    ],
)
@pytest.mark.starts("train timed")
def test_a_plan_runs_for_real_and_its_books_balance(mode: str, policy: str, max_staleness: int) -> None:
    plan = Plan(mode=mode, policy=policy, max_staleness=max_staleness, replicas=4, steps=2, warm=1, time_scale=500.0)  # type: ignore[arg-type]
    result = run("benchmarks.overlap.drive", msgspec.json.encode(plan).decode())
    assert len(result["trained_s"]) == 2
    assert result["consumed"] >= 2 * plan.rows
    assert result["consumed"] % plan.rows == 0
    assert result["consumed"] + result["cancelled"] == plan.prompts * GROUP
    assert result["balanced"]
    if policy == "wait":
        assert result["staleness_max"] <= max_staleness
