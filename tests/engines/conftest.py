"""Real engines. The tests of one are skipped where it is not installed; ``make test-ENGINE`` makes its environment, and there they
are not. ``make test-both`` needs those of vLLM and of SGLang."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

ASKED = {name: os.environ.get(f"ASYNCFLOW_TEST_{name.upper()}", "") for name in ("vllm", "sglang", "deepspeed")}
"""Where an engine must be: "here", or the interpreter that has it, for tests with the fixture ``far``; "" nowhere."""
LIMITS_S = {"vllm": 600, "sglang": 900, "deepspeed": 300, "both": 900}
"""They take up to a minute to start."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = {name: importlib.util.find_spec(name) is not None for name in ASKED}
    for name, asked in ASKED.items():
        assert here[name] or asked != "here", f"{name} is to be tested, and cannot be imported"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            name = item.path.parent.name
            far = name == "both" or "far" in getattr(item, "fixturenames", ())
            needs = ["vllm", "sglang"] if name == "both" else [name]
            item.add_marker(pytest.mark.timeout(LIMITS_S[name]))
            item.add_marker(pytest.mark.filterwarnings("default"))  # those of engines, and of what they need
            if not all(ASKED[each] not in ("", "here") if far else here[each] for each in needs):
                item.add_marker(pytest.mark.skip(reason=f"{name} is not installed here: make test-{name}"))


@pytest.fixture
def far(request: pytest.FixtureRequest) -> str:
    """The interpreter that has the engine."""
    return ASKED[request.path.parent.name]


@pytest.fixture
def pythons() -> list[str]:
    """The interpreters that have vLLM and SGLang."""
    return [ASKED["vllm"], ASKED["sglang"]]
