import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # as a user's script has its own folder on the path

from echo_runs import segments
from judges import Judge


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Whatever a test does, no shared memory of its runs is left."""
    before = segments(os.getpid())
    yield
    assert segments(os.getpid()) <= before


@pytest.fixture
def judge() -> Iterator[Judge]:
    made = Judge()
    yield made
    made.close()
