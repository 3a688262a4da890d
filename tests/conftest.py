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


LONG = [
    "test_documents.py", "test_weight_attacks.py", "test_demo.py", "test_guide.py", "test_wrong_trainers.py", "test_ranks.py",
    "test_new_plugin.py", "test_machine.py", "test_survival.py",
]  # fmt: skip
"""They come first: what is long and comes last has a processor for itself."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
