"""Logs: the files that workers write to."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path


class Logs:
    """``folder``: where the files lie; None: in a new temporary folder that only this user can read, made with the first worker.
    Thread-safe."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._temporary: Path | None = None
        self._lock = threading.Lock()

    def of(self, worker: str) -> Path:
        """The file of a worker."""
        with self._lock:
            if self._folder is None:
                self._folder = self._temporary = Path(tempfile.mkdtemp(prefix="asyncflow-logs-"))
            return self._folder / f"{worker}.log"

    def remove(self) -> None:
        """Remove a temporary folder, once its workers have ended. A folder that was given stays. Idempotent."""
        with self._lock:
            if self._temporary is not None:
                shutil.rmtree(self._temporary, ignore_errors=True)
                self._folder = self._temporary = None
