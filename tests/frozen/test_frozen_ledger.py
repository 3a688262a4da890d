"""What the ledger did when its inside was about to be redrawn, input by input, is what it does today."""

from __future__ import annotations

import pytest
from replaying import HERE, differences

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("*.jsonl.xz")))
def test_the_ledger_answers_as_it_did(file: str) -> None:
    found = differences(HERE / file)
    assert not found, "\n\n".join(found)
