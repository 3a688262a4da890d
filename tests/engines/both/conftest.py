"""vLLM and SGLang in one run. Where either is not installed this is skipped; ``make test-both`` needs what make test-vllm and
make test-sglang have made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ASKED = {name: os.environ.get(f"ASYNCFLOW_TEST_{name.upper()}", "") for name in ("vllm", "sglang")}
"""The interpreters that have them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name, python in ASKED.items() if python in ("", "here")]
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"{', '.join(missing)} not there: make test-both"))


@pytest.fixture
def pythons() -> list[str]:
    return list(ASKED.values())
