"""``asyncflow new-plugin``: write a small plugin package. It works, and passes the conformance kit
unchanged."""

from __future__ import annotations

import keyword
import re
from importlib import resources, util
from pathlib import Path
from string import Template
from typing import Annotated

import typer
from rich.console import Console

from ..errors import ConfigError
from ..plugins import registry
from .options import say

_TORCH = '"asyncflow-sdk[torch]"'
KINDS: dict[str, dict[str, str]] = {
    "rollout": {
        "what": "A rollout engine", "file": "engine", "dependencies": _TORCH, "requires": '"torch>=2.6", "transformers>=5"',
        "over": "a Hugging Face model in this process", "use": 'af.Rollout("$name", model="models/mine", group_size=8)',
    },
    "train": {
        "what": "A train engine", "file": "engine", "dependencies": _TORCH, "requires": '"torch>=2.6", "transformers>=5"',
        "over": "a Hugging Face model and AdamW", "use": 'af.Train("$name", model="models/mine", learning_rate=1e-6)',
    },
    "transport": {
        "what": "A weight transport", "file": "transport", "over": "files in the run's shared memory",
        "use": 'af.Workflow(..., weights=af.Weights(transport="$name"))',
    },
    "sampler": {
        "what": "A sampler", "file": "sampler", "over": "one column", "kit": ', options={"column": "response_ids"}',
        "more": " --option column=response_ids",
        "use": 'queue.declare("train", needs=["response_ids"], sampler=("$name", {"column": "response_ids"}))',
    },
    "staleness": {
        "what": "A staleness policy", "file": "policy", "over": 'the rule of "wait"',
        "use": 'af.Workflow(..., staleness=af.Staleness(max_staleness=2, policy="$name"))',
    },
    "algorithm": {
        "what": "An algorithm", "file": "algorithm", "over": "REINFORCE with a baseline",
        "use": 'af.Train("torch", model="models/mine", algorithm="$name")',
    },
    "launcher": {
        "what": "A launcher", "file": "launcher", "over": "processes of this host",
        "use": 'af.Rollout("vllm", model="models/mine", launcher="$name")',
    },
    "tracker": {
        "what": "A tracker", "file": "tracker", "over": "lines of JSON", "use": 'af.Workflow(..., track=["$name"])',
    },
    "store": {
        "what": "A store of payload", "file": "store", "dependencies": '"asyncflow-sdk", "asyncflow-blocks"',
        "over": "files in a folder that all hosts see", "use": 'af.serve("runs/x", address="tcp://0.0.0.0:7000", store="$name")',
    },
}  # fmt: skip
_PLAIN = {"dependencies": '"asyncflow-sdk"', "requires": "", "kit": "", "more": ""}


def write_plugin(name: str, kind: str, folder: Path) -> list[Path]:
    """Write the package into ``folder`` and return its files. Raises ConfigError before anything is
    written."""
    if kind not in KINDS:
        raise ConfigError(f"--kind {kind}: no such kind; there are {', '.join(KINDS)}")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ConfigError(
            f"{name!r} is no name for a package: use lower-case letters, digits and single dashes, for example"
            " my-engine"
        )
    module = name.replace("-", "_")
    if keyword.iskeyword(module) or module == "tests":
        raise ConfigError(f"{name!r} cannot be imported under that name; use another one, for example my-{name}")
    taken = util.find_spec(module)
    if taken is not None and taken.origin is not None:  # None: a mere folder
        raise ConfigError(f"{name!r} would shadow the module {taken.origin}; use another name, for example my-{name}")
    if any((each.spec.kind, each.spec.name) == (kind, name) for each in registry().adapters):
        raise ConfigError(f"a {kind} adapter is named {name!r} already; use another name, for example my-{name}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty: name a new directory with --into")
    cls = "".join(part.capitalize() for part in name.split("-"))
    words = _PLAIN | KINDS[kind] | {"name": name, "module": module, "kind": kind, "cls": cls}
    words["use"] = "    " + Template(words["use"]).substitute(name=name)
    package = folder / module
    written = {
        folder / "pyproject.toml": "pyproject.toml",
        folder / "README.md": "README.md",
        package / "__init__.py": "init.py",
        package / "plugin.py": "plugin.py",
        package / f"{words['file']}.py": f"{kind}.py",
        folder / "tests" / f"test_{module}.py": "test.py",
    }
    for path, source in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        template = resources.files(__package__).joinpath("templates", f"{source}.tmpl").read_text()
        path.write_text(Template(template).substitute(words))
    (package / "py.typed").touch()
    return [*written, package / "py.typed"]


def new_plugin(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the package and of its adapter, for example my-engine.")
    ],
    kind: Annotated[str, typer.Option(help=f"Kind of adapter: {', '.join(KINDS)}.")] = "rollout",
    into: Annotated[Path | None, typer.Option(help="New directory.", show_default="./NAME", metavar="DIR")] = None,
) -> None:
    """Write a new plugin package.

    It works and passes the conformance kit; replace its parts by your own.
    """
    folder = into or Path(name)
    files = write_plugin(name, kind, folder)
    console = Console()
    console.print(f"{folder}: {KINDS[kind]['what'].lower()}, ready to be changed", style="bold", highlight=False)
    say(console, "\n".join(f"  {file.relative_to(folder)}" for file in files))
    more = (_PLAIN | KINDS[kind])["more"]
    lines = (f"cd {folder}", "pip install -e '.[test]'", f"asyncflow check {name} --kind {kind}{more}")
    say(console, "\nNext:")
    say(console, "\n".join(f"  {line}" for line in lines), "cyan")
