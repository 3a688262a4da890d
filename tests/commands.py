"""A typed command, running in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class Command:
    """A running command, and the text it has printed so far, errors included."""

    def __init__(self, words: Sequence[str], cwd: Path, variables: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            words, cwd=cwd, env=os.environ | (variables or {}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )  # fmt: skip
        self.said = ""

    def until(self, pattern: str) -> re.Match[str]:
        """Wait for a line."""
        assert self.process.stdout is not None
        while not (found := re.search(pattern, self.said)):
            line = self.process.stdout.readline()
            assert line, f"it ended without {pattern!r}:\n{self.said}"
            self.said += line
        return found

    def end(self) -> int:
        """Wait for its end. Return its exit status."""
        more, _ = self.process.communicate(timeout=600)  # only ends a test that would hang
        self.said += more
        return self.process.returncode

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate()
