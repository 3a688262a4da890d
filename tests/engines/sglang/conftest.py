"""A real SGLang. Where it is not installed these tests are skipped; ``make test-sglang`` makes the environment, and there they
are not. It takes half a minute to start, so that one server is there for all tests that can share one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from elsewhere import skip_elsewhere

ASKED = os.environ.get("ASYNCFLOW_TEST_SGLANG", "")
"""Where SGLang must be: "here", or the interpreter that has it; "" nowhere."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in skip_elsewhere(items, Path(__file__).parent, "sglang", ASKED):
        item.add_marker(pytest.mark.timeout(900))
        item.add_marker(pytest.mark.filterwarnings("default"))  # those of SGLang, and of what it needs


@pytest.fixture
def far() -> str:
    """The interpreter that has SGLang."""
    return ASKED


@pytest.fixture
def shared() -> Any:
    from one_server import server

    return server()
