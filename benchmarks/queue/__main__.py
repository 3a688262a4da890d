"""``make bench-queue``: interleaved rounds over all contenders, medians, and the table.

python -m benchmarks.queue [--quick] [--no-peer] [--rounds N] [--only WORK] [--markdown] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics as st
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from ..children import result_of
from ..table import Row, finish, ratio, show_options
from .parts import PARTS, Part, Trial

PEER = Path(".venv-peer/bin/python")
LIMIT_S = 600
LIVE = (1_000, 100_000, 1_000_000)
PEER_LIVE = (1_000, 100_000)  # a million rows take it minutes to make


@dataclass
class Results:
    """What every round said: each trial's results, the machine's limits, the ledgers."""

    trials: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    machine: list[dict[str, float]] = field(default_factory=list)
    ledger: list[dict[str, float]] = field(default_factory=list)
    peer_ledger: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    rounds: int
    quick: bool
    peer: Path | None
    parts: list[Part]
    console: Console

    def command(self, trial: Trial) -> list[str]:
        options = json.dumps(trial.options(trial.contender, self.quick))
        python = str(self.peer) if trial.contender == "peer" else sys.executable
        return [python, "-m", "benchmarks.queue.drive", trial.contender, trial.workload, options]

    def run(self) -> Results:
        results = Results()
        turns = "100" if self.quick else "400"
        for number in range(self.rounds):
            self.console.print(f"round {number + 1} of {self.rounds}", style="dim")
            results.machine.append(self._once([sys.executable, "-m", "benchmarks.queue.machine"]))
            ran: set[str] = set()
            for trial in [trial for part in self.parts for trial in part.trials]:
                key = " ".join(command := self.command(trial))
                if key not in ran and (trial.contender != "peer" or self.peer is not None):
                    ran.add(key)
                    results.trials.setdefault(key, []).append(self._once(command))
            ledger = [sys.executable, "-m", "benchmarks.queue.ledger", turns, *map(str, LIVE)]
            results.ledger.append(self._once(ledger))
            if self.peer is not None:
                peer = [str(self.peer), "-m", "benchmarks.queue.peer_ledger", "5", *map(str, PEER_LIVE)]
                results.peer_ledger.append(self._once(peer))
        return results

    def _once(self, command: list[str]) -> Any:
        return result_of(command, LIMIT_S, self.console, {**os.environ, "RAY_DEDUP_LOGS": "1"})

    def table(self, results: Results) -> list[Row]:
        return [*(self._row(part, results) for part in self.parts), *_ledger(results), *_machine(results)]

    def _row(self, part: Part, results: Results) -> Row:
        def value(trial: Trial | None) -> float | None:
            found = results.trials.get(" ".join(self.command(trial))) if trial is not None else None
            return st.median(part.value(result) for result in found) if found else None

        ours, peer, limit = (value(trial) for trial in (part.ours, part.peer, part.limit))
        assert ours is not None
        return Row(part.work, part.unit, ours, peer, ratio(ours, peer), limit, ratio(ours, limit))


def _ledger(results: Results) -> list[Row]:
    """Times: a ratio says how often ours fits in the other's."""
    rows = []
    least = st.median(each[str(LIVE[0])] for each in results.ledger)
    for live in LIVE:
        peers = [each[str(live)] for each in results.peer_ledger if str(live) in each]
        for kind, what in (("", "ready"), (" held", "half leased, 256 requests parked")):
            ours = st.median(each[f"{live}{kind}"] for each in results.ledger)
            peer = st.median(peers) if peers and not kind else None
            work = f"lease, complete and put 32 of {live:,} live rows, {what} (limit: 1,000)"
            rows.append(Row(work, "us", ours, peer, ratio(peer, ours), least, ratio(least, ours)))
    return rows


def _machine(results: Results) -> list[Row]:
    limits = {
        "copy_gb_s": ("the machine: memcpy", "GB/s"),
        "copy_fresh_gb_s": ("the machine: memcpy into fresh pages", "GB/s"),
        "ipc_us": ("the machine: ZeroMQ round trip, ipc", "us"),
        "tcp_us": ("the machine: ZeroMQ round trip, tcp", "us"),
    }
    return [Row(*named, st.median(each[key] for each in results.machine)) for key, named in limits.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the work, one round")
    parser.add_argument("--no-peer", action="store_true", help="where the peer cannot be installed")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", default="", help="works whose name contains this")
    parser.add_argument("--peer", type=Path, default=PEER, help="python of the peer's environment")
    show_options(parser)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    peer: Path | None = arguments.peer
    if arguments.no_peer or not arguments.peer.exists():
        console.print("without the peer: its environment is not there (make .venv-peer/.ready)", style="yellow")
        peer = None
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    parts = [part for part in PARTS if arguments.only in part.work]
    plan = Plan(rounds, arguments.quick, peer, parts, console)
    rows = plan.table(plan.run())
    finish(f"TransferQueue, {rounds} interleaved rounds, every guarantee on", rows, arguments)


if __name__ == "__main__":
    main()
