"""Files and directories accessible only to their owner, whatever the umask."""

from __future__ import annotations

import os
from pathlib import Path


def make_private_directory(path: Path) -> None:
    """Make a directory of mode 0700, and missing parents by the umask. An existing directory keeps
    its mode. Raises OSError."""
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        path.chmod(0o700)  # the umask may restrict the owner, too


def private_opener(path: str, flags: int) -> int:
    """An ``opener`` for ``open``: new files get mode 0600, existing ones keep theirs."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
