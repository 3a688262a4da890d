"""``asyncflow top``: what it says of a queue, how it fits a terminal, and that it works against a real server."""

import fcntl
import json
import math
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from children import Child, hear, say
from warm_python import warm_python

import asyncflow_sdk as af
from asyncflow_sdk.cli.flow import Flow
from asyncflow_sdk.cli.lines import rate, size
from asyncflow_sdk.cli.queue_frame import queue_frame
from asyncflow_sdk.ledger import StatusReport
from asyncflow_sdk.ledger.commands import LeaseStatus, ParkedStatus, SessionStatus, StepAges, VersionStatus

WHY = (
    "task 'train' has nothing to give; step 12 lacks 96 of 256 rows, and the queue has 40 that may fill it; 40 rows"
    " lack column 'reward', which task 'reward' gives; 64 rows are leased in task 'reward', the oldest by reward-0 for"
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
        came={"rollout": passed + 500, "reward": passed + 100, "train": passed}, passed={"rollout": passed, "reward": passed, "train": passed},
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


def flow() -> Flow:
    gauge = Flow()
    for second in range(4):
        gauge.add(report(96.0 + second, 12_000 - 400 + 100 * second))
    gauge.add(report())
    return gauge


def picture(width: int, height: int, **changes: object) -> list[str]:
    made = queue_frame(report(**changes), flow(), title="runs/x", width=width, height=height, foot="q quits")  # type: ignore[arg-type]
    return [line.plain for line in made]


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


def test_a_queue_without_anything_is_a_picture_too() -> None:
    bare = StatusReport(
        rows={}, ended={}, waiting={}, step=-1, free_slots=0, version=-1, live=0, capacity_rows=1 << 40
    )
    text = "\n".join(line.plain for line in queue_frame(bare, Flow(), title="x", width=80, height=24))
    assert "none is declared yet" in text
    assert "–" not in text.splitlines()[0]


def test_names_and_reasons_cannot_drive_the_terminal() -> None:
    evil = ParkedStatus(session=2, name="\x1b[2Jevil\n", verb="get x", why="\x1b]0;x\x07", since_s=9.0, left_s=9.0)
    text = "".join(picture(80, 24, parked=(evil,)))
    assert "evil" in text
    assert not set(text) & set("\x1b\x07\n\r")


def test_a_terminal_that_knows_ascii_only() -> None:
    lines = queue_frame(report(), flow(), title="runs/x", width=80, height=24, ascii_only=True)
    assert all(line.plain.isascii() for line in lines)


def test_rates_are_differences_and_begin_anew_with_another_server() -> None:
    gauge = Flow()
    assert math.isnan(gauge.put)
    gauge.add(report(10.0, 1000))
    assert math.isnan(gauge.passed["reward"])
    gauge.add(report(12.0, 1500))
    assert gauge.passed["reward"] == gauge.came["train"] == gauge.ended == 250
    assert gauge.written == 250_000
    for second in range(20):  # the window moves on
        gauge.add(report(13.0 + second, 1500))
    assert gauge.passed["reward"] == 0
    gauge.add(report(1.0, 5))
    assert math.isnan(gauge.passed["reward"])


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
    assert any(re.match(r"and \d+ more replicas that are not on version 11", line) for line in weights(sessions=many))


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


# ---- against a real server


def serve(directory: str) -> None:
    """Serve rows that somebody holds, until told to end."""
    with af.serve(directory, name="driver") as run:
        run.queue.declare("work", needs=["x"])
        run.queue.put({"x": [1.0, 2.0, 3.0]})
        held = run.queue.get("work", 2)
        say(held.rows)
        hear()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Child]:
    with Child(serve, str(tmp_path / "run")) as child:
        assert child.hear() == 2
        yield child
        child.say("end")
        assert child.wait() == 0


def top(tmp_path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [warm_python(), "-m", "asyncflow_sdk.cli", "top", *arguments]
    return subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "COLUMNS": "100"}, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip


def test_once_by_the_runs_directory(tmp_path: Path, served: Child) -> None:
    done = top(tmp_path, "run", "--once", "--every", "0.1")
    assert done.returncode == 0, done.stderr
    flat = " ".join(done.stdout.split())
    assert "3 rows live of 100,000 · 3 put" in flat
    assert f"● driver {served.pid} " in flat
    assert "holds 2 rows of work" in flat
    assert "1 lease, 1 client" in flat  # who only looks is not counted


def test_json_for_programs_by_address(tmp_path: Path, served: Child) -> None:
    address = (tmp_path / "run" / "address").read_text().split()[0]
    done = top(tmp_path, address, "--json", "--every", "0.1")
    said = json.loads(done.stdout)
    assert said["address"] == address
    assert said["rows"]["work"] == {"waiting": 0, "ready": 1, "selected": 0, "leased": 2, "done": 0}
    assert said["oldest"]["name"] == said["sessions"][0]["name"] == "driver"
    assert said["per_second"]["passed"] == {"work": 0.0}
    assert said["step"] == -1


def test_versions_and_replicas_of_a_real_run(tmp_path: Path) -> None:
    with af.serve(tmp_path / "run", name="driver") as run, run.weight_publisher("shm") as publisher:
        with af.connect(tmp_path / "run", name="replica") as there:
            updates = iter(there.weight_updates(timeout_s=60))
            publisher.publish(1, {"w": np.ones(1000, np.float32)}.items())
            with next(updates) as update:
                dict(update.arrays())
            publisher.publish(2, {"w": np.zeros(1000, np.float32)}.items())
            publisher.flush()
            publisher.rollback(1, "it was better")
            # when
            said = json.loads(top(tmp_path, "run", "--json", "--every", "0.1").stdout)
            shown = " ".join(top(tmp_path, "run", "--once", "--every", "0.1").stdout.split())
    # then
    assert [(v["version"], v["source"], v["transport"]) for v in said["versions"]] == [(2, 2, "shm"), (3, 1, "shm")]
    assert said["publisher"] == "driver"
    assert said["announced"] == -1
    (there_said,) = (s for s in said["sessions"] if s["replica"])
    assert (there_said["name"], there_said["loaded"]) == ("replica", 1)
    assert "replica" not in said["waiting"]  # it hears of newer ones while it works
    assert "WEIGHTS published by driver v3 = v1" in shown
    assert re.search(r"● replica v1 2 behind .*(fetching|staged|waits to load|loading) 3", shown)


def test_a_server_with_keys_asks_for_one(tmp_path: Path) -> None:
    with af.serve(tmp_path / "run", address="tcp://127.0.0.1:0", key=tmp_path / "run" / "server.key") as run:
        address = next(a for a in (tmp_path / "run" / "address").read_text().split() if a.startswith("tcp"))
        run.queue.declare("work", needs=["x"])
        with_key = top(tmp_path, address, "--once", "--every", "0.1", "--key", "run/run.key")
        assert with_key.returncode == 0, with_key.stderr
        assert "work" in with_key.stdout
        found = top(tmp_path, address, "--once", "--every", "0.1")
        assert found.returncode == 0, found.stderr
        without = top(tmp_path, address, "--once", "--every", "0.1", "--insecure")
        assert without.returncode == 2
        assert "key" in without.stderr
        assert "Traceback" not in without.stderr


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("nowhere", "neither an address"),
        (".", "is not being served"),
        ("ipc:///no/such/socket", "nobody listens at ipc:///no/such/socket"),
        ("tcp://127.0.0.1:1", "nobody listens at tcp://127.0.0.1:1"),
        ("tcp://127.0.0.1", "is no address"),
        ("udp://127.0.0.1:5", "is no address"),
    ],
)
def test_where_nothing_is_served(tmp_path: Path, where: str, error: str) -> None:
    done = top(tmp_path, where)
    assert done.returncode == 2
    assert error in done.stderr
    assert "Traceback" not in done.stderr


class Terminal:
    """A terminal with ``asyncflow top`` in it."""

    def __init__(self, directory: Path) -> None:
        self.pid, self._fd = pty.fork()
        if not self.pid:
            os.environ["TERM"] = "xterm-256color"
            os.environ.pop("COLUMNS", None)
            os.chdir(directory)
            os.execv(sys.executable, [sys.executable, "-m", "asyncflow_sdk.cli", "top", "run", "--every", "0.2"])
        self.shown = ""

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, key: bytes) -> None:
        os.write(self._fd, key)

    def read(self, text: str) -> None:
        """Until it has shown ``text``, or ended."""
        end = time.monotonic() + 100  # only ends a test that would hang
        while text not in self.shown:
            assert time.monotonic() < end, self.shown[-3000:]
            if select.select([self._fd], [], [], 1.0)[0]:
                try:
                    self.shown += os.read(self._fd, 65536).decode(errors="replace")
                except OSError:
                    assert text in self.shown, self.shown[-3000:]

    def end(self) -> int:
        """Its exit code."""
        with open(self._fd, "rb", buffering=0) as rest:
            try:
                while data := rest.read(65536):
                    self.shown += data.decode(errors="replace")
            except OSError:  # the other side is closed
                pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_live_in_a_terminal_that_changes_its_size(tmp_path: Path, served: Child) -> None:
    terminal = Terminal(tmp_path)
    terminal.read("holds 2 rows of work")
    terminal.resize(120, 40)
    terminal.shown = ""
    terminal.read("holds 2 rows of work")
    terminal.press(b"q")
    assert terminal.end() == 0
    assert "\x1b[?1049l" in terminal.shown  # the terminal is as it was
    assert "\x1b[?25h" in terminal.shown


def test_ctrl_c_gives_the_terminal_back(tmp_path: Path, served: Child) -> None:
    terminal = Terminal(tmp_path)
    terminal.read("holds 2 rows of work")
    os.kill(terminal.pid, signal.SIGINT)
    assert terminal.end() == 130
    assert "\x1b[?25h" in terminal.shown


def test_a_run_that_ends_while_one_looks(tmp_path: Path) -> None:
    with Child(serve, str(tmp_path / "run")) as child:
        assert child.hear() == 2
        terminal = Terminal(tmp_path)
        terminal.read("holds 2 rows of work")
        child.say("end")
        assert terminal.end() == 0
    assert "run has ended" in terminal.shown
