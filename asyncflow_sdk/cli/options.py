"""Options that commands share. They act when they are read, before the command does."""

from __future__ import annotations

from typing import Annotated

import typer


def _debug(ctx: typer.Context, value: bool) -> None:
    if value:
        ctx.meta["debug"] = True  # shared by a group and its commands


def _block(names: list[str] | None) -> None:
    if names:
        from ..plugins.choice import block_plugins

        block_plugins(names)


Debug = Annotated[bool, typer.Option("--debug", callback=_debug, is_eager=True, help="Show tracebacks.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="The run is served without keys.")]
NoPlugin = Annotated[
    list[str] | None,
    typer.Option(
        "--no-plugin", callback=_block, is_eager=True, metavar="NAME",
        help="Leave a plugin out, here and in workers; may be given often.",
    ),
]  # fmt: skip
