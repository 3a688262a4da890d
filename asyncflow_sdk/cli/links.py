"""The homes of a running run, and the links to them from this host, for ``asyncflow doctor``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..errors import AsyncFlowError
from ..interfaces.store import StorageHome
from ..types.reports import HomeStatus
from ..wire import probe
from ..workflow import Run, connect
from .findings import FAILS, FINE, NOTE, WARNING, Finding
from .formats import duration, plural, size

CONNECT_S = 10.0


def links(address: str, key: Path | None, insecure: bool) -> Iterator[Finding]:
    """Check that a run and each storage unit of it answer here."""
    try:
        probe(address)
        run = connect(address, key=key, insecure=insecure, name="doctor", timeout_s=CONNECT_S)
    except AsyncFlowError as error:
        yield Finding(address, "run", FAILS, str(error), "is it served, and with the key given by --key?")
        return
    with run:
        yield Finding(address, "run", FINE, "its server answers")
        seen = {each.home: each for each in run.queue.status().homes}
        for home in run.homes():
            yield _link(address, run, home, seen[home.home])


def _link(address: str, run: Run, home: StorageHome, status: HomeStatus) -> Finding:
    subject = f"home {home.home} ({home.name})"
    losses = f"{plural(status.rows_failed, 'row')} failed"
    if status.state == "lost":
        return Finding(address, subject, NOTE, f"lost: {status.detail}; {losses} in all its losses")
    if status.state == "absent":
        return Finding(
            address, subject, WARNING, f"no storage unit for {duration(status.absent_s)}",
            f"start one on that host (asyncflow store {address}), or give it up (run.evict_home)",
        )  # fmt: skip
    try:
        took_s = run.ping_home(home)
    except AsyncFlowError as error:
        return Finding(address, subject, FAILS, str(error), "open the port of the storage unit to this host")
    return Finding(
        address, subject, FINE,
        f"{size(status.payload_bytes)} of payload; {home.address} answers after {1000 * took_s:.1f} ms",
    )  # fmt: skip
