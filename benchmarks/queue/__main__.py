"""``make bench-queue``: interleaved rounds over all contenders, medians, and the table.

python -m benchmarks.queue [--quick] [--no-peer] [--rounds N] [--only PART] [--markdown] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics as st
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from ..table import Row, markdown, show
from .contender import SPEEDUP

PEER = Path(".venv-peer/bin/python")
LIMIT_S = 600
LIVE = (1_000, 100_000, 1_000_000)
PEER_LIVE = (1_000, 100_000)  # a million rows take it minutes to make

Result = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A row of the table: a workload, who runs it, and what of its result is shown. The first contender is ours,
    ``peer`` is the peer, the other one the limit."""

    work: str
    unit: str
    contenders: tuple[str, ...]
    workload: str
    options: Callable[[str, bool], dict[str, Any]]
    value: Callable[[Result], float]


def rows_a_second(result: Result) -> float:
    return result["rows"] / _total(result)


def gigabytes_a_second(result: Result) -> float:
    return result["bytes"] / _total(result) / 1e9


def _total(result: Result) -> float:
    """Seconds of the median repetition."""
    if "seconds" in result:
        return st.median(result["seconds"])
    return st.median(put + take for put, take in zip(result["put_s"], result["take_s"], strict=True))


def small(batch: int, batches: int, take: int | None = None) -> Callable[[str, bool], dict[str, Any]]:
    """``batches``: for the peer; the others are that much faster."""

    def options(contender: str, quick: bool) -> dict[str, Any]:
        count = max(batches * SPEEDUP[contender] // (4 if quick else 1), 2)
        if take is not None:  # the peer gives a whole batch or nothing
            count = -(-count // take) * take
        return {"batches": count, "batch": batch, "take": take or batch, "repeats": 2 if quick else 3}

    return options


def large(rows: int) -> Callable[[str, bool], dict[str, Any]]:
    def options(contender: str, quick: bool) -> dict[str, Any]:
        nbytes = (1 << 30) // rows // (4 if quick else 1)
        return {"batches": 1, "batch": rows, "take": rows, "nbytes": nbytes, "repeats": 2}

    return options


def chained(contender: str, quick: bool) -> dict[str, Any]:
    return {"batches": 24 * SPEEDUP[contender] // (4 if quick else 1)}


PARTS = [
    Part("put + get, batch 1", "rows/s", ("ours", "peer", "shm"), "put_get", small(1, 100), rows_a_second),
    Part("put + get, batch 32", "rows/s", ("ours", "peer", "shm"), "put_get", small(32, 30), rows_a_second),
    Part("put + get, batch 256", "rows/s", ("ours", "peer", "shm"), "put_get", small(256, 8), rows_a_second),
    Part("put one by one, get 256", "rows/s", ("ours", "peer", "shm"), "put_get", small(1, 256, 256), rows_a_second),
    Part("1 GiB in 64 x 16 MB, copied out", "GB/s", ("ours", "peer", "shm"), "put_get", large(64), gigabytes_a_second),
    Part("1 GiB in 1024 x 1 MB, copied out", "GB/s", ("ours", "peer", "shm"), "put_get", large(1024), gigabytes_a_second),
    Part("stream, 3 tasks, batch 32", "rows/s", ("ours", "peer", "shm"), "stream", chained, rows_a_second),
]  # fmt: skip


@dataclass
class Results:
    """What every round said."""

    parts: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    machine: list[dict[str, float]] = field(default_factory=list)
    ledger: list[dict[str, float]] = field(default_factory=list)
    peer_ledger: list[dict[str, float]] = field(default_factory=list)

    def median(self, work: str, contender: str) -> float | None:
        values = self.parts.get((work, contender))
        return st.median(values) if values else None


def run(python: Path | str, *arguments: str) -> Any:
    """What a child prints last, as JSON."""
    command = [str(python), "-m", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "1", "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=LIMIT_S, env=environment
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{' '.join(command)} did not end in {LIMIT_S} s; is the machine busy?") from None
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def rounds(count: int, parts: list[Part], quick: bool, peer: Path | None, console: Console) -> Results:
    results = Results()
    turns = "60" if quick else "400"
    for number in range(count):
        console.print(f"round {number + 1} of {count}", style="dim")
        results.machine.append(run(sys.executable, "benchmarks.queue.machine"))
        for part in parts:
            for contender in part.contenders:
                if contender == "peer" and peer is None:
                    continue
                console.print(f"  {part.work}: {contender}", style="dim")
                options = json.dumps(part.options(contender, quick))
                python = peer if contender == "peer" else sys.executable
                result = run(python or "", "benchmarks.queue.drive", contender, part.workload, options)
                results.parts.setdefault((part.work, contender), []).append(part.value(result))
        console.print("  the ledger alone", style="dim")
        results.ledger.append(run(sys.executable, "benchmarks.queue.ledger", turns, *map(str, LIVE)))
        if peer is not None:
            results.peer_ledger.append(run(peer, "benchmarks.queue.peer_ledger", "5", *map(str, PEER_LIVE)))
    return results


def table(parts: list[Part], results: Results) -> list[Row]:
    def over(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a / b

    rows = []
    for part in parts:
        others = [name for name in part.contenders[1:] if name != "peer"]
        ours = results.median(part.work, part.contenders[0])
        assert ours is not None
        peer = results.median(part.work, "peer")
        limit = results.median(part.work, others[0]) if others else None
        rows.append(Row(part.work, part.unit, ours, peer, over(ours, peer), limit, over(ours, limit)))
    first = st.median(each[str(LIVE[0])] for each in results.ledger)
    for live in LIVE:
        peers = [each[str(live)] for each in results.peer_ledger if str(live) in each]
        for kind, what in (("", "ready"), (" held", "half leased, 256 requests parked")):
            ours = st.median(each[f"{live}{kind}"] for each in results.ledger)
            peer = st.median(peers) if peers and not kind else None
            work = f"lease, complete, put 32 rows; {live:,} live, {what}"
            rows.append(Row(work, "us", ours, peer, over(peer, ours), first, over(first, ours)))
    for key, work, unit in (
        ("copy_gb_s", "the machine: memcpy", "GB/s"),
        ("copy_fresh_gb_s", "the machine: memcpy into fresh pages", "GB/s"),
        ("ipc_us", "the machine: ZeroMQ round trip, ipc", "us"),
        ("tcp_us", "the machine: ZeroMQ round trip, tcp", "us"),
    ):
        rows.append(Row(work, unit, st.median(each[key] for each in results.machine)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the work, one round")
    parser.add_argument("--no-peer", action="store_true", help="where the peer cannot be installed")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", help="works whose name contains this")
    parser.add_argument("--peer", type=Path, default=PEER, help="python of the peer's environment")
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    peer: Path | None = arguments.peer
    if arguments.no_peer or not arguments.peer.exists():
        console.print("without the peer: its environment is not there (make .venv-peer/.ready)", style="yellow")
        peer = None
    parts = [part for part in PARTS if (arguments.only or "") in part.work]
    count = arguments.rounds or (1 if arguments.quick else 3)
    rows = table(parts, rounds(count, parts, arguments.quick, peer, console))
    if arguments.markdown:
        print(markdown(rows))
    show(f"TransferQueue, {count} interleaved rounds, every guarantee on", rows, arguments.json)


if __name__ == "__main__":
    main()
