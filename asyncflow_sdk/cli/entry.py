"""The console script ``asyncflow``."""

from __future__ import annotations

from .signals import exit_on_interrupt


def main() -> None:
    """Run the command. Ctrl-C prints one line and exits with status 130, also during imports."""
    exit_on_interrupt()
    from .app import main as run_app

    run_app()
