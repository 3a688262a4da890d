"""The edges of what the screens draw: bars, windows, and lists that just fit."""

import io

import msgspec
import pytest
from rich.console import Console, Group
from test_top_picture import VERSIONS, picture, replica, report

from asyncflow_sdk.cli.check import print_report
from asyncflow_sdk.cli.doctor import Examination
from asyncflow_sdk.cli.formats import sparkline
from asyncflow_sdk.cli.report.summary import facts
from asyncflow_sdk.cli.top import weights_table
from asyncflow_sdk.testing import Report


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=100)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_sparkline_has_eight_bars_at_equal_distances() -> None:
    assert sparkline([step / 7 for step in range(8)], 0.0, 1.0) == "▁▂▃▄▅▆▇█"
    assert sparkline([-1.0, 2.0], 0.0, 1.0) == "▁█"


def test_the_foot_is_shown_from_sixteen_lines_on() -> None:
    assert "q quits" in picture(80, 16)[-1]
    assert "q quits" not in picture(80, 15)[-1]


@pytest.mark.parametrize(("most", "shown"), [(6, 4), (5, 2)])
def test_replicas_that_just_fit_are_all_named(most: int, shown: int) -> None:
    late = tuple(replica(20 + number, f"late-{number}", 9, "fetching 10", 1.0) for number in range(4))
    newest = msgspec.structs.replace(VERSIONS[0], version=10, source=10)
    made = report(versions=(newest,), version=10, sessions=late, session_count=4)
    console = terminal()
    console.print(Group(*weights_table(made, 90, most, 1)))
    assert sum(f"late-{number} " in written(console) for number in range(4)) == shown


@pytest.mark.parametrize(("fine", "style"), [(True, "\x1b[32m"), (False, "\x1b[1;31m")])
def test_the_doctors_verdict_is_printed_in_its_colour(fine: bool, style: str) -> None:
    console = terminal()
    Examination(fine=fine, verdict="what it found", findings=[], interpreters={}).print(console)
    assert f"{style}what it found" in written(console)


def test_a_report_without_failures_is_green() -> None:
    console = terminal()
    print_report(Report("rollout", "mine", ()), (), console)
    assert "\x1b[32mrollout mine: " in written(console)


def test_lengths_and_staleness_of_a_summary_are_named_and_written_out() -> None:
    lengths = {"generated": {"rows": 9, "mean": 12345.6}, "ratio": {"mean": 0.5}}
    found = dict(facts({"lengths": lengths, "staleness": {"in_flight": {"mean": 0.5, "max": 2}}}))
    assert found["response lengths"] == "generated: rows 9, mean 12,346\ntrained / generated: mean 0.5"
    assert found["staleness"] == "in flight: mean 0.5, max 2"
