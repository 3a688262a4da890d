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
from .options import Insecure, Key, MaybeText, NoPlugin, Texts, named_options, one_name_each, option, repeatable

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
    max_restarts: Annotated[int | None, option("Maximum restarts of a dead worker; default: 3, of a trainer 0.", min=0)] = None,
    no_plugin: NoPlugin = None,
) -> None:  # fmt: skip
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
    if group.file is not None:
        _start_from_file(group, task)
        return
    _require_engine("rollout", engine)
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
    _work(
        group,
        Rollout(
            engine, model=model, prompt=prompt, tokenizer=tokenizer, task=task, sampling=sampling,
            replicas=group.replicas, **group.place, **named_options(options),
        ),
    )  # fmt: skip


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
    if group.file is not None:
        _start_from_file(group, function)
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
    if group.file is not None:
        _start_from_file(group, "train")
        return
    _require_engine("train", engine)
    parts: dict[str, Any] = {"stream": True, "part_rows": part_rows} if part_rows else {}
    spec = Train(
        engine, model=model, weights=Weights(transport=transport), world_size=world_size, **parts, **group.place,
        **named_options(options),
    )  # fmt: skip
    _train(group, spec, batch_size, export=export)


def _train(group: _GroupOptions, spec: Any, batch_size: int, **job: Any) -> None:
    """Train as a whole, or as the rank in the environment."""
    from ..workflow.workers.ranks import own_rank

    rank = own_rank()
    if rank is not None and spec.world_size == 1:
        spec.world_size = rank.world_size
    _work_as_rank(group, spec, batch_size, **job)


def _work_as_rank(group: _GroupOptions, spec: Any, batch_size: int = 0, **job: Any) -> None:
    """Start all ranks, or only the one in the environment; then its launcher stops and restarts the
    ranks."""
    from ..workflow.workers.ranks import own_rank

    rank = own_rank()
    if rank is not None:
        if spec.world_size != rank.world_size:
            raise ConfigError(
                f"world_size is {spec.world_size}, but the environment has WORLD_SIZE={rank.world_size}"
            )
        spec.place = replace(spec.place, max_restarts=0)
    _work(group, spec, batch_size, rank=rank, **job)


def _start_from_file(group: _GroupOptions, task: str) -> None:
    """Start a role as a workflow file describes it, without checking the file's other roles on this
    host."""
    from ..workflow import Logprobs, load_workflow
    from ..workflow.plan.problems import for_role

    assert group.file is not None
    with for_role("" if "python" in group.place else task):  # another interpreter knows its own engines
        flow = load_workflow(group.file).plan
    specs: list[Any] = [*flow.rollouts, *flow.stages, flow.train]
    for spec in specs:  # the command line decides the placement
        spec.place = replace(spec.place, **group.place)
    for rollout in flow.rollouts:
        if rollout.task == task:
            rollout.replicas = group.replicas
            _work(group, rollout, needs_first=True, weights=flow.weights)
            return
    for each in flow.stages:
        if each.task == task:
            is_sharded = isinstance(each.work, Logprobs)  # other work is done by each process for itself
            _work_as_rank(group, each) if is_sharded else _work(group, each)
            return
    if task == "train":
        _train(group, flow.train, flow.batch_size, weights=flow.weights)
        return
    known = ", ".join(map(repr, [*(r.task for r in flow.rollouts), *(s.task for s in flow.stages), flow.train.task]))
    raise ConfigError(f"{group.file} has no task {task!r}; it has: {known}")


def _work(group: _GroupOptions, spec: Any, batch_size: int = 0, **job: Any) -> None:
    """Join the run, work until the stream ends, and leave."""
    from ..workflow import connect
    from .signals import stop_as_interrupt

    console = Console()

    def _say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with (
        stop_as_interrupt(),
        connect(group.address, key=group.key, insecure=group.insecure, name="worker", logs="logs") as run,
    ):
        if batch_size:
            run.declare(spec, batch_size)
        workers = run.start(spec, **job)
        if len(workers) != group.replicas and spec.task != "train":
            workers = run.scale(spec, group.replicas)
        try:
            for each in workers:
                _say(f"{', '.join(each.pids)} joins {group.address} as process {each.pid}; log: {each.spec.log}")
            for each in workers:
                run.wait(each, timeout_s=math.inf)  # until the stream ends, or Ctrl-C
        except KeyboardInterrupt:
            if job.get("rank") is not None:  # it would wait for the other ranks, which may be gone
                run.stop_workers()
                raise
            _say("leaving after the leased rows are finished; Ctrl-C again stops at once")
            run.dismiss_workers()
            for each in workers:
                each.ended.wait()
            raise
        _say("the stream has ended")


def _require_engine(role: str, engine: str) -> None:
    if not engine:
        raise ConfigError(f"asyncflow worker ADDRESS {role} needs --engine, or --from FILE.toml before {role!r}")
