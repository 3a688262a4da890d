"""``asyncflow web``: the report page of a run over HTTP, drawn anew while it runs, read only, for browsers with its token.

    with PageServer(("127.0.0.1", 0), LivePage("runs/demo").html) as server:
        print(server.url)          # http://127.0.0.1:PORT/?token=...
        server.serve_forever()

The token of the URL becomes a cookie. Every other request without it is refused.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from rich.console import Console

from ...errors import AsyncFlowError, ConfigError
from ...types.defaults import CALL_S
from ...workflow.loops.record_files import EVENTS
from ...workflow.run_directory import advertised
from ..figures import QueueFigures
from ..options import say
from ..signals import stop_as_interrupt
from ..top import QueueMonitor
from .page import page_policy, render_page
from .run_record import RunRecord, read_record

FRESH_S = 1.0
"""A page younger than this is sent again (seconds)."""
SHARE = 0.2
"""The greatest share of the time spent on drawing the page."""
RECONNECT_S = 0.2
REQUEST_S = 60.0
"""A connection is cut after this long, also if it sends or reads slowly (seconds)."""
MOST_CONNECTIONS = 32
"""The oldest is cut for another: idle ones keep nobody out."""


def serve_page(where: str, address: str, console: Console, key: Path | None, insecure: bool) -> None:
    """Serve the page of a run until Ctrl-C, and print its URL. ``address``: HOST:PORT. Raises ConfigError,
    PluginError, and the errors of ``connect``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--address is HOST:PORT, for example 127.0.0.1:8080, not {address!r}")
    with contextlib.closing(LivePage(where, key, insecure)) as page:
        try:
            server = PageServer((host.strip("[]"), int(port)), page.html)
        except OSError as error:
            raise ConfigError(f"no page can be served at {address}: {error.strerror or error}") from None
        page.html()  # reads all past events before anybody waits for them
        with server, stop_as_interrupt():
            say(console, server.url)
            server.serve_forever()


class LivePage:
    """The page of the run at ``where``, an address or a directory. ``key``, ``insecure``: options of ``connect``.
    Raises the errors of ``connect``, unless the directory holds the events of an ended run. Thread-safe."""

    def __init__(self, where: str, key: Path | None = None, insecure: bool = False) -> None:
        self._where, self._options = where, (FRESH_S, key, insecure)
        self._directory = None if "://" in where else Path(where)
        self._lock = threading.Lock()
        self._html, self._due_s = b"", -math.inf
        self._drawn: tuple[int, ...] | None = None  # the state of an ended run's files when its page was drawn
        self._monitor: QueueMonitor | None = None
        try:
            self._monitor = QueueMonitor(where, *self._options, CALL_S)
        except AsyncFlowError:
            if not self._files():
                raise

    def close(self) -> None:
        """Disconnect from the run."""
        with self._lock:
            self._disconnect()

    def html(self) -> bytes:
        """Return the page. Blocks for at most one call to the queue and one drawing, and not while another thread draws;
        a slow page is drawn less often."""
        if not self._lock.acquire(blocking=not self._html):
            return self._html
        try:
            began_s = time.monotonic()
            if began_s >= self._due_s:
                queue, files = self._read_queue(), self._files()
                if queue is not None or files != self._drawn:
                    self._html = self._draw(queue, recorded=bool(files)).encode()
                self._drawn = files if queue is None else None
                now_s = time.monotonic()
                self._due_s = now_s + max(FRESH_S, (now_s - began_s) / SHARE)
            return self._html
        finally:
            self._lock.release()

    def _files(self) -> tuple[int, ...]:
        """Return a state that changes with the files of the run; () without recorded events."""
        if self._directory is None or not (events := self._directory / EVENTS).is_file():
            return ()
        return events.stat().st_size, self._directory.stat().st_mtime_ns

    def _draw(self, queue: QueueFigures | None, recorded: bool) -> str:
        steps = None if queue is None else queue.report.steps or 0
        if self._directory is not None and recorded:
            return render_page(read_record(self._directory, steps), queue, live=True)
        return render_page(RunRecord(self._where, steps or 0), queue, live=True)

    def _read_queue(self) -> QueueFigures | None:
        """Return the figures of the queue; None without a server. Finds the next server of a resumed run."""
        try:
            self._monitor = self._monitor or QueueMonitor(self._where, *self._options, RECONNECT_S)
            return self._monitor.sample()
        except AsyncFlowError:
            self._disconnect()
            return None

    def _disconnect(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
        self._monitor = None


class PageServer(socketserver.ThreadingTCPServer):
    """Listens at ``address``, a host and a port. ``html`` returns the page, in any thread."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], html: Callable[[], bytes]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._open: deque[socket.socket] = deque()
        self._token = secrets.token_urlsafe(24)
        super().__init__(address, _PageHandler)
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        where = advertised(f"tcp://{host}:{self.server_address[1]}").removeprefix("tcp")
        self.url = f"http{where}/?token={self._token}"
        self.cookie = f"asyncflow-{self.server_address[1]}"  # cookies are shared by the ports of a host
        self.html = html
        self.headers = {
            "Content-Security-Policy": page_policy(),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }

    def admits(self, token: str) -> bool:
        """Return True for the token, in constant time."""
        return secrets.compare_digest(token.encode(), self._token.encode())

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread, and cut the oldest if there are too many."""
        self._open.append(request)
        if len(self._open) > MOST_CONNECTIONS:
            _cut(self._open.popleft())
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a connection, and cut it when its time is over."""
        end = threading.Timer(REQUEST_S, _cut, (request,))
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            with contextlib.suppress(ValueError):  # it was cut
                self._open.remove(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error of this program. A client that left is none."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _PageHandler(BaseHTTPRequestHandler):
    """One request. There is one page; no file is opened by the name of a client."""

    server: PageServer
    server_version, sys_version = "asyncflow", ""
    timeout = 10.0

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path == "/" and self.server.admits(_given_token(query)):
            cookie = f"{self.server.cookie}={_given_token(query)}; HttpOnly; SameSite=Strict; Path=/"
            self._send(HTTPStatus.SEE_OTHER, "text/plain", b"", Location="/", Set_Cookie=cookie)
        elif not any(self.server.admits(value) for value in self._cookies()):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"Open the whole URL that `asyncflow web` printed.\n")
        elif path == "/":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.html())
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")

    def end_headers(self) -> None:
        """Add the headers of every answer, also of errors."""
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: requests have the token in their URL."""

    def _cookies(self) -> list[str]:
        pairs = (part.strip().partition("=") for part in self.headers.get("Cookie", "").split(";"))
        return [value for name, _, value in pairs if name == self.server.cookie]

    def _send(self, status: HTTPStatus, kind: str, content: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)


def _cut(connection: socket.socket) -> None:
    """End a connection. Its thread wakes, and closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _given_token(query: str) -> str:
    try:
        return parse_qs(query, max_num_fields=8).get("token", [""])[0]
    except ValueError:
        return ""
