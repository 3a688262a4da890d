"""PageServer: the live page of a run over HTTP, read only, for browsers with its token.

    with PageServer(("127.0.0.1", 0), figures.json) as server:
        print(server.url)          # http://127.0.0.1:PORT/?token=...
        server.serve_forever()

The token of the URL becomes a cookie. Every other request without it is refused.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import socketserver
import sys
import threading
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib import resources
from typing import Any
from urllib.parse import parse_qs

from ...workflow.address import advertised
from .. import report

REQUEST_S = 60.0
"""A connection is cut after this long, also if it sends or reads slowly (seconds)."""
MOST_CONNECTIONS = 32
"""The oldest is cut for another: idle ones keep nobody out."""
FIGURES = "/figures.json"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class PageServer(socketserver.ThreadingTCPServer):
    """Listens at ``address``, a host and a port. ``figures`` returns the JSON of the page, in any thread."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], figures: Callable[[], bytes]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._open: deque[socket.socket] = deque()
        self._token = secrets.token_urlsafe(24)
        super().__init__(address, _PageHandler)
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        where = advertised(f"tcp://{host}:{self.server_address[1]}").removeprefix("tcp")
        self.url = f"http{where}/?token={self._token}"
        self.cookie = f"asyncflow-{self.server_address[1]}"  # cookies are shared by the ports of a host
        web = resources.files(__package__)
        style = resources.files(report).joinpath("page.css").read_bytes() + web.joinpath("live.css").read_bytes()
        self.content: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/": ("text/html; charset=utf-8", web.joinpath("page.html").read_bytes),
            "/page.js": ("text/javascript; charset=utf-8", web.joinpath("page.js").read_bytes),
            "/page.css": ("text/css; charset=utf-8", lambda: style),
            FIGURES: ("application/json", figures),
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
    """One request. Paths are looked up in a table; no file is opened by the name of a client."""

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
        elif path in self.server.content:
            kind, content = self.server.content[path]
            self._send(HTTPStatus.OK, kind, content())
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")

    def end_headers(self) -> None:
        """Add the headers of every answer, also of errors."""
        for name, value in _HEADERS.items():
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
