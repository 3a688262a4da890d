from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deepspeed_parts import RANKS


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_in_shared_memory() -> Iterator[None]:
    left = set(Path("/dev/shm").glob("deepspeed*"))
    yield
    RANKS.close()
    assert not set(Path("/dev/shm").glob("deepspeed*")) - left
