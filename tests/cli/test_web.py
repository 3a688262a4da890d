"""``asyncflow web``: the page of a run, its figures, and requests of those who may not see it."""

from __future__ import annotations

import http.client
import json
import re
import select
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from children import Child, warm_python
from held_rows import serve_held_rows
from synthetic_run import START_S, synthetic_run, write_run
from waiting import until

from asyncflow_sdk.cli.web.live_figures import LiveFigures
from asyncflow_sdk.cli.web.page_server import FIGURES, MOST_CONNECTIONS, PageServer
from asyncflow_sdk.types import Batch, pack
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.workflow.events.step_files import step_path, write_batch

HOSTILE = "</dd><script>document.title='stolen'</script><img src=x onerror=\"document.title='stolen'\">"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an ended run, with markup wherever a run has texts."""
    run = synthetic_run(steps=60)
    run += [
        ev.Note(time_s=START_S + 1, worker=HOSTILE, text=HOSTILE, level="warning"),
        ev.WorkerState(time_s=START_S + 1, worker=HOSTILE, state="failed", detail=HOSTILE),
    ]
    directory = write_run(
        tmp_path_factory.mktemp("ended") / "run",
        run,
        {"status": "failed", "error": HOSTILE, "steps": 60, "steps_wanted": 300},
    )
    (directory / "steps").mkdir()
    columns = {
        "prompt": [HOSTILE, "2 + 2 ="],
        "response": [HOSTILE, " 4"],
        "reward": np.array([0.0, 1.0], np.float32),
    }
    packed = {name: pack(name, values) for name, values in columns.items()}
    write_batch(step_path(directory, 59), Batch(np.arange(2), np.arange(2), packed))
    return directory


@pytest.fixture(scope="module")
def page(ended: Path) -> Iterator[PageServer]:
    figures = LiveFigures(str(ended))
    with PageServer(("127.0.0.1", 0), figures.json) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(url: str, path: str, cookie: str = "", method: str = "GET") -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=250)
    connection.putrequest(method, path, skip_accept_encoding=True)
    if cookie:
        connection.putheader("Cookie", cookie)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.msg, body


def cookie_of(url: str) -> str:
    status, headers, _ = ask(url, f"/?{urlsplit(url).query}")
    assert (status, headers["Location"]) == (303, "/")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(headers["Set-Cookie"].split("; "))
    return headers["Set-Cookie"].split(";")[0]


def figures_at(url: str) -> Any:
    status, headers, body = ask(url, FIGURES, cookie_of(url))
    assert (status, headers["Content-Type"]) == (200, "application/json")
    return json.loads(body)


def test_the_figures_of_an_ended_run(page: PageServer) -> None:
    found = figures_at(page.url)

    assert (found["title"], found["status"], found["queue"]) == ("run", "failed", None)
    assert (found["run"]["done"], found["run"]["total_steps"]) == (60, 300)
    steps, rewards = found["curves"]["reward"]
    assert steps == list(range(60))
    assert rewards == [
        event.metrics["reward"] for event in synthetic_run(steps=60) if isinstance(event, ev.StepTrained)
    ]
    lanes = {worker["name"]: worker["lane"] for worker in found["workers"]}
    assert {bar[2] for bar in lanes["rollout-0"]} == {"generate", "load"}
    assert all(60 >= start >= end >= 0 for start, end, _, _ in lanes["train-0"])
    assert found["samples"]["step"] == 59
    assert [row["prompt"] for row in found["samples"]["rows"]] == [HOSTILE, "2 + 2 ="]
    assert found["notes"][0][2].startswith("failed")


@pytest.mark.parametrize(
    ("path", "cookie"),
    [
        ("/", ""), ("/page.js", ""), (FIGURES, ""), (f"{FIGURES}?token={{token}}", ""), ("/?token=wrong", ""),
        ("/?token=", ""), ("/?" + "&".join(f"a{i}=" for i in range(20)) + "&token={token}", ""),
        (FIGURES, "{name}=wrong"), (FIGURES, "{name}="), (FIGURES, "other={token}"), (FIGURES, "{name}=é"),
    ],
)  # fmt: skip
def test_without_the_token_nothing_is_shown(page: PageServer, path: str, cookie: str) -> None:
    fill = {"token": urlsplit(page.url).query.removeprefix("token="), "name": page.cookie}

    status, headers, body = ask(page.url, path.format(**fill), cookie.format(**fill))

    assert status == 403
    assert b"asyncflow web" in body
    assert "Set-Cookie" not in headers


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/../../etc/passwd", 404), ("GET", "/%2e%2e/page.html", 404), ("GET", "/page.js/", 404),
        ("GET", "/live_figures.py", 404), ("GET", "/" + "x" * 70_000, 414), ("POST", FIGURES, 501), ("PUT", "/", 501),
        ("DELETE", FIGURES, 501), ("GET", FIGURES, 200), ("GET", "/", 200), ("GET", "/page.js", 200),
        ("GET", "/page.css", 200),
    ],
)  # fmt: skip
def test_only_four_things_can_be_read_and_every_answer_has_its_headers(
    page: PageServer, method: str, path: str, status: int
) -> None:
    found, headers, body = ask(page.url, path, cookie_of(page.url), method)

    assert found == status
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    assert b"root:" not in body
    if path == "/":
        assert b"<script>" not in body
        assert b"http" not in body, "nothing comes from elsewhere"


def test_connections_that_send_nothing_keep_nobody_out_and_no_thread(page: PageServer) -> None:
    cookie, before = cookie_of(page.url), threading.active_count()
    idle = [socket.create_connection(page.server_address[:2]) for _ in range(MOST_CONNECTIONS)]

    assert ask(page.url, FIGURES, cookie)[0] == 200
    idle += [socket.create_connection(page.server_address[:2]) for _ in range(MOST_CONNECTIONS)]
    until(
        lambda: sum(bool(select.select([each], [], [], 0)[0]) for each in idle) >= MOST_CONNECTIONS, "the oldest cut"
    )
    until(lambda: threading.active_count() - before <= 2 * MOST_CONNECTIONS, "the end of their threads")
    for each in idle:
        each.close()


def test_markup_of_a_run_stays_text_in_a_browser(page: PageServer, tmp_path: Path) -> None:
    """The page runs in a real browser; `make test-web` installs one."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/browser",
        "--virtual-time-budget=5000", "--dump-dom", page.url,
    ]  # fmt: skip

    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)

    dom = done.stdout
    assert re.search(r"<title>60/300 · run</title>", dom), done.stderr
    assert dom.count("&lt;script&gt;") >= 5, "in samples, names, notes and the error"
    assert len(re.findall(r"<script", dom)) == 1, "the page's own"
    assert "<img" not in dom


@pytest.mark.starts("asyncflow web")
def test_a_running_queue_until_it_and_the_page_end(tmp_path: Path) -> None:
    with Child(serve_held_rows, str(tmp_path / "run")) as child:
        assert child.hear() == 2
        command = [warm_python(), "-m", "asyncflow_sdk.cli", "web", str(tmp_path / "run")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            found = figures_at(url)

            assert found["status"] == "running"
            assert found["queue"]["rows"]["work"]["leased"] == 2
            (driver,) = found["workers"]
            assert (driver["name"], driver["now"]) == ("driver", "holds 2 rows of work")

            child.say("end")
            assert child.wait() == 0
            until(lambda: figures_at(url)["queue"] is None, "the end of the queue")
            process.send_signal(signal.SIGINT)
            assert process.wait(250) == 130


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere"], "neither an address"),
        ([".", "--address", "localhost"], "--address is HOST:PORT"),
        ([".", "--address", "127.0.0.1:99999"], "--address is HOST:PORT"),
        (["."], "is not being served"),
    ],
)
def test_what_cannot_be_shown_is_an_error(tmp_path: Path, arguments: list[str], error: str) -> None:
    command = [warm_python(), "-m", "asyncflow_sdk.cli", "web", *arguments]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)

    assert done.returncode == 2
    assert error in done.stderr
    assert "Traceback" not in done.stderr
