"""``asyncflow web``: serve the live page of a run, and print its URL."""

from __future__ import annotations

import contextlib
from pathlib import Path

from rich.console import Console

from ..errors import ConfigError
from .signals import stop_as_interrupt
from .web.live_figures import LiveFigures
from .web.page_server import PageServer


def serve_page(where: str, address: str, console: Console, key: Path | None, insecure: bool) -> None:
    """Serve until Ctrl-C. ``address``: HOST:PORT. Raises ConfigError, and the errors of ``connect``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--address is HOST:PORT, for example 127.0.0.1:8080, not {address!r}")
    with contextlib.closing(LiveFigures(where, key, insecure)) as figures:
        try:
            server = PageServer((host.strip("[]"), int(port)), figures.json)
        except OSError as error:
            raise ConfigError(f"no page can be served at {address}: {error.strerror or error}") from None
        figures.json()  # reads all past events before anybody waits for them
        with server, stop_as_interrupt():
            console.print(server.url, markup=False, highlight=False, soft_wrap=True)
            server.serve_forever()
