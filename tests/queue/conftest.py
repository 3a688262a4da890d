from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacked import FAR, NEAR, SERVER, Attacked
from hosts import Cluster
from queue_runs import WAITS, Served, running

from benchmarks.hosts.network import Network


@pytest.fixture
def run() -> Iterator[Served]:
    """A run over ipc, for each test."""
    with running() as run:
        yield run


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that hears nothing from its server asks again after 0.1 s instead of 5 s."""
    monkeypatch.setattr(WAITS, "RESEND_S", 0.1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    with cluster.ends:
        yield cluster


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(3, memory="300m") as network:
        yield network


@pytest.fixture
def attacked(network: Network, tmp_path: Path) -> Iterator[Attacked]:
    with contextlib.ExitStack() as ends:
        yield Attacked(network, tmp_path, ends)
    for host in (SERVER, NEAR, FAR):
        network.mend(host)
        network.kill(host)
