"""``make bench-engines``: tokens a second and updates, through the SDK against the same engine driven directly.

python -m benchmarks.engines [--only NAME] [--rounds N] [--quick] [--markdown] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics as st
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from ..children import result_of
from ..table import Row, finish, show_options
from .contender import PLACES
from .work import VOCABULARY

LIMIT_S = 900.0
WORK = {"prompts": 16, "n": 8, "max_tokens": 96}
QUICK = {"prompts": 4, "n": 4, "max_tokens": 16}


def make_model(folder: str) -> str:
    from asyncflow_torch.reference import tiny_model

    return tiny_model(
        Path(folder), vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, initializer_range=0.02,
    )  # fmt: skip


def rows_of(name: str, found: dict[str, Any]) -> list[Row]:
    """Ratios are medians of those of each round, in which all ways were measured one after another."""
    rates, updates = found["tokens_s"], found["update_s"]

    def rate(what: str, way: str) -> Row:
        alike = st.median(ours / direct for ours, direct in zip(rates[way], rates["direct"], strict=True))
        return Row(f"{name}: {what}", "tokens/s", st.median(rates[way]), st.median(rates["direct"]), alike)

    alike = st.median(direct / ours for ours, direct in zip(updates["adapter"], updates["direct"], strict=True))
    what = f"{name}: update of {found['nbytes'] / 1e6:.0f} MB, pause of generation"
    return [
        rate("a whole run, its queue in another process", "run"),
        rate("the adapter alone", "adapter"),
        Row(what, "ms", 1e3 * st.median(updates["adapter"]), 1e3 * st.median(updates["direct"]), alike),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="engines whose name contains this")
    parser.add_argument("--quick", action="store_true", help="few tokens: whether it runs, not how fast")
    parser.add_argument("--rounds", type=int, default=5)
    show_options(parser)
    arguments = parser.parse_args()
    console, rows = Console(stderr=True), []
    with tempfile.TemporaryDirectory() as folder:
        asked = {**(QUICK if arguments.quick else WORK), "rounds": 1 if arguments.quick else arguments.rounds}
        options = json.dumps({**asked, "model": make_model(folder)})
        for name, place in PLACES.items():
            if arguments.only.lower() not in name.lower():
                continue
            if not Path(place.python).exists():
                console.print(f"without {name}: its environment is not there ({place.make})", style="yellow")
                continue
            environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
            environment |= place.environment
            command = [place.python, "-m", "benchmarks.engines.drive", name, options]
            rows += rows_of(name, result_of(command, LIMIT_S, console, environment))
    if not rows:
        raise SystemExit("no engine was measured")
    finish(
        f"Engines behind the SDK (ours) and driven directly (peer), medians of {asked['rounds']} interleaved rounds",
        rows,
        arguments,
    )


if __name__ == "__main__":
    main()
