"""The report page: complete, self-contained, safe to open, and written from whatever a run left behind."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from synthetic_run import START_S, synthetic_run, synthetic_summary, write_run

from asyncflow_sdk import ConfigError, write_report
from asyncflow_sdk.types.events import (
    Evaluated,
    Event,
    Loaded,
    Note,
    Published,
    RowsEnded,
    Span,
    StepTrained,
    WorkerState,
)

VOID = {"meta", "img", "br", "link"}


class Page(HTMLParser):
    """What a browser would see: text by section, ids, and whether every tag was closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            if name == "id":
                self.ids[value or ""] += 1
            if name in ("src", "href", "xlink:href"):
                self.links.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)


def report(directory: Path, events: list[Event], summary: dict[str, object] | None, tail: bytes = b"") -> Page:
    path = write_report(write_run(directory, events, summary, tail))
    assert path == directory / "report.html"
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torn = b'{"event":"worker","time_s":5'
    return write_run(
        tmp_path_factory.mktemp("runs") / "demo", synthetic_run(restart_at=150), synthetic_summary(), torn
    )


@pytest.fixture(scope="module")
def page(whole: Path) -> Page:
    return Page(write_report(whole).read_text(encoding="utf-8"))


def test_every_picture_and_every_table_is_there(page: Page) -> None:
    for heading in (
        "Reward",
        "Staleness and publish lag",
        "Who did what: the whole run",
        "Who did what: 10 steps in the middle",
        "Where the time went",
        "Other metrics",
        "Rows",
        "Workers",
        "Summary",
        "What happened",
    ):
        assert heading in page.text
    assert "Response lengths" not in page.text, "this run has none"
    assert page.tags["svg"] == 6
    assert page.tags["table"] == 4
    assert page.open == []
    for words in ("mean of the last 20 steps", "oldest token of the step", "publish lag", "gradient norm", "failed"):
        assert words in page.text


def test_kinds_have_a_legend_and_colours_of_their_own(whole: Path, page: Page) -> None:
    gantt = next(svg for svg in svgs(whole) if "over the whole run" in svg)
    colours = re.findall(r'fill="(#[0-9a-f]{6}|var\(--idle\))"', gantt)
    assert {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "var(--idle)"} <= set(colours)
    for kind in ("generate", "train", "reward", "publish", "load", "wait"):
        assert re.search(rf">{kind}</text>", gantt)
    for worker in ("rollout-0", "train-0", "reward-0"):
        assert re.search(rf">{worker}</text>", gantt)


def test_the_zoom_names_the_versions_at_work(whole: Path) -> None:
    zoom = next(svg for svg in svgs(whole) if "during some steps" in svg)
    versions = [int(v) for v in re.findall(r">v(\d+)</text>", zoom)]
    assert len(versions) > 15
    assert 50 < min(versions) < max(versions) <= min(versions) + 12
    assert max(versions) < 150 or min(versions) > 150, "it is away from the restart"


def svgs(run_dir: Path) -> list[str]:
    return re.findall(r"<svg.*?</svg>", (run_dir / "report.html").read_text(encoding="utf-8"), re.DOTALL)


def test_pictures_are_well_formed_and_do_not_share_ids(whole: Path, page: Page) -> None:
    for svg in svgs(whole):
        root = ElementTree.fromstring(svg)
        assert root.get("viewBox")
        assert root.get("width") is None
    assert [name for name, count in page.ids.items() if count > 1] == []
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)


def test_nothing_is_fetched_and_nothing_runs(whole: Path, page: Page) -> None:
    html = (whole / "report.html").read_text(encoding="utf-8")
    assert all(link.startswith("#") for link in page.links)
    assert not page.tags["script"] + page.tags["link"] + page.tags["img"]
    assert "@import" not in html
    assert set(re.findall(r"https?://[^\s\"<]+", html)) <= {
        "http://www.w3.org/1999/xlink",
        "http://www.w3.org/2000/svg",
    }
    assert len(html) < 1_500_000


def test_the_figures_are_those_of_the_summary(page: Page) -> None:
    assert "300 of 300 steps in 4:11 · model runs/demo/model · seed 0" in page.text
    assert "0.871 from 0.104" in page.text
    assert "Balanced: 19,264 rows were put, and each ended in exactly one state." in page.text
    assert "consumed 18,600 96.6%" in page.text
    assert "filtered 600 3.1% no gradient (600)" in page.text
    assert "cancelled 64 0.3% over-supply at the end (64)" in page.text
    assert "rollout-0 stopped 1 9" in page.text, "one restart, busy more than 90%"
    assert "rollout-0 failed: killed by signal 9" in page.text
    assert "64 rows returned to rollout: rollout-0 died" in page.text


def test_a_torn_last_line_is_counted(page: Page) -> None:
    assert "1 line of events.jsonl could not be read" in page.text


def test_events_of_a_newer_sdk_are_skipped_and_counted_and_a_page_is_written_again_in_place(tmp_path: Path) -> None:
    newer = b'{"event":"teleported","time_s":1}\n\xff\xfe\n[]\n\n'
    newer += b'{"event":"note","time_s":1,"text":"of tomorrow","level":"warning","more":1}\n'
    page = report(tmp_path, [], None, newer)
    assert "3 left out" in page.text
    assert "of tomorrow" in page.text
    first = (tmp_path / "report.html").read_bytes()
    assert write_report(tmp_path).read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "report.html"]


def test_a_step_whose_loss_became_nan_is_kept(tmp_path: Path) -> None:
    # given: JSON has no NaN, msgspec writes null
    events = synthetic_run(5, None)
    at = next(i for i, e in enumerate(events) if isinstance(e, StepTrained) and e.step == 2)
    step = events[at]
    assert isinstance(step, StepTrained)
    events[at] = msgspec.structs.replace(step, metrics={**step.metrics, "loss": float("nan")})

    page = report(tmp_path / "run", events, None)

    assert "0 left out" in page.text
    assert "Steps 5 trained" in page.text
    assert "loss" in page.text


def test_a_run_that_was_killed(tmp_path: Path) -> None:
    page = report(tmp_path / "run", synthetic_run(30, None)[:300], None, b'{"eve')
    assert "There is no summary.json: the run is still going on, or was killed." in page.text
    assert "Balance unknown" in page.text
    assert "consumed" in page.text
    assert page.tags["svg"] == 6


def test_a_summary_that_cannot_be_read(tmp_path: Path) -> None:
    write_run(tmp_path, [])
    (tmp_path / "summary.json").write_text('{"status": "comp')
    assert "summary.json could not be read" in Page(write_report(tmp_path).read_text()).text


def test_a_failed_run_says_why_and_that_rows_are_missing(tmp_path: Path) -> None:
    summary: dict[str, object] = {
        "status": "failed",
        "error": "worker train-0 failed\nValueError: nan",
        "steps": 12,
        "steps_wanted": None,
        "reward_first": None,
        "rows": {"consumed": 90, "failed": 4},
        "rows_put": 100,
        "balanced": False,
    }
    page = report(tmp_path / "run", [], summary)
    assert "ValueError: nan" in page.text
    assert "NOT BALANCED: 100 rows were put, 94 ended; 6 never ended." in page.text


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_of_hardly_any_steps(tmp_path: Path, steps: int) -> None:
    page = report(tmp_path / "run", synthetic_run(steps, None) if steps else [], None)
    assert ("No step was trained." in page.text) == (steps == 0)
    assert ("Who did what: one step" in page.text) == (steps == 2)


def test_names_and_messages_are_text_never_markup(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>$x_1$ & 工人'
    events = [
        msgspec.structs.replace(e, worker=evil) if e.worker == "train-0" else e for e in synthetic_run(30, None)
    ]
    events.append(Span(time_s=START_S + 3, worker="w", kind="<i>odd</i>", seconds=5))
    events.append(Note(time_s=START_S + 4, text="</style><script>2</script>", level="error", worker="<b>"))
    events.append(WorkerState(time_s=START_S + 4, worker="x", state="failed", detail="<img src=x onerror=y>"))

    page = report(tmp_path / "a<b>c", events, {"status": "<u>", "model": "<img src=x>", "error": "</p>", "rows": {}})

    assert [tag for tag in ("script", "img", "u") if page.tags[tag]] == []
    assert page.open == []
    assert evil in page.text
    assert "<i>odd</i>" in page.text
    assert "a<b>c" in page.text
    assert "<img src=x onerror=y>" in page.text


def test_many_workers_stay_legible_and_small(tmp_path: Path) -> None:
    one = synthetic_run(10, None)
    events = list(one)
    for i in range(1, 33):
        events += [msgspec.structs.replace(e, worker=f"rollout-{i}") for e in one if e.worker == "rollout-0"]
    page = report(tmp_path / "run", events, None)
    assert (tmp_path / "run" / "report.html").stat().st_size < 1_500_000
    assert page.text.index("rollout-2 ") < page.text.index("rollout-10 ")


def moved(events: list[Event], by_s: float) -> list[Event]:
    return [msgspec.structs.replace(event, time_s=event.time_s + by_s) for event in events]


STRANGE: dict[str, Callable[[], list[Event]]] = {
    "an earlier run's step trained again, later": lambda: [
        *synthetic_run(3, None), *moved(synthetic_run(1, None), 47.0)
    ],
    "a clock that went back": lambda: [*moved(synthetic_run(2, None), 9_000.0), *(
        msgspec.structs.replace(e, step=e.step + 2) if isinstance(e, StepTrained) else e for e in synthetic_run(9, None)
    )],
    "all steps at once": lambda: [
        StepTrained(time_s=START_S, worker="t", step=k, version=k, metrics={f"m{k % 40}": 1.0}) for k in range(9_000)
    ],
    "many workers with many kinds of work": lambda: [
        *synthetic_run(2, None),
        *(Span(time_s=START_S + k % 7, worker=f"w-{k % 900}", kind=f"k{k % 1_300}", seconds=0.1 + k) for k in range(4_000)),
    ],
    "one step of a great deal of work": lambda: [
        *synthetic_run(2, None),
        *(Span(time_s=START_S + 2 + k / 4_000, worker="w", kind=("load", "train")[k % 2], seconds=1 / 4_000) for k in range(9_000)),
    ],
    "a worker that only fails": lambda: [
        *synthetic_run(9, None),
        *(WorkerState(time_s=START_S + k / 2_000, worker="rollout-0", state="failed") for k in range(20_000)),
    ],
    "more evaluations than pixels": lambda: [
        *synthetic_run(9, None),
        *(Evaluated(time_s=START_S + k, version=k, score=k % 3, rows=1) for k in range(20_000)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("events", STRANGE.values(), ids=STRANGE)
def test_a_picture_has_no_more_than_a_reader_sees_however_strange_the_record(
    tmp_path: Path, events: Callable[[], list[Event]]
) -> None:
    report(tmp_path / "run", events(), None)
    for picture in re.findall(r"<svg.*?</svg>", (tmp_path / "run" / "report.html").read_text(), re.DOTALL):
        drawn = Counter(re.findall(r"<(use|path|text)|[xy]tick_\d+\"", picture))
        assert drawn[""] <= 100, "ticks, of twelve small charts or of 64 lanes"
        assert sum(drawn.values()) < 2_000


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no events\.jsonl: give the directory of a run"):
        write_report(tmp_path)


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", [])
    (run_dir / "report.html").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be written to .*report\.html"):
        write_report(run_dir)


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", [])
    program = (
        "import sys, pathlib; sys.modules['matplotlib'] = None\n"
        "from asyncflow_sdk.cli.report.page import write_report\n"
        "write_report(pathlib.Path(sys.argv[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(run_dir)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("asyncflow_sdk.errors.PluginError: the report page needs matplotlib")
    assert last.endswith("pip install 'asyncflow-sdk[report]'")
    assert not (run_dir / "report.html").exists()


def test_lengths_generated_and_trained_are_compared(tmp_path: Path) -> None:
    # given a run that trained the short half of what it generated
    short, long = {16: 400}, {64: 400}  # of 4 and of 256 tokens
    events: list[Event] = [
        RowsEnded(time_s=1.0, state="consumed", count=400, lengths=short, tokens=1600, squares=6400),
        RowsEnded(
            time_s=2.0, state="expired", count=400, reason="too old", lengths=long, tokens=102400, squares=400 << 16
        ),
    ]
    summary = synthetic_summary() | {
        "staleness": {
            "total": {"mean": 0.5, "max": 2},
            "in_flight": {"mean": 0.4, "max": 2},
            "in_queue": {"mean": 0.1, "max": 1},
        }
    }
    run = write_run(tmp_path / "run", [*synthetic_run(12, None), *events], summary)

    html = write_report(run).read_text()
    page = Page(html)

    (generated,) = re.findall(r"<tr>\s*<td[^>]*>generated</td>(.*?)</tr>", html, re.DOTALL)
    assert generated.count('class="n"') == 5, "all numbers are aligned"
    assert (
        "what is trained is shorter than what is generated: 4.0 tokens a response against 130.0, ratio 0.03"
        in page.text
    )
    assert "most of the others ended expired (too old)" in page.text
    assert "trained / generated 0.03" in page.text
    assert "generated: mean 130" in page.text  # the picture's legend
    assert "mean 0.40 in flight, 0.10 in queue" in page.text
    assert "in the queue: mean 0.1, max 1" in page.text


def test_a_worker_counts_as_busy_once_however_many_things_it_does(tmp_path: Path) -> None:
    # given 24 workers with spans that overlap, touch and nest, in a run of 20 s
    rng = random.Random(0)
    events: list[Event] = [Span(time_s=0, worker="always", kind="train", seconds=20)]
    busy = {"always": 100}
    for number in range(24):
        worker, covered = f"w{number}", set()
        for _ in range(rng.randint(1, 12)):
            start, end = sorted(rng.sample(range(161), 2))
            kind = rng.choice(["generate", "load", "wait", "odd"])
            events.append(Span(time_s=start / 8, worker=worker, kind=kind, seconds=(end - start) / 8))
            covered |= set(range(start, end)) if kind != "wait" else set()
        busy[worker] = 100 * len(covered) / 160
    events.append(Note(time_s=20, text="the end"))

    page = report(tmp_path, events, None)

    told = {name: int(share) for name, share in re.findall(r"(w\d+|always) – 0 (\d+)%", page.text)}
    assert told.keys() == busy.keys()
    assert all(abs(told[name] - share) <= 0.51 for name, share in busy.items()), (told, busy)


def test_work_goes_before_waiting_and_a_lane_is_never_counted_twice(tmp_path: Path) -> None:
    spans = [("wait", 0, 10), ("generate", 2, 4), ("generate", 3, 6), ("generate", 6, 8), ("load", 7, 9)]
    events: list[Event] = [Span(time_s=a, worker="w", kind=kind, seconds=b - a) for kind, a, b in spans]

    report(tmp_path, [*events, Note(time_s=10, text="the end")], None)

    (shares,) = (svg for svg in svgs(tmp_path) if "Share of time" in svg)
    assert re.findall(r">(\d+)%</text>", shares) == ["60", "10", "30"]  # generate, load, wait


def test_lag_rises_when_a_version_is_published_and_falls_when_the_slowest_loads_it(tmp_path: Path) -> None:
    report(
        tmp_path,
        [
            Loaded(time_s=0, worker="a", version=0, lag=0),
            Loaded(time_s=0, worker="b", version=0, lag=0),
            Published(time_s=1, version=1, nbytes=0, root=""),
            Loaded(time_s=2, worker="a", version=1, lag=0),
            Published(time_s=3, version=2, nbytes=0, root=""),
            WorkerState(time_s=4, worker="b", state="failed"),
            Loaded(time_s=5, worker="a", version=2, lag=0),
            Note(time_s=10, text="the end"),
        ],
        None,
    )

    (picture,) = (svg for svg in svgs(tmp_path) if "publish lag over time" in svg)
    (line,) = re.findall(r'<path d="([^"]*)"[^>]*stroke-width="0\.9"', picture)
    corners = [tuple(map(float, point)) for point in re.findall(r"[ML] (\S+) (\S+)", line)]
    (left, bottom), (right, _), top = corners[0], corners[-1], min(y for _, y in corners)
    drawn = [(round((x - left) / (right - left) * 10), round((bottom - y) / (bottom - top) * 2)) for x, y in corners]
    rises = [(0, 0), (1, 0), (1, 1), (3, 1), (3, 2), (4, 2), (4, 1), (5, 1), (5, 0), (10, 0)]
    assert [corner for i, corner in enumerate(drawn) if corner not in drawn[:i]] == rises


def test_the_scores_of_evaluations_are_a_curve_with_the_last_version_on_it(tmp_path: Path) -> None:
    steps = [StepTrained(time_s=n, step=n, version=n, metrics={"reward": 0.5}) for n in range(4)]
    scored = [Evaluated(time_s=n, version=n, score=score, rows=8) for n, score in ((2, 0.0), (3, 1.0), (4, 0.5))]
    report(tmp_path, [*steps, *scored], None)

    (picture,) = (svg for svg in svgs(tmp_path) if "Reward over steps" in svg)
    line, _ = re.findall(
        r'<path d="([^"]*)"[^>]*stroke="#d55e00" stroke-width="1\.1"', picture
    )  # and its sample in the legend
    (low, bottom), (middle, top), (last, half) = [
        tuple(map(float, point)) for point in re.findall(r"[ML] (\S+) (\S+)", line)
    ]
    assert middle - low == pytest.approx(last - middle, abs=0.1)
    assert half == pytest.approx((bottom + top) / 2, abs=0.1)
    assert last < max(float(x) for x in re.findall(r"[ML] (\S+) \S+", picture)), "inside of the axes"


@pytest.mark.parametrize(
    ("summary", "text"),
    [
        ({"rows": {"consumed": 9}, "rows_put": 9, "balanced": True}, "Balanced: 9 rows were put, and each ended"),
        (
            {"rows": {"consumed": 7}, "rows_live": 2, "rows_put": 9, "balanced": True},
            "Balanced: 9 rows were put; 7 ended in exactly one state each, and 2 were still live",
        ),
        (
            {"rows": {"consumed": 7}, "rows_put": 9, "balanced": True},
            "NOT BALANCED: 9 rows were put, 7 ended; 2 never",
        ),
        (
            {"rows": {"consumed": 7}, "rows_live": 3, "rows_put": 9, "balanced": False},
            "NOT BALANCED: 9 rows were put, 7 ended, 3 were still live; 1 more ended than were put",
        ),
        (
            {"rows": {"consumed": 9}, "rows_put": 9, "balanced": False},
            "the totals agree, but the ledger's audit does not",
        ),
        ({}, "Balance unknown"),
    ],
)
def test_balance_is_said_plainly_and_believed_only_if_it_adds_up(
    tmp_path: Path, summary: dict[str, object], text: str
) -> None:
    assert text in report(tmp_path, [], summary).text
