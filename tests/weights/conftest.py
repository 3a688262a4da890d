"""Runs, replicas and version directories of the tests of weights, and their own transports as an installed plugin."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from replicas import Served
from scripted_transport import Scripted
from transport_ends import publishing

from asyncflow_sdk.testing.ends import Ends


@pytest.fixture(scope="module", autouse=True)
def _plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The transports of `scripted_transport` are installed, also for processes that are started."""
    site = tmp_path_factory.mktemp("site")
    info = site / "weight_tests-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weight-tests\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[asyncflow_sdk]\nweight_tests = scripted_transport\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.setenv("PYTHONPATH", f"{site}:{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("ASYNCFLOW_PLUGINS", "testing,torch,weight-tests")
        yield


@pytest.fixture
def scripted() -> type[Scripted]:
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
def files(path: Path) -> Iterator[Ends]:
    """Both ends of the transport ``file``."""
    with publishing(path) as made:
        yield made
