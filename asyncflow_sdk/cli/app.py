"""The commands of ``asyncflow``.

An SDK error ends a command with one red line and exit code 2, Ctrl-C with 130; ``--debug`` adds the
traceback. Each command imports its own modules when it runs: ``asyncflow --help`` loads no engine.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import threading
import time
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console, Group
from rich.text import Text
from typer.core import TyperGroup

from ..errors import AsyncFlowError, ConfigError, Interrupted, PluginError, WorkerFailed
from ..types.config import LOCAL, Store
from ..types.defaults import CALL_S, CAPACITY_ROWS, CHECK_S, GROUP_SIZE, HOME_SILENCE_S, MAX_STALENESS
from .new_plugin import new_plugin
from .options import (
    Changes,
    Debug,
    Insecure,
    Json,
    Key,
    MaxStaleness,
    MaybeText,
    NoPlugin,
    Policy,
    Queue,
    RunDir,
    Texts,
    changed_texts,
    changed_values,
    named_options,
    one_name_each,
    option,
    repeatable,
    say,
)
from .signals import raise_on_interrupt, stop_as_interrupt
from .worker_command import worker

_INSTALL_TORCH = "pip install 'asyncflow-sdk[torch]'"
_HELP = """Post-train language models by reinforcement learning: any inference engine and any training engine,
running at the same time.

\b
Typical uses:
  asyncflow demo               train a small model here, and watch it live
  asyncflow run FILE.toml      run a workflow; --print only shows it
  asyncflow serve runs/NAME    serve a run for workers started by hand
  asyncflow top runs/NAME      show a running queue live
  asyncflow web runs/NAME      serve a live page of a run
  asyncflow plugins            list installed and missing adapters
  asyncflow new-plugin NAME    write a new plugin package
  asyncflow doctor FILE.toml   check interpreters and machine before a run
  asyncflow check NAME         run the conformance kit on an adapter
  asyncflow report runs/NAME   write the report page of a run again
  asyncflow export runs/NAME FOLDER    write a model folder of a run
  asyncflow trace runs/NAME    write its trace, for ui.perfetto.dev
"""


class ErrorGroup(TyperGroup):
    """A command group; an error of a command becomes one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        raise_on_interrupt()
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, Interrupted) as stop:
            return _fail(ctx, stop, f"interrupted: {stop}" if str(stop) else "interrupted", 130)
        except AsyncFlowError as error:
            return _fail(ctx, error, f"error: {_message(error)}", 2)


def _fail(ctx: Any, error: BaseException, text: str, code: int) -> NoReturn:
    if ctx.meta.get("debug"):
        traceback.print_exception(error)
    Console(stderr=True).print(Text(text, style="red"), soft_wrap=True)
    raise typer.Exit(code)


def _message(error: BaseException) -> str:
    """Return the message of an error; of a worker's, only the first line, without the traceback."""
    text = str(error).strip() or type(error).__name__
    return text.partition("\n")[0] if isinstance(error, WorkerFailed) else text


def _version(value: bool) -> None:
    if value:
        from .._version import __version__

        typer.echo(f"asyncflow-sdk {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="asyncflow",
    cls=ErrorGroup,
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    no_plugin: NoPlugin = None,
    debug: Debug = False,
) -> None:
    logging.getLogger("asyncflow").addHandler(logging.NullHandler())  # commands show warnings themselves


@app.command()
def demo(
    out: Annotated[
        Path | None, typer.Option(help="New directory for the run.", show_default="runs/demo-<timestamp>")
    ] = None,
    steps: Annotated[int, option("Steps to train.", min=1)] = 300,
    seed: Annotated[int, option("Seed of the data, the warm-up and the sampling.")] = 0,
    max_staleness: MaxStaleness = 1,
    staleness_policy: Policy = "wait",
    model: Annotated[
        Path | None,
        option("Hugging Face folder to start from, without warm-up.", "PATH", exists=True, file_okay=False),
    ] = None,
    rollout: Annotated[str, option("Rollout engine. A probe verifies each loaded version.", "NAME")] = "transformers",
    python: Annotated[MaybeText, option("Interpreter of the rollout engine; default: this one.", "PATH")] = None,
    options: Annotated[
        Texts, repeatable("Option of the rollout engine, for example max_rows=64.", "NAME=VALUE", "--option")
    ] = None,
    train: Annotated[str, option("Train engine.", "NAME")] = "torch",
    world_size: Annotated[int, option("Ranks (processes) of the train engine.", min=1)] = 1,
    train_python: Annotated[MaybeText, option("Interpreter of the train engine; default: this one.", "PATH")] = None,
    train_options: Annotated[
        Texts, repeatable("Option of the train engine, for example stage=3.", "NAME=VALUE", "--train-option")
    ] = None,
    algorithm: Annotated[str, option("Algorithm: grpo, dr_grpo, dapo, gspo, cispo, ppo, ...", "NAME")] = "grpo",
    algorithm_options: Annotated[
        Texts,
        repeatable('Its option, for example off_policy={"weight": "mask"}.', "NAME=VALUE", "--algorithm-option"),
    ] = None,
    no_plugin: NoPlugin = None,
    debug: Debug = False,
) -> None:
    """Train a small model on this machine, live, and write a report."""
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
    by = (algorithm, named_options(algorithm_options, "--algorithm-option"))
    generates = (rollout, python, named_options(options, "--option"))
    trains = (train, world_size, train_python, named_options(train_options, "--train-option"), by)
    first = (out, steps, seed, max_staleness, model, Console(), staleness_policy)
    raise typer.Exit(module.run_demo(*first, *generates, *trains))


@app.command()
def run(
    file: Annotated[Path, typer.Argument(dir_okay=False, metavar="FILE.toml", help="The workflow.")],
    out: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="New directory for the run.", show_default="runs/<file>-<timestamp>"),
    ] = None,
    only_print: Annotated[bool, option("Print the resolved workflow; start nothing.", "", "--print")] = False,
    as_mermaid: Annotated[bool, option("Print the dataflow as Mermaid; start nothing.", "", "--mermaid")] = False,
    changes: Changes = None,
    address: Annotated[
        MaybeText, option("Address for workers of other hosts, for example tcp://0.0.0.0:7000; with keys.")
    ] = None,
    advertise: Annotated[MaybeText, option("Name or IP address of this host for others.", "HOST")] = None,
    no_plugin: NoPlugin = None,
    debug: Debug = False,
) -> None:
    """Run the workflow in a TOML file, live, and write a report."""
    from .run_command import run_file

    given = {"address": address, "advertise": advertise}
    texts = {**changed_texts(changes), **{name: value for name, value in given.items() if value is not None}}
    run_file(file, out, texts, "mermaid" if as_mermaid else "text" if only_print else "", Console())


@app.command()
def serve(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the run; created if missing.")],
    address: Annotated[
        str, option("Address to listen on; tcp://0.0.0.0:7000 accepts other hosts.")
    ] = "tcp://127.0.0.1:0",
    insecure: Annotated[
        bool, option("Use no keys: everyone with network access may read and change the run.", "", "--insecure")
    ] = False,
    prompts: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File of prompts to feed.", metavar="FILE.jsonl")
    ] = None,
    column: Annotated[str, option("Column of the prompts.")] = "prompt",
    group_size: Annotated[int, option("Responses per prompt.", min=1)] = GROUP_SIZE,
    epochs: Annotated[int | None, option("Epochs to feed; default: until --steps is reached.", min=1)] = None,
    seed: Annotated[int, option("Seed of the order of prompts.")] = 0,
    steps: Annotated[int | None, option("Steps to train; default: until the stream ends.", min=1)] = None,
    max_staleness: MaxStaleness = MAX_STALENESS,
    staleness_policy: Policy = "wait",
    capacity_rows: Annotated[int, option("Maximum number of live rows.", min=1)] = CAPACITY_ROWS,
    durability: Annotated[
        str | None, option("'process' survives a killed process, 'host' also a reboot; default: neither.")
    ] = None,
    store: Annotated[str, option("Where payload stays: local, hosts, ...", "NAME", "--store")] = LOCAL,
    store_options: Annotated[
        Texts, repeatable("Store option, for example fetch_s=60.", "NAME=VALUE", "--store-option")
    ] = None,
    home_silence: Annotated[
        float, option("Seconds without a storage unit after which a host is lost.", min=0.0)
    ] = HOME_SILENCE_S,
    track: Annotated[Texts, repeatable("Tracker of the run.", "NAME")] = None,
    no_plugin: NoPlugin = None,
    debug: Debug = False,
) -> None:
    """Serve a run for workers started by hand, and print their commands.

    Ctrl-C ends it.
    """
    from .run_command import serve_run

    feed = {"prompts": prompts, "group_size": group_size, "column": column, "epochs": epochs, "seed": seed}
    limits: dict[str, Any] = {"steps": steps, "max_staleness": max_staleness, "staleness_policy": staleness_policy}
    limits |= {"capacity_rows": capacity_rows, "durability": durability, "track": track or []}
    place = Store(kind=store, silence_s=home_silence, options=named_options(store_options, "--store-option"))
    options = {"address": address, "insecure": insecure, "store": place, **limits}
    serve_run(directory, Console(), None if prompts is None else feed, options)


app.add_typer(worker, name="worker")
app.command("new-plugin")(new_plugin)


@app.command()
def top(
    where: Queue,
    once: Annotated[bool, option("Print one screen and exit.", "", "--once")] = False,
    as_json: Annotated[bool, option("Print one JSON object and exit, for programs.", "", "--json")] = False,
    key: Key = None,
    insecure: Insecure = False,
    every: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds between two updates.")] = 1.0,
    debug: Debug = False,
) -> None:
    """Show a running queue live: rows, weights, clients, and why clients wait.

    Press q to quit.
    """
    from .top import QueueMonitor, drawn

    console = Console()
    with contextlib.closing(QueueMonitor(where, every, key, insecure)) as monitor:
        if as_json:
            typer.echo(monitor.json(monitor.sample_twice()))
        elif once or not console.is_terminal or console.is_dumb_terminal:
            console.print(Group(*drawn(monitor.sample_twice(), console)), soft_wrap=True)
        elif monitor.watch(console):
            console.print(f"{where} has ended", markup=False)


@app.command()
def web(
    where: Queue,
    address: Annotated[
        str, option("Address to listen at; the page is read only, and its URL has a token.", "HOST:PORT")
    ] = "127.0.0.1:0",
    key: Key = None,
    insecure: Insecure = False,
    debug: Debug = False,
) -> None:
    """Serve a live page of a run, and print its URL: reward, staleness, workers, waits, samples.

    Ctrl-C ends the page, not the run.
    """
    from .report.page_server import serve_page

    serve_page(where, address, Console(), key, insecure)


@app.command()
def export(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory of the run.", exists=True, file_okay=False)
    ],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="New Hugging Face folder.")],
    step: Annotated[int | None, typer.Option(min=1, help="After so many steps; default: the final model.")] = None,
    best: Annotated[bool, option("The version with the best evaluation.", "", "--best")] = False,
    debug: Debug = False,
) -> None:
    """Write a model folder of a run: the final one, that of a step, or the best one."""
    from .run_command import export_model

    say(Console(), f"{out}: from {export_model(directory, out, step, best)}")


@app.command()
def evict(
    where: Queue,
    sessions: Annotated[
        list[int],
        typer.Argument(metavar="SESSION...", min=1, help="All sessions of the client, from `asyncflow top --json`."),
    ],
    reason: Annotated[str, option("Reason for the log.")] = "its host is gone",
    key: Key = None,
    insecure: Insecure = False,
    debug: Debug = False,
) -> None:
    """Remove clients of a lost host, return their leases, and revoke their keys.

    Other ended clients are detected automatically. New clients on other hosts then need a copy of the new run.key.
    """
    from ..workflow import connect

    with connect(where, key=key, insecure=insecure, name="evict") as run:
        run.evict(*sessions, reason=reason)
    for session in sessions:
        typer.echo(f"session {session} is evicted")


keys = typer.Typer(help="Replace the key for new clients of a run.", no_args_is_help=True)
app.add_typer(keys, name="keys")


@keys.command()
def rotate(where: Queue, key: Key = None, insecure: Insecure = False, debug: Debug = False) -> None:
    """Replace the key in run.key. Connected clients go on; new clients on other hosts need a copy of it."""
    from ..workflow import connect

    with connect(where, key=key, insecure=insecure, name="keys") as run:
        run.rotate_key()
    typer.echo("the key is replaced: copy the run's run.key to the hosts of new clients")


@app.command()
def store(
    where: Queue,
    name: Annotated[str, option("Name of the home; default: this host and its address.")] = "",
    listen: Annotated[
        MaybeText, option("Address to listen on; default: a free port.", "tcp://HOST:PORT", "--listen")
    ] = None,
    key: Key = None,
    insecure: Insecure = False,
    debug: Debug = False,
) -> None:
    """Serve this host's memory for the payload of a run.

    Workers start a store when they need one. Start one yourself to fix its address or name. If it
    stops, start another on this host within --home-silence seconds of `serve`: no data is lost.
    """
    from ..queue.stores.unit import UnitConfig
    from ..queue.unit_process import run_unit
    from ..wire import RunKey
    from ..workflow.endpoints import find_run

    console = Console()
    address, found = find_run(where, key, insecure, CALL_S)
    config = UnitConfig(address, name, None if found is None else RunKey.load(found), insecure, listen)
    with stop_as_interrupt():  # Ctrl-C leaves the files to the next unit
        run_unit(config, lambda text: say(console, text), threading.Event())
    say(console, "the run has ended")


@app.command()
def resume(
    run_dir: RunDir,
    changes: Changes = None,
    no_plugin: NoPlugin = None,
    debug: Debug = False,
) -> None:
    """Resume a run from its newest checkpoint, live, and write a report.

    For a killed, failed or interrupted run; with changes also for a completed one.
    """
    from .run_command import resume_run

    resume_run(run_dir, changed_values(changes), Console())


@app.command()
def replay(run_dir: RunDir, no_plugin: NoPlugin = None, debug: Debug = False) -> None:
    """Replay the journal of a run offline and print its events.

    Exit code 1 if the result differs from the run's.
    """
    from ..queue.recovery import replay as replay_journal

    found = replay_journal(run_dir, on_milestone=lambda milestone: typer.echo(str(milestone)))
    typer.echo(f"{found.records} records replayed, {found.differing} with other answers; state {found.digest}")
    raise typer.Exit(1 if found.differing or not found.audit.balanced else 0)


@app.command()
def plugins(as_json: Json = False, no_plugin: NoPlugin = None, debug: Debug = False) -> None:
    """List installed adapters and their missing requirements.

    Exit code 1 if a plugin is broken.
    """
    from .inspection import inspect_environment, print_plugins

    seen = inspect_environment()
    _print_json(seen) if as_json else print_plugins(seen, Console())
    raise typer.Exit(1 if seen.problems else 0)


def _print_json(found: msgspec.Struct) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())


@app.command()
def check(
    name: Annotated[
        MaybeText, typer.Argument(metavar="[NAME]", help="Adapter or module:attribute; default: all engines.")
    ] = None,
    kind: Annotated[str, option("Kind of the adapter, if ambiguous: rollout, train, transport, ...")] = "",
    tier: Annotated[str, option("Highest tier to run: basic, full or chaos.")] = "full",
    only: Annotated[Texts, repeatable("Run this check only.", "CHECK", callback=one_name_each)] = None,
    model: Annotated[
        MaybeText, option("Hugging Face folder to check with; default: a generated one.", "PATH")
    ] = None,
    policy: Annotated[
        MaybeText, option("Policy with the expected answers, for other kinds of models.", "MODULE:NAME")
    ] = None,
    options: Annotated[Texts, repeatable("Engine option, for example threads=1.", "NAME=VALUE", "--option")] = None,
    expect: Annotated[Texts, repeatable("Check that must fail, and the reason.", "CHECK=REASON")] = None,
    dtype: Annotated[MaybeText, option("Dtype of the model's weights; default: as stored.", "NAME")] = None,
    tolerance: Annotated[
        float | None, option("Maximum difference of log-probs, in nats; default: by dtype.", "NATS")
    ] = None,
    limit: Annotated[float, option("Time limit of a check, in seconds.", min=0.1)] = CHECK_S,
    seed: Annotated[int | None, option("Seed of randomized checks; default: a constant.")] = None,
    world_size: Annotated[int, option("Ranks (processes) of a train engine.", min=1)] = 1,
    fail_fast: Annotated[bool, option("Stop after the first failure.", "", "--fail-fast")] = False,
    json: Annotated[Path | None, option("File for the results as JSON.", "PATH", dir_okay=False)] = None,
    show: Annotated[bool, option("List all checks; run none.", "", "--list")] = False,
    markdown: Annotated[bool, option("With --list: print a Markdown table.", "", "--markdown")] = False,
    no_plugin: NoPlugin = None,
    debug: Debug = False,
) -> None:
    """Run the conformance kit on an engine or another adapter, and explain failures.

    Exit code 1 if a check fails.
    """
    from .check import CheckOptions, run_checks, show_checks

    if show:
        show_checks(Console(), markdown=markdown)
        return
    of = (kind, tier, only or (), model, policy, named_options(options, "--option"), expect or ())
    chosen = CheckOptions(*of, limit, seed, tolerance, dtype, world_size, fail_fast)
    raise typer.Exit(0 if run_checks(name, chosen, Console(), json) else 1)


@app.command()
def doctor(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PATH]...", help="Workflow files (FILE.toml), run directories and key files."),
    ] = None,
    python: Annotated[Texts, repeatable("Interpreter of workers to check.", "PATH")] = None,
    address: Annotated[Texts, repeatable("Address for a run, for example tcp://0.0.0.0:7000.", "ADDRESS")] = None,
    runs: Annotated[
        Texts, repeatable("Address of a running run: check the links to it and its stores.", "ADDRESS", "--run")
    ] = None,
    key: Key = None,
    insecure: Insecure = False,
    as_json: Json = False,
    no_plugin: NoPlugin = None,
    debug: Debug = False,
) -> None:
    """Check interpreters, plugins and this machine before a run.

    Exit code 1 if there is a problem.
    """
    from .doctor import examine

    examination = examine(paths or [], python or [], address or [], runs or [], key, insecure)
    _print_json(examination) if as_json else examination.print(Console())
    raise typer.Exit(0 if examination.fine else 1)


@app.command()
def report(run_dir: RunDir, debug: Debug = False) -> None:
    """Write the report page of a run again, and print its path."""
    from .report.page import write_report

    typer.echo(str(write_report(run_dir)))


@app.command()
def trace(run_dir: RunDir, debug: Debug = False) -> None:
    """Write the trace of a run for ui.perfetto.dev, and print its path."""
    from .report.chrome_trace import write_trace

    typer.echo(str(write_trace(run_dir)))


def main() -> None:
    """Run the command."""
    try:
        app(prog_name="asyncflow")
    finally:
        gc.freeze()  # the last collection at exit would traverse torch and matplotlib for up to a second
