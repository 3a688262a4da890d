"""``asyncflow store``: serve this host's memory for the payload of a run, until the run ends."""

from __future__ import annotations

import threading
from pathlib import Path

from rich.console import Console

from ..queue.stores.unit import UnitConfig
from ..queue.unit_process import run_unit
from ..types.defaults import CALL_S
from ..wire import RunKey
from ..workflow.endpoints import find_run
from .signals import stop_as_interrupt


def serve_store(
    where: str, console: Console, *, name: str = "", listen: str | None = None, key: Path | None = None, insecure: bool = False
) -> None:  # fmt: skip
    """Serve until the run ends, or Ctrl-C, which leaves the files to the next unit. Raises the errors
    of ``run_unit``."""
    address, found = find_run(where, key, insecure, CALL_S)
    config = UnitConfig(address, name, None if found is None else RunKey.load(found), insecure, listen)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with stop_as_interrupt():
        run_unit(config, say, threading.Event())
    say("the run has ended")
