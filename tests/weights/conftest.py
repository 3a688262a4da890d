"""A served queue, and a transport that waits, for publishers; and version directories."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from publisher_runs import Gated, Served

from asyncflow_sdk.testing.ends import Ends
from asyncflow_sdk.weights import publisher
from asyncflow_sdk.weights.file import FileTransport


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Gated:
    """What every publisher gets, whatever transport it asks for."""
    gated = Gated()
    monkeypatch.setattr(publisher, "transport_named", lambda name, **options: gated)
    return gated


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where version directories are written."""
    return tmp_path / "weights"


@pytest.fixture
def files(path: Path) -> Iterator[Ends]:
    """Both ends of the transport ``file``."""
    with Ends(lambda: FileTransport(path), FileTransport) as made:
        yield made
