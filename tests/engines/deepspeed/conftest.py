"""A real DeepSpeed. Where it is not installed these tests are skipped; ``make test-deepspeed`` makes the environment, and there they are not."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from deepspeed_parts import RANKS

ASKED = os.environ.get("ASYNCFLOW_TEST_DEEPSPEED", "")
"""Where DeepSpeed must be: "here", or nowhere."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = importlib.util.find_spec("deepspeed") is not None
    assert here or ASKED != "here", "DeepSpeed is to be tested, and cannot be imported"
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.timeout(300))
        item.add_marker(pytest.mark.filterwarnings("default"))  # those of DeepSpeed and of what it needs
        if not here:
            item.add_marker(pytest.mark.skip(reason="DeepSpeed is not installed here: make test-deepspeed"))


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_in_shared_memory() -> Iterator[None]:
    left = set(Path("/dev/shm").glob("deepspeed*"))
    yield
    RANKS.close()
    assert not set(Path("/dev/shm").glob("deepspeed*")) - left
