"""What ``asyncflow top`` draws of a queue: who waits for what, rates, weights; it fits every terminal."""

import math
import re

import msgspec
import pytest

from asyncflow_sdk.cli.figures import QueueFigures, RateWindow
from asyncflow_sdk.cli.formats import rate, size
from asyncflow_sdk.cli.top import queue_screen
from asyncflow_sdk.ledger import StatusReport
from asyncflow_sdk.types.reports import HomeStatus, LeaseStatus, ParkedStatus, SessionStatus, StepAges, VersionStatus

pytestmark = pytest.mark.fast
WHY = (
    "task 'train' has nothing to give; step 12 lacks 96 of 256 rows, and the queue has 40 that may fill it; 40 rows"
    " lack column 'reward', given by task 'reward'; 64 rows are leased in task 'reward', the oldest by reward-0 for"
    " 3.4 s"
)


def session(number: int, name: str, **more: object) -> SessionStatus:
    return SessionStatus(id=number, name=name, age_s=723.0, pid=4000 + number, host="here", **more)  # type: ignore[arg-type]


def report(time_s: float = 100.0, passed: int = 12_000, **changes: object) -> StatusReport:
    counts = {"waiting": 128, "ready": 64, "selected": 0, "leased": 32, "done": 400}
    made = StatusReport(
        rows={"rollout": counts, "reward": {**counts, "ready": 0}, "train": {**counts, "selected": 160}},
        ended={"consumed": passed, "filtered": 300, "failed": 0},
        waiting={}, step=12, free_slots=96, version=11, live=624, put=12_924, capacity_rows=4000,
        arrived={"rollout": passed + 500, "reward": passed + 100, "train": passed}, completed={"rollout": passed, "reward": passed, "train": passed},
        sessions=(
            session(1, "driver"), session(2, "trainer-0"), session(3, "rollout-1", loaded=11, leases=2, rows=64, task="rollout", held_s=12.0),
            session(4, "reward-0", leases=1, rows=32, task="reward", held_s=3.4),
            SessionStatus(id=5, name="far-away", age_s=9.0, pid=77, host="there"),
        ),
        session_count=5,
        parked=(ParkedStatus(session=2, name="trainer-0", verb="get train", why=WHY, since_s=61.0, left_s=500.0),),
        parked_count=1,
        oldest=LeaseStatus(token=9, task="rollout", session=3, name="rollout-1", rows=64, since_s=12.0, left_s=588.0),
        lease_count=3, batch_rows=256, steps=300, version_age_s=3.2, time_s=time_s,
        payload_bytes=41_200_000, held_bytes=67_108_864, written_bytes=passed * 1000, host="here",
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def figures(**changes: object) -> QueueFigures:
    window = RateWindow()
    for second in range(4):
        window.add(report(96.0 + second, 12_000 - 400 + 100 * second))
    rates = window.add(report())
    return QueueFigures(title="runs/x", report=report(**changes), rates=rates, history=window.history)  # type: ignore[arg-type]


def picture(width: int, height: int, **changes: object) -> list[str]:
    return [line.plain for line in queue_screen(figures(**changes), width=width, height=height, foot="q quits")]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60), (50, 14), (20, 6), (1, 1)])
def test_it_fits_every_terminal(width: int, height: int) -> None:
    lines = picture(width, height)
    assert len(lines) <= height
    assert all(len(line) < max(width, 21) for line in lines)
    if height > 10:
        assert any("trainer-0" in line for line in lines)


def test_who_waits_for_what_and_since_when_comes_first() -> None:
    # when
    text = "\n".join(picture(80, 30))
    who = text[text.index("WHO") :]
    assert re.match(r"WHO +pid +loaded +since ", who)
    # then the one that waits is told first, in full, then those who hold rows, then who does neither
    order = [
        re.search(rf"^ . {name} ", who, re.M).start()
        for name in ("trainer-0", "rollout-1", "reward-0", "driver", "far-away")
    ]
    assert order == sorted(order)
    flat = " ".join(who.split())
    assert "1:01 waits: get train: step 12 lacks 96 of 256 rows, and the queue has 40" in flat
    assert "the oldest by reward-0 for 3.4 s" in flat
    assert "v11 12 s holds 64 rows of rollout in 2 leases" in flat
    assert "there:77" in flat
    assert "1 waiting, 3 leases, 5 clients" in flat


def test_rows_rates_and_bytes() -> None:
    text = [" ".join(line.split()) for line in picture(100, 40)]
    assert "624 rows live of 4,000 · 12,924 put, 0/s · 41.2 MB payload in 67.1 MB of memory, 100 kB/s" in text
    assert any(line.startswith("rollout 128 64 0 32 400 100 100") for line in text)
    assert any(
        line.startswith("step 12 of 300 ━") and "160 of 256 rows · version 11, 3 s old" in line for line in text
    )
    assert any(line.startswith("ended consumed 12,000 · filtered 300") for line in text)
    assert "3 messages were no requests" in [" ".join(line.split()) for line in picture(100, 40, garbage=3)]
    assert "stream ended" in picture(80, 24, over=True)[0]


def test_who_hears_of_lost_rows_while_it_works_does_not_wait() -> None:
    hears = ParkedStatus(session=3, name="rollout-1", verb="lost", why="none has ended", since_s=99.0, left_s=9.0)
    text = "\n".join(picture(100, 40, parked=(hears,), parked_count=1))
    assert "none has ended" not in text
    assert "0 waiting" in text
    assert "holds 64 rows" in text


def test_who_loads_its_model_is_not_idle() -> None:
    loads = SessionStatus(id=3, name="rollout-1", age_s=99.0, prepares="loading its model", prepares_s=61.0)
    (line,) = [line for line in picture(100, 40, sessions=(loads,), parked=()) if "rollout-1" in line]
    assert "1:01 " in line and "loading its model" in line and "idle" not in line


def test_staleness_is_told_apart_with_the_publish_lag() -> None:
    ages = StepAges(step=6, in_flight_mean=0.25, in_queue_mean=0.5, in_flight_max=1, in_queue_max=2)
    behind = SessionStatus(id=3, name="rollout-1", age_s=9.0, loaded=4, replica=True)
    lines = picture(120, 40, ages=ages, version=6, sessions=(behind,))
    (line,) = [line for line in lines if "staleness of step 6" in line]
    assert "0.25 in flight (at most 1) · 0.50 in the queue (at most 2) · publish lag 2" in line


def test_the_staleness_policy_is_named_where_there_is_room() -> None:
    rule = {"staleness": "drop", "max_staleness": 2}
    assert any("policy drop, max_staleness 2" in line for line in picture(110, 40, **rule))
    assert not any("policy drop" in line for line in picture(70, 40, **rule))


def test_those_who_wait_for_the_same_are_one_line_and_the_rest_is_counted() -> None:
    same = [
        ParkedStatus(
            session=10 + i, name=f"gen-{i}", verb="get rollout", why="none", since_s=9.0 - i / 10, left_s=9.0
        )
        for i in range(40)
    ]
    assert any("gen-0 +39" in line and "9 s" in line for line in picture(80, 24, parked=tuple(same), parked_count=40))
    other = [msgspec.structs.replace(p, why=f"none of {i}") for i, p in enumerate(same)]
    lines = picture(80, 24, parked=tuple(other), parked_count=40)
    assert any("of them waiting" in line for line in lines)


@pytest.mark.parametrize(
    ("in_parts", "text"),
    [(((12, 64),), " 160 of 256 rows · 64 delivered · "), (((11, 256), (12, 64)), "256 delivered of step 11")],
)
def test_a_step_in_parts_shows_its_delivered_rows(in_parts: tuple[tuple[int, int], ...], text: str) -> None:
    assert any(text in line for line in picture(100, 24, in_parts=in_parts))


def test_a_queue_without_anything_is_a_picture_too() -> None:
    bare = StatusReport(
        rows={}, ended={}, waiting={}, step=-1, free_slots=0, version=-1, live=0, capacity_rows=1 << 40
    )
    text = "\n".join(line.plain for line in queue_screen(QueueFigures(title="x", report=bare), width=80, height=24))
    assert "none is declared yet" in text
    assert "–" not in text.splitlines()[0]


def test_names_and_reasons_cannot_drive_the_terminal() -> None:
    evil = ParkedStatus(session=2, name="\x1b[2Jevil\n", verb="get x", why="\x1b]0;x\x07", since_s=9.0, left_s=9.0)
    text = "".join(picture(80, 24, parked=(evil,)))
    assert "evil" in text
    assert not set(text) & set("\x1b\x07\n\r")


def test_a_terminal_that_knows_ascii_only() -> None:
    lines = queue_screen(figures(), width=80, height=24, ascii_only=True)
    assert all(line.plain.isascii() for line in lines)


def test_rates_are_differences_and_begin_anew_with_another_server() -> None:
    window = RateWindow()
    first = window.add(report(10.0, 1000))
    assert math.isnan(first.put) and math.isnan(first.completed["reward"])
    second = window.add(report(12.0, 1500))
    assert second.completed["reward"] == second.arrived["train"] == second.ended == 250
    assert second.written_bytes == 250_000
    moved = [window.add(report(13.0 + number, 1500)) for number in range(20)]
    assert moved[-1].completed["reward"] == 0
    assert math.isnan(window.add(report(1.0, 5)).completed["reward"])


@pytest.mark.parametrize(
    ("value", "text"),
    [(math.nan, "–"), (0.0, "0"), (0.25, "0.2"), (12, "12"), (3400, "3,400"), (12_345, "12.3k"), (2e6, "2.0M")],
)
def test_rates_in_few_cells(value: float, text: str) -> None:
    assert rate(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e8, "250 MB"), (7.25e9, "7.2 GB"), (3e12, "3.0 TB")],
)
def test_bytes_as_people_read_them(value: float, text: str) -> None:
    assert size(value) == text


# ---- weights


def replica(number: int, name: str, loaded: "int | None", doing: str = "", for_s: float = 0.0) -> SessionStatus:
    return session(number, name, replica=True, loaded=loaded, weights=doing, weights_s=for_s)


VERSIONS = (
    VersionStatus(version=10, source=10, age_s=75.0, nbytes=988_000_000, root="ab12cd34ef56", transport="shm", on=1),
    VersionStatus(version=11, source=9, age_s=3.2, nbytes=988_000_000, root="0123456789ab", transport="shm", on=2, staged=1),
)  # fmt: skip
REPLICAS = (
    replica(11, "rollout-0", 11), replica(12, "rollout-1", 10, "fetching 11", 3.0), replica(13, "rollout-2", 11),
    replica(14, "rollout-3", 9, "failed 11: DigestMismatch: version 11: bucket 3 of chunk 2 differs", 40.0),
    replica(15, "rollout-4", None, "loading 11", 1.0),
)  # fmt: skip


def weights(width: int = 80, height: int = 40, **changes: object) -> list[str]:
    given = {
        "versions": VERSIONS,
        "sessions": REPLICAS,
        "publisher": "trainer-0",
        "announced": 12,
        "announced_s": 2.0,
    }
    lines = [" ".join(line.split()) for line in picture(width, height, **{**given, **changes})]
    start = next(i for i, line in enumerate(lines) if line.startswith("WEIGHTS"))
    return lines[start : lines.index("", start)]


def test_versions_that_are_kept_and_where_each_replica_is() -> None:
    lines = weights(committed=11)
    assert lines[:4] == [
        "WEIGHTS published by trainer-0, v12 being written for 2 s",
        "v11 = v9 3 s old · 988 MB · shm · loaded by 2, staged by 1 · committed",
        "v10 1:15 old · 988 MB · shm · loaded by 1",
        "● rollout-3 v9 2 behind 40 s failed 11: DigestMismatch: version 11:",
    ]
    assert "● rollout-1 v10 1 behind 3 s fetching 11" in lines
    assert "● rollout-4 none 1 s loading 11" in lines
    assert lines[-1] == "● 2 replicas v11: rollout-0, rollout-2"


def test_a_failure_is_told_to_its_end_where_there_is_room() -> None:
    assert "of chunk 2 differs" in " ".join(weights(80, 60))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (50, 30), (60, 16), (20, 40)])
def test_weights_fit_every_terminal(width: int, height: int) -> None:
    many = tuple(replica(20 + i, f"rollout-{i}", i, f"fetching {i}", 1.0) for i in range(60))
    lines = picture(width, height, versions=VERSIONS, sessions=many, session_count=60)
    assert len(lines) <= height
    assert all(len(line) < max(width, 21) for line in lines)
    assert any("WHO" in line for line in lines)


def test_many_replicas_are_counted() -> None:
    many = tuple(replica(20 + i, f"rollout-{i}", 10, "fetching 11", 1.0) for i in range(60))
    assert any(re.match(r"and \d+ more replicas not on version 11", line) for line in weights(sessions=many))


def test_a_run_without_weights_has_no_such_lines() -> None:
    assert not any("WEIGHTS" in line for line in picture(80, 40))


def test_names_of_weights_cannot_drive_the_terminal() -> None:
    evil = replica(3, "\x1b[2Jevil", 1, "failed 2: \x1b]0;x\x07", 1.0)
    text = "".join(picture(80, 40, sessions=(evil,), publisher="\x1b[31m", versions=VERSIONS))
    assert "evil" in text
    assert not set(text) & set("\x1b\x07")


def test_hearing_of_newer_weights_is_no_waiting() -> None:
    hears = ParkedStatus(session=11, name="rollout-0", verb="weights after 11", why="none", since_s=99.0, left_s=9.0)
    first = msgspec.structs.replace(hears, session=15, name="rollout-4")
    text = "\n".join(picture(80, 40, versions=VERSIONS, sessions=REPLICAS, parked=(hears, first), parked_count=2))
    who = text[text.index("WHO") :]
    assert "1 waiting" in who
    assert "rollout-4" in who.splitlines()[1]
    assert who.count("waits: weights") == 1


def test_homes_are_shown_with_bytes_and_losses_the_absent_first() -> None:
    homes = (
        HomeStatus(0, 0, "server", "served", payload_bytes=2_000),
        HomeStatus(1, 2, "node7-10.0.0.7", "served", "tcp://10.0.0.7:40001", "unit", payload_bytes=30_000_000, rows_failed=3),
        HomeStatus(2, 1, "node8-10.0.0.8", "absent", absent_s=12.0, payload_bytes=5_000_000),
        HomeStatus(3, 1, "node9-10.0.0.9", "lost", detail="silent for 60 s", rows_failed=64),
    )  # fmt: skip
    lines = picture(100, 40, homes=homes)
    start = next(number for number, line in enumerate(lines) if "PAYLOAD IN" in line)
    assert [line.split()[:5] for line in lines[start : start + 5]] == [
        ["PAYLOAD", "IN", "bytes", "4", "homes"],
        ["●", "node8-10.0.0.8", "5.0", "MB", "no"],
        ["●", "node9-10.0.0.9", "0", "B", "lost:"],
        ["●", "server", "2.0", "kB", "this"],
        ["●", "node7-10.0.0.7", "30.0", "MB", "tcp://10.0.0.7:40001"],
    ]
    assert "lost: silent for 60 s · 64 rows lost" in lines[start + 2]
    assert not any("PAYLOAD IN" in line for line in picture(100, 40))
