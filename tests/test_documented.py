"""The list of everything to start: a new command, block or adapter has a test, or is a gap with its reason."""

import documented
import pytest
from documented import GAPS, PAGE, RUNNERS

pytestmark = pytest.mark.fast


def test_each_item_has_a_test_or_is_a_gap_with_its_reason() -> None:
    found, started = documented.items(), documented.started()
    named = started.keys() | GAPS.keys()
    assert [item for item, runner in found.items() if not runner and item not in named] == []
    assert [item for item in named if item not in found] == [], "no document has these any more"
    assert documented.unmarked() == [], "say ```console"
    assert started.keys() & GAPS.keys() == set(), "these are no gaps any more"
    assert {*RUNNERS.values(), PAGE} <= documented.functions()
