"""The command ``asyncflow``.

Errors of the SDK end it with one red line and exit code 2, Ctrl-C with 130; ``--debug`` adds the traceback.
Only what a command needs is imported, when it runs: ``asyncflow --help`` loads no engine and draws nothing.
"""

from __future__ import annotations

import gc
import importlib
import time
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from ..errors import AsyncFlowError, ConfigError, Interrupted, PluginError, WorkerFailed
from .new_plugin import new_plugin
from .options import Debug as _Debug
from .options import Insecure as _Insecure
from .options import NoPlugin as _NoPlugin
from .starting import let_go
from .working import worker

_INSTALL_TORCH = "pip install 'asyncflow-sdk[torch]'"
_HELP = """Post-train language models by reinforcement learning: any inference engine and any training engine,
running at the same time.

\b
Typical uses:
  asyncflow demo               train a small model here, and watch it live
  asyncflow run FILE.toml      run a workflow; --print only shows it
  asyncflow serve runs/NAME    serve a run that workers join by hand
  asyncflow top runs/NAME      see who waits for what in a running queue
  asyncflow plugins            see which engines are installed, or missing
  asyncflow new-plugin NAME    write an engine package, ready to be filled
  asyncflow doctor FILE.toml   see what its interpreters and this machine lack
  asyncflow check NAME         hold an engine to its interface, check by check
  asyncflow report runs/NAME   write the report page of a run again
"""


class _Group(TyperGroup):
    """Commands whose errors are for people."""

    def invoke(self, ctx: Any) -> Any:
        let_go()
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, Interrupted) as stop:
            return _end(ctx, stop, f"interrupted: {stop}" if str(stop) else "interrupted", 130)
        except AsyncFlowError as error:
            return _end(ctx, error, f"error: {_words(error)}", 2)


def _end(ctx: Any, error: BaseException, text: str, code: int) -> NoReturn:
    if ctx.meta.get("debug"):
        traceback.print_exception(error)
    Console(stderr=True).print(Text(text, style="red"), soft_wrap=True)
    raise typer.Exit(code)


def _words(error: BaseException) -> str:
    """The message of an error; of a worker's traceback only the last line."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, WorkerFailed):
        lines = text.splitlines()
        return lines[0] if len(lines) == 1 else f"{lines[0]}: {lines[-1].strip()}"
    return text


def _version(value: bool) -> None:
    if value:
        from .._version import __version__

        typer.echo(f"asyncflow-sdk {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="asyncflow",
    cls=_Group,
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    no_plugin: _NoPlugin = None,
    debug: _Debug = False,
) -> None:
    del version, no_plugin, debug


@app.command()
def demo(
    out: Annotated[
        Path | None, typer.Option(help="New directory for the run.", show_default="runs/demo-<timestamp>")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to train.")] = 300,
    seed: Annotated[int, typer.Option(help="Of the data, the warm-up and the sampling.")] = 0,
    max_staleness: Annotated[
        int, typer.Option(min=0, help="Versions a trained token may be old; 0 trains synchronously.")
    ] = 1,
    staleness_policy: Annotated[
        str, typer.Option(help="What becomes of rows that take long: wait, drop, count, or another installed policy.")
    ] = "wait",
    model: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Hugging Face folder to start from; skips the warm-up.", metavar="PATH"
        ),
    ] = None,
    rollout: Annotated[
        str,
        typer.Option(help="The engine that generates. Each version it loads is proven by a probe.", metavar="NAME"),
    ] = "transformers",
    python: Annotated[
        str | None, typer.Option(help="The interpreter that has this engine; without it this one.", metavar="PATH")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Of this engine, such as max_rows=64.", metavar="NAME=VALUE")
    ] = None,
    train: Annotated[str, typer.Option(help="The engine that trains.", metavar="NAME")] = "torch",
    world_size: Annotated[int, typer.Option(min=1, help="Processes that train together, its ranks.")] = 1,
    train_python: Annotated[
        str | None, typer.Option(help="The interpreter that has this engine; without it this one.", metavar="PATH")
    ] = None,
    train_option: Annotated[
        list[str] | None, typer.Option(help="Of this engine, such as stage=3.", metavar="NAME=VALUE")
    ] = None,
    algorithm: Annotated[
        str, typer.Option(help="What it trains by: grpo, dr_grpo, dapo, gspo, cispo, ppo, ...", metavar="NAME")
    ] = "grpo",
    algorithm_option: Annotated[
        list[str] | None, typer.Option(help='Of it, such as off_policy={"weight": "mask"}.', metavar="NAME=VALUE")
    ] = None,
    no_plugin: _NoPlugin = None,
    debug: _Debug = False,
) -> None:
    """Train a small model on this machine, live, and write a report."""
    del no_plugin, debug
    out = out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} exists and is not empty: name a new directory, so that no run is overwritten")
    try:
        module = importlib.import_module("asyncflow_torch.demo.run")
    except ImportError as error:
        raise PluginError(
            f"the demo cannot be loaded: {error}. It trains with torch and transformers;"
            f" install them with: {_INSTALL_TORCH}"
        ) from error
    from .working import named_options

    options = named_options(option, "--option")
    train_options = named_options(train_option, "--train-option")
    by = (algorithm, named_options(algorithm_option, "--algorithm-option"))
    raise typer.Exit(
        module.run_demo(
            out, steps, seed, max_staleness, model, Console(), staleness_policy, rollout, python, options,
            train, world_size, train_python, train_options, by,
        )
    )  # fmt: skip


@app.command()
def run(
    file: Annotated[Path, typer.Argument(dir_okay=False, metavar="FILE.toml", help="The workflow.")],
    out: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="New directory for the run.", show_default="runs/<file>-<timestamp>"),
    ] = None,
    only_print: Annotated[
        bool, typer.Option("--print", help="Show the resolved workflow, and start nothing.")
    ] = False,
    as_mermaid: Annotated[
        bool, typer.Option("--mermaid", help="Print its dataflow as Mermaid, and start nothing.")
    ] = False,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another value, such as train.lr=1e-5; may be given often."),
    ] = None,
    no_plugin: _NoPlugin = None,
    debug: _Debug = False,
) -> None:
    """Run the workflow of a TOML file, live, and write a report."""
    del no_plugin, debug
    from .running import run_file

    shown = "mermaid" if as_mermaid else "text" if only_print else ""
    run_file(file, out, changes or [], shown, Console())


@app.command()
def serve(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Of the run; made if it is not there.")],
    address: Annotated[
        str, typer.Option(help="Where others come in; tcp://0.0.0.0:7000 for other hosts.")
    ] = "tcp://127.0.0.1:0",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without keys: all who reach the address may read and change the run.")
    ] = False,
    prompts: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Feed these records.", metavar="FILE.jsonl")
    ] = None,
    column: Annotated[str, typer.Option(help="That holds the prompts.")] = "prompt",
    group_size: Annotated[int, typer.Option(min=1, help="Responses to a prompt.")] = 8,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Then the stream ends; without it, after --steps.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the order of the prompts.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="The last step; without it, until the stream ends.")
    ] = None,
    max_staleness: Annotated[int, typer.Option(min=0, help="Versions a trained token may be old.")] = 1,
    staleness_policy: Annotated[str, typer.Option(help="Of rows that take long: wait, drop, count, ....")] = "wait",
    capacity_rows: Annotated[int, typer.Option(min=1, help="Rows that may be alive at once.")] = 100_000,
    durability: Annotated[str | None, typer.Option(help="'process' or 'host': survives its kill.")] = None,
    tracker: Annotated[
        list[str] | None, typer.Option(help="Tracks the run; may be given often.", metavar="NAME")
    ] = None,
    no_plugin: _NoPlugin = None,
    debug: _Debug = False,
) -> None:
    """Serve a run that workers join by hand, and say how. Ctrl-C ends it."""
    del no_plugin, debug
    from .serving import serve_run

    feed: dict[str, Any] | None = None
    if prompts is not None:
        feed = {"prompts": prompts, "group_size": group_size, "column": column, "epochs": epochs, "seed": seed}
    serve_run(
        directory, address, Console(), feed, insecure=insecure, steps=steps, max_staleness=max_staleness, staleness_policy=staleness_policy,
        capacity_rows=capacity_rows, durability=durability, trackers=tracker or [],
    )  # fmt: skip


app.add_typer(worker, name="worker")
app.command("new-plugin")(new_plugin)


@app.command()
def top(
    where: Annotated[str, typer.Argument(metavar="ADDRESS", help="Of a running queue, or the directory of its run.")],
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and end, for programs.")] = False,
    key: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A copy of the run's run.key.", metavar="FILE")
    ] = None,
    insecure: _Insecure = False,
    every: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds between two looks.")] = 1.0,
    debug: _Debug = False,
) -> None:
    """Show who waits for what in a running queue, live. Keys: q quits."""
    del debug
    from .top import Top

    console = Console()
    with Top(where, every, key, insecure) as watch:
        if as_json:
            typer.echo(watch.json(watch.once()))
        elif once or not console.is_terminal or console.is_dumb_terminal:
            console.print(watch.draw(watch.once(), console), soft_wrap=True)
        elif watch.live(console):
            console.print(f"{where} has ended", markup=False)


@app.command()
def evict(
    where: Annotated[str, typer.Argument(metavar="ADDRESS", help="Of a running queue, or the directory of its run.")],
    session: Annotated[int, typer.Argument(min=1, help="Its number, as `asyncflow top --json` lists it.")],
    reason: Annotated[str, typer.Option(help="For people.")] = "its host is gone",
    key: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A copy of the run's run.key.", metavar="FILE")
    ] = None,
    insecure: _Insecure = False,
    debug: _Debug = False,
) -> None:
    """Say that a client's host is gone: what it held goes back, and another may take its place. Others are seen to end."""
    del debug
    from ..workflow import connect

    with connect(where, key=key, insecure=insecure, name="evict") as run:
        run.evict(session, reason)
    typer.echo(f"session {session} is evicted")


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a run with checkpoints.")],
    no_plugin: _NoPlugin = None,
    debug: _Debug = False,
) -> None:
    """Go on with a run that was killed, failed or was interrupted, from its newest checkpoint, live, and write a report."""
    del no_plugin, debug
    from .running import resume_run

    resume_run(run_dir, Console())


@app.command()
def replay(
    run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a run with a journal.")],
    no_plugin: _NoPlugin = None,
    debug: _Debug = False,
) -> None:
    """Carry out again, offline, what a run's journal says, and print what happened. Exit code 1 if it differs."""
    del no_plugin, debug
    from ..queue.replay import replay as carry_out

    found = carry_out(run_dir, on_milestone=lambda milestone: typer.echo(str(milestone)))
    typer.echo(f"{found.records} records replayed, {found.differing} with other answers; state {found.digest}")
    raise typer.Exit(1 if found.differing or not found.audit.balanced else 0)


@app.command()
def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    no_plugin: _NoPlugin = None,
    debug: _Debug = False,
) -> None:
    """List the adapters found and what they lack. Exit code 1 if there are problems."""
    del no_plugin, debug
    from .listing import Listing

    listing = Listing.of_this_environment()
    if as_json:
        typer.echo(listing.json())
    else:
        listing.print(Console())
    raise typer.Exit(1 if listing.problems else 0)


@app.command()
def check(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="An adapter, or module:attribute; without it every one installed."),
    ] = None,
    kind: Annotated[str, typer.Option(help="rollout, train, transport, ..., where a name has several.")] = "",
    tier: Annotated[str, typer.Option(help="basic, full or chaos: it, and those before it.")] = "full",
    only: Annotated[list[str] | None, typer.Option(help="This check; may be given often.", metavar="CHECK")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Hugging Face folder to check with; without it a small one is made.", metavar="PATH"),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Of another kind of model: whose answers are right.", metavar="MODULE:NAME")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="Of the engine, such as threads=1.", metavar="NAME=VALUE")
    ] = None,
    expect: Annotated[
        list[str] | None, typer.Option(help="A check that fails, and why; it must.", metavar="CHECK=REASON")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the model's weights; without it as they are stored.", metavar="NAME")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="How far log-probs may be apart, nats; without it what suits the dtype.", metavar="NATS"),
    ] = None,
    limit: Annotated[float, typer.Option(min=0.1, help="Seconds that a check may take.")] = 100.0,
    seed: Annotated[
        int | None, typer.Option(help="Of checks that try steps by chance; without it always the same.")
    ] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Processes that together are one train engine.")] = 1,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop after the first failure.")] = False,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the results there.", metavar="PATH")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Show all checks, and ask none.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="With --list: as a table of Markdown.")] = False,
    no_plugin: _NoPlugin = None,
    debug: _Debug = False,
) -> None:
    """Hold an engine to its interface, check by check, and say what a failure means. Exit code 1 if one fails."""
    del no_plugin, debug
    from .check import Asked, show_checks
    from .check import check as carry_out
    from .working import named_options

    if show:
        show_checks(Console(), markdown=markdown)
        return
    options = named_options(option, "--option")
    asked = Asked(
        kind,
        tier,
        only or (),
        model,
        policy,
        options,
        expect or (),
        limit,
        seed,
        tolerance,
        dtype,
        world_size,
        fail_fast,
    )
    raise typer.Exit(0 if carry_out(name, asked, Console(), json) else 1)


@app.command()
def doctor(
    what: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PATH]...", help="Workflows (FILE.toml), whose interpreters are looked into; runs and keys."
        ),
    ] = None,
    python: Annotated[
        list[str] | None, typer.Option(help="An interpreter of workers; say it again for each.", metavar="PATH")
    ] = None,
    address: Annotated[
        list[str] | None, typer.Option(help="Where a run is to be served, as tcp://0.0.0.0:7000.", metavar="ADDRESS")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    no_plugin: _NoPlugin = None,
    debug: _Debug = False,
) -> None:
    """Say what is installed where, and what will not work. Exit code 1 if something will not."""
    del no_plugin, debug
    from .doctor import examine

    examination = examine(what or [], python or [], address or [])
    if as_json:
        typer.echo(examination.json())
    else:
        examination.print(Console())
    raise typer.Exit(0 if examination.fine else 1)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a run.")],
    debug: _Debug = False,
) -> None:
    """Write the report page of a run again, and print its path."""
    del debug
    from .report import write_report

    typer.echo(str(write_report(run_dir)))


def main() -> None:
    """Entry point of the command."""
    try:
        app(prog_name="asyncflow")
    finally:
        gc.freeze()  # the interpreter's last collection would look through all of torch and matplotlib, for up to a second
