"""Writes docs/engines.md from what the adapters of this repository declare: ``python docs/engines.py``. A test holds the two together.

Plugins import no engine, so that this needs none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pluggy

from asyncflow_sdk import __version__
from asyncflow_sdk.plugins import AdapterSpec, HookSpecs
from asyncflow_sdk.plugins.spec import GROUP

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "engines.md"
HEAD = """# What each engine can

Written by `python docs/engines.py` from what adapters declare in their plugins ([`can=`](reference.md#adapterspec)), by which a run is
checked before anything starts. A dash: the engine has not got it. "Asked": nothing is declared, and the engine is asked in its worker, before the first prompt.
Each has been held to the [conformance kit](conformance.md); with which version of what, the last column says.
"""
FLAGS = {"token_versions": "versions token by token", "logprobs": "probe", "held_weights": "comparing bytes"}
GUIDES = {"deepspeed": "deepspeed.md", "fsdp": "fsdp.md", "vllm": "vllm.md", "sglang": "sglang.md"}


def page() -> str:
    """The whole of it."""
    specs = sorted(declared(), key=lambda spec: spec.name)
    return "\n".join([HEAD, *_rollouts(specs), "", *_trainers(specs), ""])


def declared() -> Iterator[AdapterSpec]:
    """Of every plugin in adapters/ and contrib/."""
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(HookSpecs)
    files = [*ROOT.glob("adapters/*/plugin.py"), *ROOT.glob("contrib/*/*/plugin.py")]
    for file in sorted(files):
        sys.path.insert(0, str(file.parent.parent))
        try:
            manager.register(__import__(f"{file.parent.name}.plugin", fromlist=["plugin"]))
        finally:
            sys.path.pop(0)
    for specs in manager.hook.asyncflow_adapters(sdk=__version__):
        yield from specs


def _rollouts(specs: list[AdapterSpec]) -> Iterator[str]:
    yield "## Rollout engines\n"
    yield f"| engine | how weights come in | {' | '.join(FLAGS.values())} | weights by | tested with |"
    yield "|---|---|" + "---|" * len(FLAGS) + "---|---|"
    for spec in specs:
        if spec.kind == "rollout":
            has = spec.declared("has")
            cells = ["asked" if has is None else "yes" if flag in has else "–" for flag in FLAGS]
            yield _row(
                _name(spec), _said(spec, "swap"), *cells, _said(spec, "transports", "any transport"), spec.tested_text
            )


def _trainers(specs: list[AdapterSpec]) -> Iterator[str]:
    yield "## Train engines\n"
    yield "| engine | processes | tested with |"
    yield "|---|---|---|"
    for spec in specs:
        if spec.kind == "train":
            yield _row(_name(spec), _said(spec, "ranks"), spec.tested_text)


def _name(spec: AdapterSpec) -> str:
    guide = next((GUIDES[start] for start in GUIDES if spec.name.startswith(start)), "")
    name = f"[`{spec.name}`]({guide})" if guide else f"`{spec.name}`"
    return f"{name}<br>`{spec.install}`"


def _said(spec: AdapterSpec, key: str, otherwise: str = "asked") -> str:
    said = spec.declared(key)
    return otherwise if said is None else ", ".join(f"`{each}`" for each in said)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
