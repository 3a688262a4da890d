"""Writes docs/reference.md from the docstrings: ``python docs/reference.py``. A test holds the two together."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncflow_sdk import interfaces, plugins, testing

PAGE = Path(__file__).parent / "reference.md"
HEAD = """# Reference: what plugins implement

Written by `python docs/reference.py` from the docstrings; the words are those that `help(...)` shows. How plugins are found is in
[plugins](plugins.md), how one is written in [your own engine](your-own-engine.md), how it is checked in [conformance](conformance.md).
All names are in `asyncflow_sdk` too, as `af.RolloutEngine`, where no other module is named.
"""
PARTS: dict[str, tuple[str, list[Any]]] = {
    "The hook": ("", [plugins.AdapterSpec, plugins.HookSpecs]),
    "Rollout engines": (
        'kind "rollout"',
        [interfaces.RolloutEngine, interfaces.Capabilities, interfaces.Request, interfaces.Completion],
    ),
    "Train engines": ('kind "train"', [interfaces.TrainEngine, interfaces.StepResult]),
    "Algorithms": ('kind "algorithm"', [interfaces.Algorithm, interfaces.PackedTokens]),
    "New weights": ("what engines are given", [interfaces.WeightUpdate, interfaces.TensorType, interfaces.FilePlace]),
    "Weight transports": (
        'kind "transport"; in `asyncflow_sdk.interfaces`',
        [
            interfaces.WeightTransport, interfaces.WeightSender, interfaces.WeightReceiver, interfaces.Room,
            interfaces.Fetched, interfaces.Host,
        ],
    ),
    "Samplers": ('kind "sampler"', [interfaces.Sampler, interfaces.Candidates]),
    "Staleness policies": ('kind "staleness"', [interfaces.StalenessPolicy, interfaces.Filling]),
    "Launchers": (
        'kind "launcher"',
        [interfaces.Launcher, interfaces.WorkerOrder, interfaces.WorkerHandle, interfaces.WorkerEnding, interfaces.Place],
    ),
    "Trackers": ('kind "tracker"', [interfaces.Tracker, interfaces.TrackedRun]),
    "The kit": (
        "in `asyncflow_sdk.testing`",
        [testing.Conformance, testing.Report, testing.Result, testing.Check, testing.Policy],
    ),
}  # fmt: skip


def page() -> str:
    """The whole of it."""
    parts = [HEAD]
    for title, (where, classes) in PARTS.items():
        parts.append(f"\n## {title}\n" + (f"\n{where[0].upper()}{where[1:]}.\n" if where else ""))
        parts += ["".join(_class(each)) for each in classes]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).strip() + "\n"


def _class(cls: type) -> Iterator[str]:
    yield f"\n### `{cls.__name__}`\n\n{_text(cls)}\n"
    if dataclasses.is_dataclass(cls):
        yield "\n```\n" + "".join(f"{line}\n" for line in _fields(cls)) + "```\n"
    elif attributes := list(_attributes(cls)):
        yield "\n```\n" + "".join(f"{line}\n" for line in attributes) + "```\n"
    for name, member in vars(cls).items():
        function = (
            member.fget if isinstance(member, property) else inspect.unwrap(getattr(member, "__func__", member))
        )
        if name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        kind = "async " if inspect.iscoroutinefunction(function) else ""
        said = name if isinstance(member, property) else f"{kind}{name}{_signature(function)}"
        marks = " · to be implemented" if getattr(member, "__isabstractmethod__", False) else ""
        yield f"\n**`{said}`**{marks}\n\n{_text(function)}\n"


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
            yield f"{name}: {kind}" + (f" = {value!r}" if plain else "")


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [each for name, each in signature.parameters.items() if name != "self"]
    said = str(signature.replace(parameters=parameters)).replace("'", "")
    return re.sub(r"<function .*?>(?=[,)])", "...", said)


def _text(thing: Any) -> str:
    """A docstring as Markdown: its names are code, its indented parts stay as they are."""
    return (inspect.getdoc(thing) or "").replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
