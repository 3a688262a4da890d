"""Workers as jobs of a real SLURM of two nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from slurm_cluster import SlurmCluster

from asyncflow_sdk.testing import Conformance

kit = Conformance("launcher", "slurm")


@pytest.fixture(scope="module", name="slurm")
def slurm_fixture() -> Iterator[SlurmCluster]:
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def undrained(slurm: SlurmCluster) -> None:
    slurm.undrain()


@kit.parametrize
def test_contract(check: Any) -> None:
    check()
