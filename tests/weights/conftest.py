"""Runs, replicas and version directories of the tests of weights, and their own transport as an installed plugin."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from plugin_packages import install_plugin
from replicas import Served
from scripted_transport import Scripted
from transport_ends import publishing

from asyncflow_sdk.testing.transport_harness import TransportHarness


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    install_plugin(tmp_path, monkeypatch, "weight_tests", "from scripted_transport import asyncflow_adapters\n")
    Scripted.reset()
    return Scripted


@pytest.fixture
def served() -> Iterator[Served]:
    """A run with a publisher; tests may make another instead."""
    with Served() as run:
        yield run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where version directories are written."""
    return tmp_path / "weights"


@pytest.fixture
def files(path: Path) -> Iterator[TransportHarness]:
    with publishing(path) as made:
        yield made
