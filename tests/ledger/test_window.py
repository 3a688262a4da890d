"""The staleness policies against their formulas (DESIGN.md §5), counted out for every j and n."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.interfaces import StepWindow
from asyncflow_sdk.ledger import Window
from asyncflow_sdk.plugins import registry

pytestmark = pytest.mark.fast

Wait, Drop, Count = (registry().get("staleness", name).load() for name in ("wait", "drop", "count"))

FAR = 12  # past every deadline drawn here
CURRENT = 0
TURNS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "admit", "select", "select what came complete", "end", "unselect"]),
        st.integers(0, 7),
        st.integers(1, 6),
    ),
    max_size=30,
)


def reached(batch: int, staleness: int, turns: list[tuple[str, int, int]]) -> Window:
    """A window after admitting, selecting, dropping and giving back as far as `wait` said it may."""
    window, wait = Window(batch, staleness), Wait()
    for what, deadline, rows in turns:
        filling = window.filling(CURRENT)
        held = window.load(deadline) - window.load(deadline - 1)
        if what == "admit":
            if deadline >= window.step:
                window.admit(max(0, min(rows, wait.admit(filling, deadline))), deadline)
        elif what == "select":
            window.select(min(rows, held, wait.select(filling, deadline)), deadline)
        elif what == "select what came complete":
            window.select(min(rows, wait.select(filling, None)), None)
        elif what == "end":
            window.withdraw(min(rows, held), deadline)
        else:
            window.unselect(min(rows, window.batch_rows - window.free))
        assert holds(window.filling(CURRENT))
        if not window.free:
            window.close()
            assert holds(window.filling(CURRENT))
            assert not wait.evict(window.filling(CURRENT))
    return window


def holds(filling: StepWindow) -> bool:
    """Invariant H."""
    due = [j for j in {filling.step, *filling.admitted} if j >= filling.step]
    return all(filling.slack(j) >= 0 for j in due) and filling.load(filling.step - 1) == 0


def fits(window: Window, rows: int, first: int, last: int, free: int) -> bool:
    """Whether L_j + rows <= free + (j - k)·B for all j from first to last."""
    return all(window.load(j) + rows <= free + (j - window.step) * window.batch_rows for j in range(first, last + 1))


windows = st.builds(reached, st.integers(1, 6), st.integers(0, 3), TURNS)


@settings(max_examples=40)
@given(windows, st.integers(0, 7))
def test_wait_admits_as_many_rows_as_the_formula_allows(window: Window, deadline: int) -> None:
    allowed = [n for n in range(1, 100) if fits(window, n, deadline, FAR, window.free)]
    if deadline >= window.step:
        assert max(0, Wait().admit(window.filling(CURRENT), deadline)) == max(allowed, default=0)


@settings(max_examples=40)
@given(windows, st.none() | st.integers(0, 7))
def test_wait_selects_as_many_rows_as_the_formula_allows(window: Window, deadline: int | None) -> None:
    last = FAR if deadline is None else deadline - 1
    allowed = [n for n in range(1, window.free + 1) if fits(window, 0, window.step, last, window.free - n)]
    assert max(0, Wait().select(window.filling(CURRENT), deadline)) == max(allowed, default=0)


@settings(max_examples=40)
@given(windows)
def test_invariant_h_holds_wherever_wait_leads(window: Window) -> None:
    assert fits(window, 0, window.step, FAR, window.free)
    assert window.load(window.step - 1) == 0


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(0, 3), TURNS)
def test_under_drop_no_more_than_max_staleness_steps_of_rows_are_left_behind(
    batch: int, staleness: int, turns: list[tuple[str, int, int]]
) -> None:
    window, drop = Window(batch, staleness), Drop()
    for what, ahead, rows in turns:
        deadline = window.step + ahead % (staleness + 1)
        filling = window.filling(CURRENT)
        if what == "admit":
            window.admit(max(0, min(rows, drop.admit(filling, deadline))), deadline)
        elif what == "select":
            held = window.load(deadline) - window.load(deadline - 1)
            window.select(min(rows, held, drop.select(filling, deadline)), deadline)
        assert window.under_way <= window.free + staleness * batch
        if not window.free:
            window.close()
            late = sum(window.load(due) - window.load(due - 1) for due in drop.evict(window.filling(CURRENT)))
            assert late <= staleness * batch
            for due in drop.evict(window.filling(CURRENT)):
                window.withdraw(window.load(due) - window.load(due - 1), due)
            assert window.load(window.step - 1) == 0


@settings(max_examples=40)
@given(windows, st.integers(0, 7), st.integers(0, 5))
def test_count_keeps_to_the_capacity_of_areal(window: Window, deadline: int, current: int) -> None:
    accepted = window.step * window.batch_rows + window.batch_rows - window.free
    capacity = (window.max_staleness + current + 1) * window.batch_rows - (accepted + window.under_way)

    assert Count().admit(window.filling(current), deadline) == capacity
    assert Count().select(window.filling(current), deadline) == window.free
    assert not Count().evict(window.filling(current))


def test_the_slots_of_a_last_step_are_all_there_will_be() -> None:
    window = Window(4, 2, steps=2)
    assert window.slots == 8
    window.admit(8, 2)
    window.select(4, 2)
    window.close()
    assert window.slots == 4
    window.select(4, 2)
    window.close()
    assert window.finished
    assert (window.slots, window.wanted) == (0, 0)


def test_a_step_of_no_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 row"):
        Window(0, 1)


def test_what_a_policy_is_shown_cannot_be_written_into() -> None:
    filling: StepWindow = Window(4, 1).filling(0)
    with pytest.raises(AttributeError):
        filling.free = 9  # type: ignore[misc]
    with pytest.raises(TypeError):
        filling.admitted[1] = 9  # type: ignore[index]
