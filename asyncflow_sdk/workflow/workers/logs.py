"""LogFolder: the log files of workers."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path


class LogFolder:
    """``folder``: of the files; None: a temporary one, readable by this user only, made for the
    first worker. Thread-safe."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._temporary: Path | None = None
        self._lock = threading.Lock()

    def file(self, worker: str) -> Path:
        """Return the path of a worker's log."""
        with self._lock:
            if self._folder is None:
                self._folder = self._temporary = Path(tempfile.mkdtemp(prefix="asyncflow-logs-"))
            return self._folder / f"{worker}.log"

    def remove(self) -> None:
        """Remove a temporary folder. Call after the workers' end. Idempotent."""
        with self._lock:
            if self._temporary is not None:
                shutil.rmtree(self._temporary, ignore_errors=True)
                self._folder = self._temporary = None
