"""Homes of blocks: names of their segments, and the homes that this client knows.

A segment of session 7 in the server's memory (home 0) is named ``s7-1``; in epoch 1 of home 2,
``h2.1!s7-1``. The name is that of the file, too. The ledger and the journal carry names unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import NamedTuple

from ...errors import LeaseLost
from ...interfaces.store import HomeCatalog, StorageHome
from ...wire import boot_id

_HOME = r"h([1-9][0-9]{0,17})\.([1-9][0-9]{0,17})!"
_NAME = re.compile(_HOME + "s[0-9]")
_ROWS = re.compile(f"(?:{_HOME})?s(0|[1-9][0-9]{{0,17}})-[0-9a-f-]{{1,60}}")


class HomeId(NamedTuple):
    """A home's number, and its epoch. Home 0 has no epochs."""

    home: int
    epoch: int


SERVER_MEMORY = HomeId(0, 0)


def segment_prefix(where: HomeId, session: int) -> str:
    """Return the beginning of the names of a session's segments in a home."""
    return f"s{session}-" if where == SERVER_MEMORY else f"h{where.home}.{where.epoch}!s{session}-"


@functools.lru_cache(4096)
def home_of(segment: str) -> HomeId:
    """Return the home of a segment. Any name that is not one of another home is of home 0."""
    found = _NAME.match(segment)
    return SERVER_MEMORY if found is None else HomeId(int(found[1]), int(found[2]))


@functools.lru_cache(4096)
def session_of(segment: str) -> int:
    """Return the session that writes to a segment of rows; -1 for any other name."""
    found = _ROWS.fullmatch(segment)
    return -1 if found is None else int(found[3])


def owner_of(directory: Path) -> str:
    """Return an identity of a home's directory on this host, as one of its processes sees it: two
    processes with equal ones share its memory. Raises OSError if there is none."""
    found = os.stat(directory / "owner")
    return f"{boot_id()} {found.st_dev} {found.st_ino} {directory.name}"


def this_host() -> str:
    """Return an identity of this host, or of this container: of its kernel's start and its host name."""
    return f"{boot_id()} {socket.gethostname()}"


class KnownHomes:
    """The homes of a run as this client last read them, and the directories that it sees. Thread-safe."""

    def __init__(self, catalog: HomeCatalog) -> None:
        self._catalog = catalog
        self._by_number: dict[int, StorageHome] = {}
        self._visible: dict[tuple[str, str], bool] = {}
        self._lock = threading.Lock()
        self._read_s = -math.inf  # when the newest read began

    def refresh(self, *, after_s: float = 0.0) -> None:
        """Read the homes again, unless a read began less than ``after_s`` seconds before this call. One
        read serves all waiting callers. Raises ServerLost."""
        since_s = time.monotonic() - after_s
        with self._lock:
            began_s = time.monotonic()
            if self._read_s <= since_s:
                self._by_number = {each.home: each for each in self._catalog.homes()}
                self._read_s = began_s

    def find(self, where: HomeId) -> StorageHome | None:
        """Return a home, also a lost one or one in another epoch; None if it is unknown. Raises ServerLost."""
        found = self._by_number.get(where.home)
        if found is None or found.epoch < where.epoch:
            self.refresh()  # rows are located in an epoch only once the catalog has it
            found = self._by_number.get(where.home)
        return found

    def in_epoch(self, where: HomeId) -> StorageHome | None:
        """Return a home in this epoch; None if it is unknown. One without a storage unit is looked up
        again. Raises LeaseLost if the epoch is lost, ServerLost."""
        home = self.find(where)
        if home is not None and home.epoch == where.epoch and not (home.lost or home.address):
            self.refresh()
            home = self.find(where)
        if home is not None and (home.epoch != where.epoch or home.lost):
            raise LeaseLost(
                f"epoch {where.epoch} of home {where.home} ({home.name}) is lost: {home.lost or 'another one has begun'}"
            )
        return home

    def is_live(self, where: HomeId) -> bool:
        """True if blocks of this epoch are not given up."""
        found = self.find(where)
        return found is not None and found.epoch == where.epoch and not found.lost

    def directory(self, where: HomeId) -> Path | None:
        """Return the directory of a live home; None if its memory is not visible here."""
        found = self.find(where) if self.is_live(where) else None
        return None if found is None or not self.sees(found) else Path(found.directory)

    def visible(self) -> list[StorageHome]:
        """Return the live homes with memory that this process can write to."""
        return [each for each in list(self._by_number.values()) if not each.lost and self.sees(each)]

    def served(self) -> list[StorageHome]:
        """Return the live homes with a storage unit, those of this host first."""
        live = [each for each in list(self._by_number.values()) if not each.lost and each.address]
        return sorted(live, key=lambda each: each.owner != this_host())

    def is_here(self) -> bool:
        """Read the homes again. Return True if this host has a live one with a unit, or with memory visible to this
        process. Raises ServerLost."""
        self.refresh()
        return bool(self.visible()) or any(each.owner == this_host() for each in self.served())

    def sees(self, home: StorageHome) -> bool:
        """True if this process can write to the memory of a home. It may be mounted later, but does not
        vanish without an error."""
        key = home.directory, home.owner
        if all(key) and not self._visible.get(key, False):
            with contextlib.suppress(OSError):
                self._visible[key] = owner_of(Path(key[0])) == key[1] and os.access(key[0], os.W_OK)
        return self._visible.get(key, False)

    def forget_directory(self, where: HomeId) -> None:
        """Check again whether the memory of a home is visible."""
        found = self._by_number.get(where.home)
        if found is not None:
            self._visible.pop((found.directory, found.owner), None)
