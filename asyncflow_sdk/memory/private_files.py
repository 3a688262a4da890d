"""Files and directories that only their owner may read, whatever the umask."""

from __future__ import annotations

import os
from pathlib import Path


def make_private_directory(path: Path) -> None:
    """Make a directory of mode 0700 if it is not there, and its missing parents by the umask. A directory that is there
    keeps its mode. Raises OSError."""
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        path.chmod(0o700)  # a umask may take rights from its owner, too


def private_opener(path: str, flags: int) -> int:
    """An ``opener`` of ``open``: a file that it makes has mode 0600. A file that is there keeps its mode."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
