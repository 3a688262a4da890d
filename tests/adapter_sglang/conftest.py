"""A real SGLang. Where it is not installed these tests are skipped; ``make test-sglang`` makes the environment, and there they
are not. It takes half a minute to start, so that one server is there for all tests that can share one."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

ASKED = os.environ.get("ASYNCFLOW_TEST_SGLANG", "")
"""Where SGLang must be: "here", or the interpreter that has it; "" nowhere."""
INSTALL = "SGLang is not installed here: make test-sglang"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = importlib.util.find_spec("sglang") is not None
    assert here or ASKED != "here", "SGLang is to be tested, and cannot be imported"
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.timeout(900))
        if "far" in getattr(item, "fixturenames", ()):
            if ASKED in ("", "here"):
                item.add_marker(pytest.mark.skip(reason=INSTALL))
        elif not here:
            item.add_marker(pytest.mark.skip(reason=INSTALL))


@pytest.fixture
def far() -> str:
    """The interpreter that has SGLang."""
    return ASKED


@pytest.fixture
def shared() -> Any:
    from one_server import server

    return server()
