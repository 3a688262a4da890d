"""``asyncflow worker``: start workers by hand for a running run, on any host with access to it.

asyncflow worker tcp://10.0.0.1:7000 --key run.key rollout --engine transformers --model PATH
asyncflow worker tcp://10.0.0.1:7000 --key run.key stage rewards:f --task reward --needs response --gives reward
asyncflow worker tcp://10.0.0.1:7000 --key run.key --from run.toml rollout
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from ..errors import ConfigError
from .options import Insecure, Key, MaybeText, NoPlugin, Texts, named_options, one_name_each, option, repeatable, say

ROLES = ("rollout", "stage", "train")


class AddressFirstGroup(TyperGroup):
    """A command group with a leading argument: ``worker ADDRESS --key FILE rollout``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move the address behind the group's options, as click expects it."""
        role = next((i for i, word in enumerate(args) if word in ROLES), None)
        if role and not args[0].startswith("-"):
            args = [*args[1:role], args[0], *args[role:]]
        return super().parse_args(ctx, args)


worker = typer.Typer(cls=AddressFirstGroup, no_args_is_help=True, rich_markup_mode="rich")


@dataclass
class _GroupOptions:
    """The arguments before the role."""

    address: str
    key: Path | None
    insecure: bool
    file: Path | None
    replicas: int
    place: dict[str, Any]


_Engine = Annotated[str, option("Engine, as listed by `asyncflow plugins`.")]
_Model = Annotated[str, option("Hugging Face folder on this host.", "PATH")]
_Set = Annotated[Texts, repeatable("Option of the engine, for example learning_rate=1e-6.", "NAME=VALUE", "--set")]


@worker.callback()
def _group(
    ctx: typer.Context,
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="tcp://HOST:PORT of the run, or its directory on its own host.")
    ],
    key: Key = None,
    insecure: Insecure = False,
    file: Annotated[
        Path | None,
        option("Workflow file with the role's options.", "TOML", "--from", exists=True, dir_okay=False),
    ] = None,
    replicas: Annotated[int, option("Workers to start.", min=1)] = 1,
    python: Annotated[MaybeText, option("Interpreter of an environment with the engine.", "PATH")] = None,
    cpus: Annotated[list[int] | None, option("CPU to run on. Repeatable.")] = None,
    gpus: Annotated[list[int] | None, option("GPU to use. Repeatable.")] = None,
    max_restarts: Annotated[
        int | None, option("Maximum restarts of a dead worker; default: 3, of a trainer 0.", min=0)
    ] = None,
    no_plugin: NoPlugin = None,
) -> None:
    """Join a running run as rollout worker, stage or trainer.

    Ctrl-C finishes the leased rows, then leaves.
    """
    given = {"python": python, "cpus": cpus, "gpus": gpus, "max_restarts": max_restarts}
    place = {name: value for name, value in given.items() if value is not None}
    ctx.obj = _GroupOptions(address, key, insecure, file, replicas, place)


@worker.command()
def rollout(
    ctx: typer.Context,
    engine: _Engine = "",
    model: _Model = "",
    prompt: Annotated[str, option("Column of prompts.")] = "prompt",
    tokenizer: Annotated[MaybeText, option("Folder or tokenizer.json; default: the model's.")] = None,
    task: Annotated[str, option("Task to lease prompts from.")] = "rollout",
    max_tokens: Annotated[int, option("Maximum tokens of a response.", min=1)] = 256,
    temperature: Annotated[float, option("Sampling temperature; 0 is greedy.", min=0.0)] = 1.0,
    options: _Set = None,
) -> None:
    """Generate responses with an engine."""
    from ..types import Sampling
    from ..workflow import Rollout

    group: _GroupOptions = ctx.obj
    if _starts_from_file(group, task, engine):
        return
    given = {"model": model, "prompt": prompt, "tokenizer": tokenizer, "task": task, **named_options(options)}
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
    _work(group, Rollout(engine, sampling=sampling, replicas=group.replicas, **group.place, **given))


@worker.command()
def stage(
    ctx: typer.Context,
    function: Annotated[
        str, typer.Argument(help="Import path of the function; with --from, the stage's task.", metavar="MODULE:NAME")
    ],
    task: Annotated[MaybeText, option("Name of the task; default: the function's name.")] = None,
    needs: Annotated[Texts, repeatable("Column that the function reads.", "COLUMN", callback=one_name_each)] = None,
    gives: Annotated[Texts, repeatable("Column that the function returns.", "COLUMN", callback=one_name_each)] = None,
    batch: Annotated[int | None, option("Maximum rows of a call.", min=1)] = None,
) -> None:
    """Apply a function to rows with the columns it needs."""
    import sys

    from ..plugins import import_name
    from ..workflow import Stage

    group: _GroupOptions = ctx.obj
    if _starts_from_file(group, function, function):
        return
    sys.path.insert(0, "")  # as for `python -m`
    _work(group, Stage(import_name(function), task=task, needs=needs, gives=gives, batch=batch, **group.place))


@worker.command()
def train(
    ctx: typer.Context,
    engine: _Engine = "",
    model: _Model = "",
    batch_size: Annotated[int, option("Rows of a step; 0 if the task is declared already.", min=0)] = 0,
    export: Annotated[str, option("Folder for the trained model.", "PATH")] = "",
    transport: Annotated[str, option("Transport for new weights.")] = "auto",
    world_size: Annotated[
        int, option("Ranks to start here. Under torchrun each process is one of its ranks.", min=1)
    ] = 1,
    part_rows: Annotated[
        int, option("Train each step in parts of at least these rows, while it is being generated; 0: whole.", min=0)
    ] = 0,
    options: _Set = None,
) -> None:
    """Train, and publish each version.

    If RANK and WORLD_SIZE are set (torchrun sets them), train as that rank.
    """
    from ..types import Weights
    from ..workflow import Train

    group: _GroupOptions = ctx.obj
    if _starts_from_file(group, "train", engine):
        return
    given: dict[str, Any] = {"model": model, "weights": Weights(transport=transport), "world_size": world_size}
    given |= {"stream": True, "part_rows": part_rows} if part_rows else {}
    _work_as_ranks(group, Train(engine, **given, **group.place, **named_options(options)), batch_size, export=export)


def _starts_from_file(group: _GroupOptions, task: str, engine: str) -> bool:
    """Start a role as a workflow file describes it, if one is given, without checking the file's other roles on this
    host. Raises ConfigError without a file and an engine."""
    from ..workflow import Logprobs, Rollout, load_workflow
    from ..workflow.plan.problems import for_role

    if group.file is None:
        if not engine:
            raise ConfigError(f"asyncflow worker ADDRESS {task} needs --engine, or --from FILE.toml before {task!r}")
        return False
    with for_role("" if "python" in group.place else task):  # another interpreter knows its own engines
        flow = load_workflow(group.file).plan
    specs: list[Any] = [*flow.rollouts, *flow.stages, flow.train]
    spec = next((each for each in specs if each.task == task), None)
    if spec is None:
        known = ", ".join(repr(each.task) for each in specs)
        raise ConfigError(f"{group.file} has no task {task!r}; it has: {known}")
    spec.place = replace(spec.place, **group.place)  # the command line decides the placement
    if isinstance(spec, Rollout):
        spec.replicas = group.replicas
        _work(group, spec, needs_first=True, weights=flow.weights)
    elif spec is flow.train:
        _work_as_ranks(group, spec, flow.options.batch_size, weights=flow.weights)
    elif isinstance(spec.work, Logprobs):
        _work_as_ranks(group, spec)
    else:  # each process does this work for itself
        _work(group, spec)
    return True


def _work_as_ranks(group: _GroupOptions, spec: Any, batch_size: int = 0, **job: Any) -> None:
    """Start all ranks, or only the one in the environment; then its launcher stops and restarts the
    ranks."""
    from ..workflow.processes.ranks import own_rank

    rank = own_rank()
    if rank is not None:
        if spec.task == "train" and spec.world_size == 1:
            spec.world_size = rank.world_size
        if spec.world_size != rank.world_size:
            size = rank.world_size
            raise ConfigError(f"world_size is {spec.world_size}, but the environment has WORLD_SIZE={size}")
        spec.place = replace(spec.place, max_restarts=0)
    _work(group, spec, batch_size, rank=rank, **job)


def _work(group: _GroupOptions, spec: Any, batch_size: int = 0, **job: Any) -> None:
    from ..workflow import connect
    from .signals import stop_as_interrupt

    console = Console()
    options: dict[str, Any] = {"key": group.key, "insecure": group.insecure, "name": "worker", "logs": "logs"}
    with stop_as_interrupt(), connect(group.address, **options) as run:
        if batch_size:
            run.declare(spec, batch_size)
        workers = run.start(spec, **job)
        if len(workers) != group.replicas and spec.task != "train":
            workers = run.scale(spec, group.replicas)
        try:
            for each in workers:
                names = ", ".join(each.pids)
                say(console, f"{names} joins {group.address} as process {each.pid}; log: {each.spec.log}")
            for each in workers:
                run.wait(each, timeout_s=math.inf)  # until the stream ends, or Ctrl-C
        except KeyboardInterrupt:
            if job.get("rank") is not None:  # it would wait for the other ranks, which may be gone
                run.stop_workers()
                raise
            say(console, "leaving after the leased rows are finished; Ctrl-C again stops at once")
            run.dismiss_workers()
            for each in workers:
                each.ended.wait()
            raise
        say(console, "the stream has ended")
