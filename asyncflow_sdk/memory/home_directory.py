"""The directory of a storage unit: segments of one run on one host. It outlives the unit's process,
and the next unit of the run on this host finds it again.

The file ``home`` names the run. While the unit lives, it touches this file; a directory without a
unit is removed KEEP_S seconds after the last touch, by the next server or unit that starts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from pathlib import Path

import msgspec

from ..errors import ConfigError
from .directory import HOME, HomeMark, SharedDirectory, is_served, own_directories, user_directories


class HomeDirectory:
    """Makes or finds the directory of a run's home on this host, and owns it. ``path``: of it.
    ``contents``: an identity of its files. ``base``: where it is made, and looked for; default: as for a
    server's. Raises ConfigError if another process owns it, or if ``base`` cannot be used."""

    def __init__(self, run: str, base: Path | None = None) -> None:
        earlier = find_home_directory(run, base)
        if earlier is not None and is_served(earlier):
            raise ConfigError(f"a storage unit of run {run} serves {earlier} already")
        if earlier is not None:
            os.utime(earlier / HOME)  # so that nobody removes it meanwhile
        try:
            self._directory = SharedDirectory(base, path=earlier)
            self.path, self.warning = self._directory.path, self._directory.warning
            if earlier is None:
                self._write_mark(run)
        except OSError as error:
            raise ConfigError(f"a storage unit cannot keep columns in {base or 'memory'}: {error}") from None
        self.contents = _read_mark(self.path).contents

    def _write_mark(self, run: str) -> None:
        mark = HomeMark(run, socket.gethostname(), secrets.token_hex(8))
        (self.path / HOME).write_bytes(msgspec.json.encode(mark))

    def begin_anew(self) -> None:
        """Give the contents another identity: some of them are lost."""
        self._write_mark(_read_mark(self.path).run)
        self.contents = _read_mark(self.path).contents

    def touch(self) -> None:
        """Give a sign of life. Raises FileNotFoundError if the directory is gone."""
        os.utime(self.path / HOME)

    def segments(self) -> list[Path]:
        """Return the segments of all epochs."""
        with contextlib.suppress(OSError):
            return list(self.path.glob("h*!s*-*"))
        return []

    def close(self, *, keep: bool) -> None:
        """Give it up to the next unit, or remove it. Views stay valid. Idempotent."""
        self._directory.close(keep=keep)


def find_home_directory(run: str, base: Path | None = None) -> Path | None:
    """Return the directory of a run's home on this host; None if there is none."""
    for path in own_directories() if base is None else user_directories(base):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            mark = _read_mark(path)
            if (mark.run, mark.host) == (run, socket.gethostname()):
                return path
    return None


def _read_mark(path: Path) -> HomeMark:
    return msgspec.json.decode((path / HOME).read_bytes(), type=HomeMark)
