"""What tests of engines do to them from outside: calls to their server go through a gate, and versions are cut short.

with HttpGate(server.url) as gate:         # forwards all calls
    engine = attached(model, url=gate.url)
    gate.lose.add("/update")               # and loses the answers of some
"""

from __future__ import annotations

import http.client
import http.server
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncflow_sdk.interfaces.weights import FilePlace


class HttpGate(http.server.ThreadingHTTPServer):
    """``change``: by path, what becomes of the body of an answer. ``lose``: paths whose answers never come.
    ``hold``: paths of which nothing is forwarded before the gate is closed. ``seen``: each path, and its answer."""

    daemon_threads = True

    def __init__(self, url: str, *, change: Mapping[str, Callable[[bytes], bytes]] = {}) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.url, self.target = f"http://127.0.0.1:{self.server_port}", urllib.parse.urlsplit(url).netloc
        self.change, self.lose, self.hold, self.over = change, set[str](), set[str](), threading.Event()
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
