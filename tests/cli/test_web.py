"""``asyncflow web``: the page of a run, and requests of those who may not see it."""

from __future__ import annotations

import base64
import hashlib
import http.client
import re
import select
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from children import Child, warm_python
from held_rows import serve_held_rows
from synthetic_run import START_S, synthetic_run, write_run
from waiting import until

from asyncflow_sdk.cli.report.page_server import MOST_CONNECTIONS, LivePage, PageServer
from asyncflow_sdk.cli.report.run_record import read_record
from asyncflow_sdk.types import Batch, pack
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.workflow.loops.record_files import EVENTS, step_path, write_batch

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
    with PageServer(("127.0.0.1", 0), LivePage(str(ended)).html) as server:
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


def page_at(url: str) -> str:
    status, headers, body = ask(url, "/", cookie_of(url))
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    return body.decode()


def test_the_page_of_an_ended_run(page: PageServer) -> None:
    found = page_at(page.url)

    assert "<title>60/300 · run · AsyncFlow run</title>" in found
    assert '<span class="pill bad">failed</span>' in found
    assert "Samples of step 59" in found and "<dd>2 + 2 =</dd>" in found
    for picture in ("reward", "staleness", "whole", "zoom", "shares", "metrics"):
        assert f'id="{picture}-figure_1"' in found
    log = found[found.index("What happened") :]
    assert log.index("failed: ") < log.index("warning: "), "the newest first"
    assert "The queue now" not in found and "the last minute" not in found


@pytest.mark.parametrize(
    ("path", "cookie"),
    [
        ("/", ""), ("/page.css?token={token}", ""), ("/?token=wrong", ""),
        ("/?token=", ""), ("/?" + "&".join(f"a{i}=" for i in range(20)) + "&token={token}", ""),
        ("/", "{name}=wrong"), ("/", "{name}="), ("/", "other={token}"), ("/", "{name}=é"),
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
        ("GET", "/../../etc/passwd", 404), ("GET", "/%2e%2e/page.css", 404), ("GET", "/page.css", 404),
        ("GET", "/page_server.py", 404), ("GET", "/" + "x" * 70_000, 414), ("POST", "/", 501), ("PUT", "/", 501),
        ("DELETE", "/", 501), ("GET", "/", 200),
    ],
)  # fmt: skip
def test_only_the_page_can_be_read_and_every_answer_has_its_headers(
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
    if found == 200:
        links = set(re.findall(rb"https?://[^\s\"<]+", body))
        assert links <= {b"http://www.w3.org/1999/xlink", b"http://www.w3.org/2000/svg"}, (
            "nothing comes from elsewhere"
        )
        for tag in (b"style", b"script"):  # the policy allows these texts only
            (text,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
            assert f"{tag.decode()}-src 'sha256-{digest}'" in headers["Content-Security-Policy"]
        assert b' style="' not in body


def test_connections_that_send_nothing_keep_nobody_out_and_no_thread(page: PageServer) -> None:
    cookie, before = cookie_of(page.url), threading.active_count()
    idle = [socket.create_connection(page.server_address[:2]) for _ in range(MOST_CONNECTIONS)]

    assert ask(page.url, "/", cookie)[0] == 200
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
    assert re.search(r"<title>60/300 · run · AsyncFlow run</title>", dom), done.stderr
    assert dom.count("&lt;script&gt;") >= 5, "in samples, names, notes and the error"
    assert len(re.findall(r"<script", dom)) == 1, "the page's own"
    assert "<img" not in dom


def test_the_last_page_is_sent_while_another_is_drawn(ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, draws, drawn = LivePage(str(ended)), threading.Event(), threading.Event()
    first = page.html()

    def _draw(*_: object, **__: object) -> str:
        draws.set()
        assert drawn.wait(250)
        return "another"

    monkeypatch.setattr(page, "_draw", _draw)
    monkeypatch.setattr(page, "_due_s", 0.0)
    monkeypatch.setattr(page, "_drawn", None)
    thread = threading.Thread(target=page.html)
    thread.start()
    assert draws.wait(250)
    assert page.html() == first
    drawn.set()
    thread.join()
    assert page.html() == b"another"


def test_the_line_that_a_running_run_writes_is_not_torn(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", synthetic_run(steps=2), None)
    with (directory / EVENTS).open("a") as file:
        file.write('{"event":"sp')
    assert read_record(directory, 2).remarks == []
    assert read_record(directory).skipped == 1


@pytest.mark.starts("asyncflow web")
def test_a_running_queue_until_it_and_the_page_end(tmp_path: Path) -> None:
    with Child(serve_held_rows, str(tmp_path / "run")) as child:
        assert child.hear() == 2
        command = [warm_python(), "-m", "asyncflow_sdk.cli", "web", str(tmp_path / "run")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            found = page_at(url)

            assert '<span class="pill good">running</span>' in found
            assert re.search(r"● driver .* holds 2 rows of work", found)

            child.say("end")
            assert child.wait() == 0
            until(lambda: "The queue now" not in page_at(url), "the end of the queue")
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
