"""The staleness rule against its formula (DESIGN.md §5), counted out for every j and n."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.ledger import Window

FAR = 12  # past every deadline drawn here


def reached(batch: int, staleness: int, turns: list[tuple[str, int, int]], steps: int | None) -> Window:
    """A window after admitting, selecting, dropping and giving back as far as it said it may."""
    window = Window(batch, staleness, steps)
    for what, deadline, rows in turns:
        held = window.load(deadline) - window.load(deadline - 1)
        if what == "admit":
            window.admit(min(rows, window.room(deadline)), deadline)
        elif what == "select":
            window.select(min(rows, held, window.selectable(deadline)), deadline)
        elif what == "select what came complete":
            window.select(min(rows, window.selectable(None)), None)
        elif what == "end":
            window.withdraw(min(rows, held), deadline)
        else:
            window.unselect(min(rows, window.batch_rows - window.free))
        assert window.holds()
        if not window.free:
            window.close()
            assert window.holds()
    return window


def fits(window: Window, rows: int, first: int, last: int, free: int) -> bool:
    """Whether L_j + rows <= free + (j - k)·B for all j from first to last."""
    return all(window.load(j) + rows <= free + (j - window.step) * window.batch_rows for j in range(first, last + 1))


windows = st.builds(
    reached,
    st.integers(1, 6),
    st.integers(0, 3),
    st.lists(
        st.tuples(
            st.sampled_from(["admit", "admit", "admit", "select", "select what came complete", "end", "unselect"]),
            st.integers(0, 7),
            st.integers(1, 6),
        ),
        max_size=30,
    ),
    st.sampled_from([None, 2, 4, 8]),
)


@given(windows, st.integers(0, 7))
def test_as_many_rows_are_admitted_as_the_formula_allows(window: Window, deadline: int) -> None:
    allowed = [
        n
        for n in range(1, 100)
        if not window.finished
        and deadline >= window.step
        and fits(window, n, deadline, FAR, window.free)
        and (window.slots is None or window.load(FAR) + n <= window.slots)
    ]
    assert window.room(deadline) == max(allowed, default=0)


@given(windows, st.none() | st.integers(0, 7))
def test_as_many_rows_are_selected_as_the_formula_allows(window: Window, deadline: int | None) -> None:
    last = FAR if deadline is None else deadline - 1
    allowed = [
        n
        for n in range(1, window.free + 1)
        if not window.finished and fits(window, 0, window.step, last, window.free - n)
    ]
    assert window.selectable(deadline) == max(allowed, default=0)


@given(windows)
def test_invariant_h_holds_wherever_the_rule_leads(window: Window) -> None:
    assert fits(window, 0, window.step, FAR, window.free)
    assert window.load(window.step - 1) == 0


def test_the_slots_of_a_last_step_are_all_there_will_be() -> None:
    window = Window(4, 2, steps=2)
    assert window.slots == 8
    window.admit(8, 2)
    assert window.room(2) == 0
    window.select(4, 2)
    window.close()
    window.select(4, 2)
    window.close()
    assert window.finished
    assert (window.slots, window.room(9), window.selectable(None)) == (0, 0, 0)


def test_a_step_of_no_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 row"):
        Window(0, 1)
