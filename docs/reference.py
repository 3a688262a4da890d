"""Writes docs/reference.md from the docstrings: ``python docs/reference.py``. A test holds the two together."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import typer

from asyncflow_sdk import algorithms, errors, interfaces, plugins, queue, service, testing, types, weights, workflow
from asyncflow_sdk.cli.app import app
from asyncflow_sdk.cli.report.page import write_report
from asyncflow_sdk.cli.screens.live_view import LiveView
from asyncflow_sdk.ledger import Audit
from asyncflow_sdk.queue.replay import replay

PAGE = Path(__file__).parent / "reference.md"
HEAD = """# Reference

Written by `python docs/reference.py` from the docstrings; the words are those that `help(...)` shows. How plugins are found is in
[plugins](plugins.md), how one is written in [your own engine](your-own-engine.md), how it is checked in [conformance](conformance.md).
First what a run is made of, then what plugins implement, what they are given and what users choose, errors, the kit, and the command.
All names are in `asyncflow_sdk` too, as `af.RolloutEngine`, where no other module is named.
"""
PARTS: dict[str, tuple[str, list[type | Callable[..., Any]]]] = {
    "A run": ("", [workflow.serve, workflow.connect, workflow.Run]),
    "The queue": (
        "`run.queue`; `run.queue.aio` has the same verbs as coroutines. What follows the queue is what its verbs return",
        [
            interfaces.TransferQueue,
            interfaces.PutRows,
            interfaces.LeasedBatch,
            interfaces.LeasedStep,
            interfaces.StepPart,
            Audit,
        ],
    ),
    "Versions of the weights": (
        "what `run.weight_publisher`, `run.weight_updates`, `run.rollback` and `run.restoration` return",
        [
            interfaces.WeightSync,
            interfaces.WeightPublisher,
            weights.TransportPublisher,
            interfaces.Publication,
            interfaces.WeightSubscriber,
            interfaces.LoadableUpdate,
            interfaces.RollbackResult,
            weights.Restoration,
        ],
    ),
    "Workflows": (
        "",
        [
            workflow.Workflow,
            workflow.Rollout,
            workflow.Stage,
            workflow.Train,
            workflow.Logprobs,
            workflow.Generate,
            workflow.Agent,
            workflow.Turns,
            workflow.Turn,
            workflow.Result,
            workflow.resume,
        ],
    ),
    "Parts of a loop of one's own": (
        "",
        [
            interfaces.Producer,
            workflow.EngineProducer,
            interfaces.Consumer,
            interfaces.StepConsumer,
            queue.StreamDataLoader,
            service.Trainer,
        ],
    ),
    "Data, and what a run has left": (
        "",
        [
            workflow.load_prompts,
            workflow.load_workflow,
            workflow.read_steps,
            workflow.staleness_of,
            workflow.ages_of,
            replay,
            write_report,
            LiveView,
        ],
    ),
    "The hook": ("", [plugins.AdapterSpec, plugins.HookSpecs]),
    "Rollout engines": (
        'kind "rollout"',
        [
            interfaces.RolloutEngine,
            interfaces.Capabilities,
            interfaces.Request,
            interfaces.Completion,
            interfaces.Completions,
        ],
    ),
    "Train engines": ('kind "train"', [interfaces.TrainEngine, interfaces.StepResult]),
    "Algorithms": ('kind "algorithm"', [interfaces.Algorithm, interfaces.PackedTokens]),
    "Algorithms that come with the SDK": (
        "what they are for is in [algorithms](algorithms.md)",
        [
            algorithms.PolicyGradient,
            algorithms.GRPO,
            algorithms.DrGRPO,
            algorithms.DAPO,
            algorithms.GSPO,
            algorithms.CISPO,
            algorithms.PPO,
            algorithms.KL,
            algorithms.OffPolicy,
            algorithms.Critic,
            algorithms.Overlong,
            algorithms.dynamic_sampling,
        ],
    ),
    "New weights": ("what engines are given", [interfaces.WeightUpdate, interfaces.TensorType, interfaces.FilePlace]),
    "Weight transports": (
        'kind "transport"; in `asyncflow_sdk.interfaces`',
        [
            interfaces.WeightTransport,
            interfaces.WeightSender,
            interfaces.WeightReceiver,
            interfaces.Room,
            interfaces.Fetched,
            interfaces.Host,
        ],
    ),
    "Samplers": ('kind "sampler"', [interfaces.Sampler, interfaces.Candidates]),
    "Staleness policies": ('kind "staleness"', [interfaces.StalenessPolicy, interfaces.StepWindow]),
    "Launchers": (
        'kind "launcher"',
        [
            interfaces.Launcher,
            interfaces.WorkerSpec,
            interfaces.WorkerSettings,
            interfaces.WorkerHandle,
            interfaces.WorkerExit,
            workflow.run_worker,
            interfaces.Placement,
        ],
    ),
    "Trackers": ('kind "tracker"', [interfaces.Tracker, interfaces.TrackedRun]),
    "What users choose": (
        "checked when it is made",
        [types.Sampling, types.Staleness, types.Weights, types.Probe, types.Checkpoint],
    ),
    "Values": ("what rows are made of", [types.Batch, types.Ragged, types.VersionSpan, types.TokenAges]),
    "Functions of values": (
        "in `asyncflow_sdk.types`",
        [
            types.one_version,
            types.token_versions,
            types.token_staleness,
            types.token_steps,
            types.loss_mask,
            types.from_torch,
            types.to_torch,
            types.dtype_name,
            types.carrier,
        ],
    ),
}
KIT = (
    testing.Conformance,
    testing.Report,
    testing.Result,
    testing.Check,
    testing.CheckFailed,
    testing.checks_of,
    testing.Policy,
    testing.EchoPolicy,
    testing.check_sampler,
    testing.check_staleness_policy,
    testing.check_transport,
)
STANDING_IN = (
    testing.EchoRollout, testing.EchoTrain, testing.TimedRollout, testing.TimedTrain, testing.RolloutLatency,
    testing.Decoding, testing.MemoryTransport,
)  # fmt: skip

COMMAND = """`asyncflow COMMAND --help` says the same. Any command that uses plugins takes `--no-plugin NAME`, which leaves one out, here and
in workers; any takes `--debug`, which shows tracebacks. Exit code 2: what was asked for cannot be done; 130: interrupted.
"""


def page() -> str:
    """The whole of it."""
    parts = [HEAD]
    for title, (where, things) in PARTS.items():
        parts.append(f"\n## {title}\n" + (f"\n{where[0].upper()}{where[1:]}.\n" if where else ""))
        parts += map(_thing, things)
    parts += ["\n## Errors\n", *_errors()]
    parts += ["\n## The kit\n\nIn `asyncflow_sdk.testing`.\n", *map(_thing, KIT)]
    parts += [
        "\n## Engines and a transport that stand in for others\n\nIn `asyncflow_sdk.testing`.\n",
        *map(_thing, STANDING_IN),
    ]
    parts += ["\n## The command\n", COMMAND, *_commands(app, "asyncflow")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).strip() + "\n"


def _thing(thing: Any) -> str:
    if isinstance(thing, type):
        return "".join(_class(thing))
    return f"\n### `{thing.__name__}`\n\n```\n{thing.__name__}{_signature(thing)}\n```\n\n{_text(thing)}\n"


def _errors() -> Iterator[str]:
    """The tree, which the module draws; and what each says of itself."""
    tree = re.search(r"AsyncFlowError\n(├.*\n|│.*\n|└.*\n)+", errors.__doc__ or "")
    assert tree is not None
    yield f"In `asyncflow_sdk.errors`.\n\n```\n{tree[0]}```\n\n| error | |\n|---|---|"
    for name, error in vars(errors).items():
        if isinstance(error, type) and error.__module__ == errors.__name__:
            yield f"| `{name}` | {' '.join(_text(error).split())} |"


def _commands(of: typer.Typer, name: str) -> Iterator[str]:
    """Of each command: what it does, and what it takes, as its function says it."""
    for command in of.registered_commands:
        said = command.callback
        assert said is not None
        yield _command(f"{name} {command.name or said.__name__}", said)
    for group in of.registered_groups:
        whole, inner = group.typer_instance, f"{name} {group.name}"
        assert whole is not None
        if whole.registered_callback is not None and whole.registered_callback.callback is not None:
            yield _command(inner, whole.registered_callback.callback)
        yield from _commands(whole, inner)


def _command(name: str, function: Callable[..., Any]) -> str:
    kinds = get_type_hints(function, include_extras=True)
    taken = [
        _parameter(each, kinds[each.name])
        for each in inspect.signature(function).parameters.values()
        if get_origin(kinds[each.name]) is Annotated and each.name not in ("no_plugin", "debug")
    ]
    text = " ".join(_text(function).split())
    if not taken:
        return f"\n### `{name}`\n\n{text}\n"
    width = max(len(left) for left, _ in taken)
    lines = "".join(f"{left:{width}}  {right}".rstrip() + "\n" for left, right in taken)
    return f"\n### `{name}`\n\n{text}\n\n```\n{lines}```\n"


def _parameter(parameter: inspect.Parameter, kind: Any) -> tuple[str, str]:
    """What is typed, and what it means."""
    plain, said = get_args(kind)[:2]
    word = said.metavar or next((WORDS[type] for type in re.findall(r"\w+", str(plain)) if type in WORDS), "")
    if isinstance(said, typer.models.ArgumentInfo):
        left = said.metavar or parameter.name.upper()
    else:
        names = [each for each in (said.default, *(said.param_decls or ())) if isinstance(each, str)]
        left = " ".join([", ".join(names) or "--" + parameter.name.replace("_", "-"), word]).strip()
    default = said.show_default if isinstance(said.show_default, str) else parameter.default
    kept = said.show_default and default not in (None, "", False, inspect.Parameter.empty, ...)
    return left, " ".join((said.help or "").split()) + (f" [{default}]" if kept else "")


GIVEN = (
    workflow.Run,
    interfaces.TransferQueue,
    interfaces.LeasedBatch,
    interfaces.Publication,
    interfaces.LoadableUpdate,
)
"""By functions and methods: nobody makes them by themselves."""
INNER = ("Verbs", "Lease", "Stream")
"""Written once for two faces, blocking and not."""
FACES = {"-> B": "-> LeasedBatch"}
WORDS = {"bool": "", "int": "NUMBER", "float": "NUMBER", "Path": "PATH", "str": "TEXT"}


def _class(cls: type) -> Iterator[str]:
    yield f"\n### `{cls.__name__}`\n\n{_text(cls)}\n"
    if _made_by_users(cls):
        yield f"\n```\n{cls.__name__}{_signature(cls.__init__)}\n```\n"
    if issubclass(cls, msgspec.Struct):
        fields = msgspec.structs.fields(cls)
        lines = [f"{each.name}: {cls.__annotations__[each.name]}" for each in fields]
        defaults = ["" if each.default is msgspec.NODEFAULT else f" = {each.default!r}" for each in fields]
        yield "\n```\n" + "".join(f"{line}{end}\n" for line, end in zip(lines, defaults, strict=True)) + "```\n"
    elif dataclasses.is_dataclass(cls):
        yield "\n```\n" + "".join(f"{line}\n" for line in _fields(cls)) + "```\n"
    elif attributes := list(_attributes(cls)):
        yield "\n```\n" + "".join(f"{line}\n" for line in attributes) + "```\n"
    for name, member in _members(cls).items():
        plain = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        function = inspect.unwrap(plain) if callable(plain) else plain
        if name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        kind = "async " if inspect.iscoroutinefunction(plain) else ""
        said = name if isinstance(member, property) else f"{kind}{name}{_signature(function)}"
        marks = " · to be implemented" if getattr(member, "__isabstractmethod__", False) else ""
        yield f"\n**`{said}`**{marks}\n\n{_text(function)}\n"


def _members(cls: type) -> dict[str, Any]:
    """Its own, and those of what it is made of that has no place on this page."""
    shown = {thing for _, things in PARTS.values() for thing in things}
    parts = [cls, *(each for each in cls.__mro__[1:] if each.__name__ in INNER and each not in shown)]
    return {name: member for part in reversed(parts) for name, member in vars(part).items()}


def _made_by_users(cls: type) -> bool:
    """By calling it with arguments of its own, which no list of fields tells."""
    plain = not dataclasses.is_dataclass(cls) and not issubclass(cls, (msgspec.Struct, tuple))
    return (
        plain and cls not in GIVEN and not inspect.isabstract(cls) and inspect.isfunction(vars(cls).get("__init__"))
    )


def _fields(cls: Any) -> Iterator[str]:
    for field in dataclasses.fields(cls):
        if field.name.startswith("_"):
            continue
        default = ""
        if field.default is not dataclasses.MISSING:
            default = f" = {field.default!r}"
        elif field.default_factory is not dataclasses.MISSING:
            default = f" = {field.default_factory()!r}"
        yield f"{field.name}: {field.type}{default}"


def _attributes(cls: type) -> Iterator[str]:
    for name, kind in inspect.get_annotations(cls).items():
        if not name.startswith("_"):
            value = vars(cls).get(name, inspect.Parameter.empty)
            plain = isinstance(value, (str, int, float, bool, tuple))
            yield f"{name}: {getattr(kind, '__forward_arg__', kind)}" + (f" = {value!r}" if plain else "")


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [
        each.replace(annotation=_Plain(each.annotation)) if each.annotation is not each.empty else each
        for name, each in signature.parameters.items()
        if name not in ("self", "cls")
    ]
    returns = signature.return_annotation
    if returns is not signature.empty:
        signature = signature.replace(return_annotation=_Plain(returns))
    said = str(signature.replace(parameters=parameters))
    said = re.sub(r"-> [BS]$", lambda face: FACES[face[0]], said)
    return re.sub(r"<function .*?>(?=[,)])", "...", said)


class _Plain:
    """An annotation as it stands in the code, without quotes around it."""

    def __init__(self, annotation: Any) -> None:
        self._annotation = annotation

    def __repr__(self) -> str:
        return str(self._annotation).strip("'")


def _text(thing: Any) -> str:
    """A docstring as Markdown: its names are code, its indented parts stay as they are."""
    return (inspect.getdoc(thing) or "").replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
