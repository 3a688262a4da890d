"""Engines that are tested in an environment of their own, and are skipped elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest


def skip_elsewhere(items: list[pytest.Item], folder: Path, package: str, asked: str) -> Iterator[pytest.Item]:
    """Each test of ``folder``, marked to be skipped where ``package`` is not. ``asked``: where it must be: "here", or the interpreter
    that has it, for tests with the fixture ``far``; "" nowhere."""
    here = importlib.util.find_spec(package) is not None
    assert here or asked != "here", f"{package} is to be tested, and cannot be imported"
    for item in items:
        if folder not in item.path.parents:
            continue
        far = "far" in getattr(item, "fixturenames", ())
        if asked in ("", "here") if far else not here:
            item.add_marker(pytest.mark.skip(reason=f"{package} is not installed here: make test-{package}"))
        yield item
