"""A reward service that misbehaves as it is told."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Judge:
    """A service that answers as a list of scripts says, in turn, and then with the lengths."""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.bodies: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.requests, self.poison = 0, [0]
        self.released = threading.Event()
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                judge.requests += 1

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                judge.bodies.append(body)
                judge.tokens.append(self.headers["Authorization"])
                judge.requests += 1
                answer = judge.script.pop(0) if judge.script else [float(len(row)) for row in body["response_ids"]]
                if judge.poison in body["response_ids"]:
                    answer = 500
                if answer == "hang":
                    judge.released.wait(60)
                    return
                if answer == "hang up":
                    self.connection.close()
                    return
                if callable(answer):
                    answer(self)
                    return
                if isinstance(answer, int):
                    self.send_error(answer)
                    return
                text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                """Keep quiet."""

        self.server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.released = self.released
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
