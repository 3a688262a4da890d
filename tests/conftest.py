import os
from collections.abc import Iterator

import pytest

from asyncflow_sdk.testing.kit.parsing import whole_parses

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes with two threads each would only wait


@pytest.fixture(scope="session", autouse=True)
def _whole_parses() -> Iterator[None]:
    """Hypothesis parses the sources of what is tested, while other threads of it import what parses too."""
    with whole_parses():
        yield
