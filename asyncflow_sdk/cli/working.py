"""``asyncflow worker``: workers that join a run by hand, from any host that reaches it.

asyncflow worker tcp://10.0.0.1:7000 --key run.key rollout --engine transformers --model PATH
asyncflow worker tcp://10.0.0.1:7000 --key run.key stage rewards:exact_match --task reward --needs response --gives reward
asyncflow worker tcp://10.0.0.1:7000 --key run.key --from run.toml rollout
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from typer.core import TyperGroup

from ..errors import ConfigError
from .options import Insecure, NoPlugin

ROLES = ("rollout", "stage", "train")


class _Group(TyperGroup):
    """The address comes first, and options may follow it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        role = next((i for i, word in enumerate(args) if word in ROLES), None)
        if role and not args[0].startswith("-"):
            args = [*args[1:role], args[0], *args[role:]]
        return super().parse_args(ctx, args)


worker = typer.Typer(cls=_Group, no_args_is_help=True, rich_markup_mode="rich")


@dataclass
class _Call:
    """What stands before the role."""

    address: str
    key: Path | None
    insecure: bool
    file: Path | None
    replicas: int
    place: dict[str, Any]


_Engine = Annotated[str, typer.Option(help="As `asyncflow plugins` lists it.")]
_Model = Annotated[str, typer.Option(help="Hugging Face folder, on this host.", metavar="PATH")]
_Set = Annotated[
    list[str] | None, typer.Option("--set", help="An option of the engine, as lr=1e-6.", metavar="NAME=VALUE")
]
_Names = Annotated[list[str] | None, typer.Option(help="A column; say it again for each.", metavar="COLUMN")]


@worker.callback()
def _call(
    ctx: typer.Context,
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="Of the run: tcp://HOST:PORT, or its directory on its own host.")
    ],
    key: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A copy of the run's run.key.", metavar="FILE")
    ] = None,
    insecure: Insecure = False,
    file: Annotated[
        Path | None,
        typer.Option(
            "--from", exists=True, dir_okay=False, help="A workflow's file: the role is as it says.", metavar="TOML"
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Workers to start.")] = 1,
    python: Annotated[
        str | None, typer.Option(help="Interpreter of an environment with the engine.", metavar="PATH")
    ] = None,
    cpus: Annotated[list[int] | None, typer.Option(help="A CPU to be kept on; say it again for each.")] = None,
    gpus: Annotated[list[int] | None, typer.Option(help="A GPU to be used; say it again for each.")] = None,
    max_restarts: Annotated[
        int | None, typer.Option(min=0, help="How often one is started again after dying.")
    ] = None,
    no_plugin: NoPlugin = None,
) -> None:
    """Join a running run as a rollout, a stage or a trainer. Ctrl-C leaves it: what is held is finished first."""
    del no_plugin
    given = {"python": python, "cpus": cpus, "gpus": gpus, "max_restarts": max_restarts}
    place = {name: value for name, value in given.items() if value is not None}
    ctx.obj = _Call(address, key, insecure, file, replicas, place)


@worker.command()
def rollout(
    ctx: typer.Context,
    engine: _Engine = "",
    model: _Model = "",
    prompt: Annotated[str, typer.Option(help="The column of prompts.")] = "prompt",
    tokenizer: Annotated[str | None, typer.Option(help="Folder or tokenizer.json, if not the model's.")] = None,
    task: Annotated[str, typer.Option(help="The task whose prompts it takes.")] = "rollout",
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a response.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    options: _Set = None,
) -> None:
    """Generate responses with an engine."""
    from ..types import Sampling
    from ..workflow import Rollout

    call: _Call = ctx.obj
    if call.file is not None:
        _from_file(call, task)
        return
    _need("rollout", engine=engine)
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
    _work(
        call,
        Rollout(
            engine, model=model, prompt=prompt, tokenizer=tokenizer, task=task, sampling=sampling, replicas=call.replicas,
            **call.place, **named_options(options),
        ),
    )  # fmt: skip


@worker.command()
def stage(
    ctx: typer.Context,
    function: Annotated[
        str, typer.Argument(help="By its import path; with --from, the stage's task.", metavar="MODULE:NAME")
    ],
    task: Annotated[str | None, typer.Option(help="Its name; without one, the function's.")] = None,
    needs: _Names = None,
    gives: _Names = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Most rows of a call.")] = None,
) -> None:
    """Apply a function to the rows that have the columns it needs."""
    import sys

    from ..plugins import import_name
    from ..workflow import Stage

    call: _Call = ctx.obj
    if call.file is not None:
        _from_file(call, function)
        return
    sys.path.insert(0, "")  # as `python -m` has
    _work(call, Stage(import_name(function), task=task, needs=needs, gives=gives, batch=batch, **call.place))


@worker.command()
def train(
    ctx: typer.Context,
    engine: _Engine = "",
    model: _Model = "",
    batch_size: Annotated[int, typer.Option(min=0, help="Rows of a step; 0 where the task is declared already.")] = 0,
    export: Annotated[str, typer.Option(help="Folder for the model in the end.", metavar="PATH")] = "",
    transport: Annotated[str, typer.Option(help="By which new weights travel.")] = "auto",
    world_size: Annotated[
        int,
        typer.Option(min=1, help="Ranks to start here. Under torchrun and the like each is one process of theirs."),
    ] = 1,
    options: _Set = None,
) -> None:
    """Train, and publish each version. Where RANK and WORLD_SIZE are set, as torchrun sets them, as that rank."""
    from ..types import Weights
    from ..workflow import Train

    call: _Call = ctx.obj
    if call.file is not None:
        _from_file(call, "train")
        return
    _need("train", engine=engine)
    spec = Train(
        engine, model=model, weights=Weights(transport=transport), world_size=world_size, **call.place,
        **named_options(options),
    )  # fmt: skip
    _train(call, spec, batch_size, export=export)


def _train(call: _Call, spec: Any, batch_size: int, **job: Any) -> None:
    """As a whole, or as the rank that the environment names: then ending the others, and starting again, is for its launcher."""
    from ..workflow.ranks import own_rank

    rank = own_rank()
    if rank is not None:
        if spec.world_size not in (1, rank.world_size):
            raise ConfigError(
                f"world_size is {spec.world_size}, and the environment has WORLD_SIZE={rank.world_size}: say the same"
            )
        spec.world_size, spec.place = rank.world_size, replace(spec.place, max_restarts=0)
    _work(call, spec, batch_size, rank=rank, **job)


def _from_file(call: _Call, task: str) -> None:
    """The role as the workflow of a file has it; where others of it run, and what they need there, is not looked for here."""
    from ..workflow import load_workflow
    from ..workflow.problems import for_role

    assert call.file is not None
    with for_role("" if "python" in call.place else task):  # of an engine in another interpreter that one knows
        flow = load_workflow(call.file).plan
    specs: list[Any] = [*flow.rollouts, *flow.stages, flow.train]
    for spec in specs:  # but where it runs is this host's to say
        spec.place = replace(spec.place, **call.place)
    for rollout in flow.rollouts:
        if rollout.task == task:
            rollout.replicas = call.replicas
            _work(call, rollout, needs_first=True, weights=flow.weights)
            return
    for each in flow.stages:
        if each.task == task:
            _work(call, each)
            return
    if task == "train":
        _train(call, flow.train, flow.batch_size, weights=flow.weights)
        return
    known = ", ".join(map(repr, [*(r.task for r in flow.rollouts), *(s.task for s in flow.stages), flow.train.task]))
    raise ConfigError(f"{call.file} has no task {task!r}; it has: {known}")


def _work(call: _Call, spec: Any, batch_size: int = 0, **job: Any) -> None:
    """Join, work until the stream ends, and leave."""
    from ..workflow import connect
    from .serving import stopped_by_signals

    console = Console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with (
        stopped_by_signals(),
        connect(call.address, key=call.key, insecure=call.insecure, name="worker", logs="logs") as run,
    ):
        if batch_size:
            run.declare(spec, batch_size)
        workers = run.start(spec, **job)
        alone = job.get("rank") is None
        if len(workers) != call.replicas and spec.task != "train":
            workers = run.scale(spec, call.replicas)
        for each in workers:
            say(f"{', '.join(each.pids)} joins {call.address} as process {each.pid}; log: {each.spec.log}")
        try:
            for each in workers:
                run.wait(each, timeout_s=math.inf)  # Ctrl-C ends it
        except KeyboardInterrupt:
            if not alone:  # the others may be gone, and it would wait for them
                run.stop_workers()
                raise
            say("leaving: what is held is finished first; Ctrl-C again stops at once")
            run.dismiss_workers()
            for each in workers:
                each.ended.wait()
            raise
        say("the stream has ended")


def _need(role: str, **given: str) -> None:
    for name, value in given.items():
        if not value:
            raise ConfigError(f"asyncflow worker ADDRESS {role} needs --{name}, or --from FILE.toml before {role!r}")


def named_options(given: list[str] | None, flag: str = "--set") -> dict[str, Any]:
    """Values as JSON where they are that, else as text."""
    options: dict[str, Any] = {}
    for each in given or ():
        name, equals, value = each.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"{flag} takes NAME=VALUE, such as lr=1e-6, not {each!r}")
        try:
            options[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            options[name] = value
    return options
