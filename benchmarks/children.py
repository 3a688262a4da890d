"""A child process that measures: what it prints last is JSON."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from typing import Any

from rich.console import Console


def result_of(
    command: list[str], limit_s: float, console: Console, environment: Mapping[str, str] = os.environ
) -> Any:
    """What it prints last. Ends this program, with what the child said, when it fails or takes longer."""
    console.print(f"  {' '.join(command[2:])}", style="dim")
    environment = {**environment, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s, env=environment)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{' '.join(command)} did not end in {limit_s} s; is the machine busy?") from None
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])
