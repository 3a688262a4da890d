"""Options shared by commands. ``--debug`` and ``--no-plugin`` take effect when they are parsed,
before the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from ..errors import ConfigError


def _debug(ctx: typer.Context, value: bool) -> None:
    if value:
        ctx.meta["debug"] = True  # shared by a group and its commands


def _block(names: list[str] | None) -> None:
    if names:
        from ..plugins.discovery import block_plugins

        block_plugins(names)


Debug = Annotated[bool, typer.Option("--debug", callback=_debug, is_eager=True, help="Show tracebacks.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Connect without keys, to a run served without keys.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Key = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="A copy of the run's run.key.", metavar="FILE")
]
NoPlugin = Annotated[
    list[str] | None,
    typer.Option(
        "--no-plugin", callback=_block, is_eager=True, metavar="NAME",
        help="Ignore a plugin, here and in workers. Repeatable.",
    ),
]  # fmt: skip
Queue = Annotated[str, typer.Argument(metavar="ADDRESS", help="Address of a running queue, or its run's directory.")]
RunDir = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a run.")]
MaybeText = str | None
Texts = list[str] | None


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a text of a run as it is: nothing in it is markup, and no line is wrapped."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def option(text: str, metavar: str = "", *names: str, **more: Any) -> Any:
    """Return an option with help text. ``names``: if it is not called like its parameter."""
    return typer.Option(*names, help=text, metavar=metavar or None, **more)


def repeatable(text: str, metavar: str, *names: str, **more: Any) -> Any:
    """Return a text option for several values."""
    return option(f"{text} Repeatable.", metavar, *names, **more)


MaxStaleness = Annotated[
    int, option("Maximum staleness of a trained token, in versions; 0: train synchronously.", min=0)
]
Policy = Annotated[str, option("Policy for slow rows: wait, drop, count, or another installed policy.")]
Changes = Annotated[Texts, repeatable("Change a value, for example train.learning_rate=1e-5.", "KEY=VALUE", "--set")]


def one_name_each(param: typer.CallbackParam, given: list[str] | None) -> list[str] | None:
    """Raise BadParameter for several names in one value, "a,b": each has an option of its own."""
    for each in given or ():
        if "," in each:
            apart = " ".join(f"{param.opts[0]} {name.strip()}" for name in each.split(","))
            raise typer.BadParameter(f"{each!r} is several names: give {apart}")
    return given


def named_options(given: list[str] | None, flag: str = "--set") -> dict[str, Any]:
    """Parse NAME=VALUE options. Raises ConfigError."""
    for each in given or ():
        name, equals, _ = each.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"{flag} takes NAME=VALUE, for example learning_rate=1e-6, not {each!r}")
    return changed_values(given)


def changed_values(given: list[str] | None) -> dict[str, Any]:
    """Parse KEY=VALUE options; a key may be dotted. A value is JSON if it parses as JSON, else text. Raises
    ConfigError."""
    values: dict[str, Any] = {}
    for name, value in changed_texts(given).items():
        try:
            values[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            values[name] = value
    return values


def changed_texts(given: list[str] | None) -> dict[str, str]:
    """Split KEY=VALUE options. Raises ConfigError."""
    pairs = {each: each.partition("=") for each in given or ()}
    for each, (name, equals, _) in pairs.items():
        if not equals or not name.strip():
            raise ConfigError(f"--set takes KEY=VALUE, for example train.learning_rate=1e-5, not {each!r}")
    return {name.strip(): value.strip() for name, _, value in pairs.values()}
