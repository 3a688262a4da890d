"""What tests of engines do to them from outside: calls to their server go through a gate, versions are cut short, and their processes
are watched.

with HttpGate(server.url, lose={"/update"}) as gate:      # forwards all calls, and loses the answers of some
    engine = attached(model, url=gate.url)
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import threading
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from waiting import until

from asyncflow_sdk.interfaces.weights import FilePlace


class HttpGate(http.server.ThreadingHTTPServer):
    """``change``: by path, what becomes of the body of an answer. ``lose``: paths whose answers never come. ``hold``: paths of which
    nothing is forwarded before the gate is closed. ``seen``: each path, and its answer."""

    daemon_threads = True

    def __init__(
        self, url: str, *, change: Mapping[str, Callable[[bytes], bytes]] = {}, lose: Collection[str] = (),
        hold: Collection[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(("127.0.0.1", 0), _Forward)
        self.url, self.target = f"http://127.0.0.1:{self.server_port}", urllib.parse.urlsplit(url).netloc
        self.change, self.lose, self.hold, self.over = dict(change), set(lose), set(hold), threading.Event()
        self.seen: list[tuple[str, bytes]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that hung up."""


class _Forward(http.server.BaseHTTPRequestHandler):
    server: HttpGate
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        gate, body = self.server, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        if path in gate.hold:
            gate.over.wait(600)
        headers = {name: self.headers[name] for name in ("Authorization", "Content-Type") if name in self.headers}
        target = http.client.HTTPConnection(gate.target, timeout=600)
        target.request(self.command, self.path, body, headers)
        answer = target.getresponse()
        raw = gate.change.get(path, bytes)(answer.read())
        target.close()
        gate.seen.append((path, raw))
        if path in gate.lose:
            self.close_connection = True
            return
        self.send_response(answer.status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


def cut_short(update: Any, name: str, path: Path) -> Any:
    """An update whose tensor ``name`` seems to lie in a file, which is too short: whoever reads it there fails in the middle."""
    path.write_bytes(b"short")
    update.place = lambda each: FilePlace(str(path), 0) if each == name else None
    return update


def title(pid: int) -> str:
    """The command of a process; "" of one that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def below(pid: int) -> set[int]:
    """The processes that one has started, and those that they have, but for the helper that Python keeps as long as it runs."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found |= {child} | below(child)
    return {each for each in found if "resource_tracker" not in title(each)}


def with_mark(mark: str) -> dict[int, str]:
    """Processes that have it in their environment, wherever they hang, and their commands."""
    found = {}
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found[pid] = title(pid)
    return found


def wait_gone(pids: Iterable[int]) -> None:
    """Until all have ended; one that was not waited for counts as ended."""
    until(lambda: not any(title(pid) for pid in pids), f"the end of {list(pids)}")
