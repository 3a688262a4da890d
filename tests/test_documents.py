"""The code people copy: every block of the documents and every example runs."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import warm_python
from documented import PAGES

import asyncflow_sdk as af

REPOSITORY = Path(__file__).parent.parent
BLOCK = re.compile(r"(?:<!-- test: (?P<how>\w+) -->\n)?```python\n(?P<code>.*?)```", re.S)
DOCUMENTS = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
MARKED = [document for document in DOCUMENTS if document not in PAGES]


TALKING_MODEL = """
import pathlib
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from asyncflow_torch.families import family

family("qwen3", pathlib.Path(folder))
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")
tokenizer.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}<end>{% endfor %}"
tokenizer.save_pretrained(folder)
"""
EXACT_MATCH = "def exact_match(response, answer):\n    return [float(a == b) for a, b in zip(response, answer)]\n"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, warmed up for a few steps, and data for 16 prompts."""
    folder = tmp_path_factory.mktemp("start")
    python(folder, "-m", "asyncflow_torch.demo.model", ".", "0", "16")
    return folder


def started(directory: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python in a directory, which is also where it looks for modules and distributions."""
    paths = [str(directory), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [warm_python(), *map(str, arguments)], cwd=directory, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip


def python(directory: Path, *arguments: object) -> str:
    done = started(directory, *arguments)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def script(directory: Path, code: str) -> str:
    """Run code as a file."""
    (directory / "block.py").write_text(code)
    return python(directory, "block.py")


def asyncflow(directory: Path, *arguments: object) -> str:
    return python(directory, "-m", "asyncflow_sdk.cli", *arguments)


def example(name: str, directory: Path, *arguments: object) -> str:
    return python(directory, REPOSITORY / "examples" / f"{name}.py", *arguments)


def trained(name: str, directory: Path, start: Path, *arguments: object) -> str:
    """Run an example that takes a model, its data and a directory."""
    return example(name, directory, start / "model", start / "data.jsonl", "run", *arguments)


def blocks(how: str) -> list[str]:
    found = [match for document in MARKED for match in BLOCK.finditer(document.read_text())]
    assert all(match["how"] for match in found), "every block says how it is tested"
    return [match["code"] for match in found if match["how"] == how]


def given(start: Path) -> str:
    """What a block may use without saying where it is from."""
    data = str(start / "data.jsonl")
    return f"import asyncflow_sdk as af\nmodel = {str(start / 'model')!r}\nprompts = af.load_prompts({data!r})\n"


@pytest.mark.parametrize("code", blocks("run"))
def test_a_block_runs_as_it_stands(tmp_path: Path, start: Path, code: str) -> None:
    out = script(tmp_path, given(start) + code)

    assert "audit()" not in code or "live=0" in out


@pytest.mark.parametrize("code", blocks("prints"))
def test_a_block_prints_what_it_says(tmp_path: Path, code: str) -> None:
    out = script(tmp_path, code)

    assert out.splitlines() == [line.removeprefix("#> ") for line in code.splitlines() if line.startswith("#> ")]


@pytest.mark.parametrize("code", blocks("sglang"))
def test_a_block_for_an_engine_that_is_not_here_makes_what_it_says(code: str) -> None:
    space: dict[str, object] = {}
    exec(code, space)

    assert isinstance(space["rollout"], af.Rollout)


def test_the_agent_of_the_guide_is_imported_and_runs(tmp_path: Path, start: Path) -> None:
    module, code = blocks("agent")
    (tmp_path / "calculator.py").write_text(module)

    script(tmp_path, given(start) + code)

    assert (tmp_path / "runs" / "agent" / "steps" / "000000.safetensors").is_file()


def installed_as_mine(path: Path, code: str) -> None:
    """A distribution of one module, which is a plugin."""
    (path / "mine.py").write_text(code)
    info = path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[asyncflow_sdk]\nmine = mine\n")


def test_the_plugin_of_the_readme_is_found(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(# mine\.py\n.*?)```", PAGES[0].read_text(), re.S)
    installed_as_mine(tmp_path, code)

    assert "mine 1.0" in asyncflow(tmp_path, "plugins", "--json")


@pytest.mark.starts("rollout transformers", "train torch", "transport file")
def test_a_file_of_the_documents_is_a_workflow(tmp_path: Path, start: Path) -> None:
    marked = r"<!-- test: workflow -->\n```toml\n(.*?)```"
    texts = [text for document in MARKED for text in re.findall(marked, document.read_text(), re.S)]
    assert texts
    for name in ("model", "data.jsonl"):
        (tmp_path / name).symlink_to(start / name)
    (tmp_path / "rewards.py").write_text(
        EXACT_MATCH + "async def politeness(response):\n    return [float('please' in text) for text in response]\n"
    )
    for number, text in enumerate(texts):
        (tmp_path / "train.toml").write_text(text)
        out = asyncflow(tmp_path, "run", "train.toml", f"run-{number}", "--set", "steps=2")
        assert "2 steps of" in out
        assert json.loads((tmp_path / f"run-{number}" / "summary.json").read_text())["steps"] == 2


@pytest.mark.starts(
    "docs/data.md: asyncflow run gsm8k.toml --print",
    "docs/data.md: asyncflow run gsm8k.toml runs/gsm8k",
    "docs/data.md: asyncflow export runs/gsm8k my-model --best",
)
def test_mathematics_run_from_the_data_set_to_the_exported_model(tmp_path: Path) -> None:
    # given a random model of the same class in the hub's cache, under the name of the page
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen3-0.6B" / "snapshots" / ("0" * 40)
    (snapshot.parents[1] / "refs").mkdir(parents=True)
    (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)
    script(tmp_path, f"folder = {str(snapshot)!r}\n{TALKING_MODEL}")
    # and lines of the data set's form
    lines = [{"question": f"Ann has {n} eggs.", "answer": f"She has {n}.\n#### {n}"} for n in range(1000, 1016)]
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = (REPOSITORY / "docs" / "data.md").read_text()
    for name, code in re.findall(r"<!-- test: gsm8k -->\n```\w+\n# (\S+)\n(.*?)```", text, re.S):
        (tmp_path / name).write_text(code)
    smaller = ("steps=2", "batch_size=16", "rollout.sampling.max_tokens=4", "evaluate.every=1")
    changes = [word for change in smaller for word in ("--set", change)]
    env = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}

    # when
    for words in ("run gsm8k.toml --print", "run gsm8k.toml runs/gsm8k", "export runs/gsm8k my-model --best"):
        more = changes if words.startswith("run") else []
        subprocess.run(
            [sys.executable, "-m", "asyncflow_sdk.cli", *words.split(), *more], cwd=tmp_path, env=env, timeout=250, check=True
        )  # fmt: skip

    # then
    assert (tmp_path / "my-model" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "runs" / "gsm8k" / "workflow.json").read_text())["hub"]
    space: dict[str, Any] = {}
    exec((tmp_path / "gsm8k.py").read_text(), space)
    assert space["right"](["It is\n#### $1,018.", "18"], ["#### 1018", "#### 18"]) == [1.0, 0.0]


def test_the_launcher_of_the_documents_is_found_and_starts_workers(tmp_path: Path) -> None:
    (code,) = blocks("plugin_launcher")
    installed_as_mine(tmp_path, code)
    (tmp_path / "work.py").write_text("def double(x):\n    return [2 * float(value) for value in x]\n")

    out = script(
        tmp_path,
        "import work, asyncflow_sdk as af\n"
        "with af.serve('run') as run:\n"
        "    run.queue.put({'x': [1, 2]})\n"
        "    (worker,) = run.start(af.Stage(work.double, task='y', needs=['x'], launcher='nice'))\n"
        "    run.queue.declare('end', needs=['y'])\n"
        "    with run.queue.get('end', 2, at_least=2) as batch: print(batch['y']); batch.ack()\n"
        "    run.queue.end()\n"
        "    assert worker.ended.wait(200) and not worker.lost\n"
        "    try: run.start(af.Stage(work.double, task='z', needs=['x'], launcher='nice', gpus=[0]))\n"
        "    except af.ConfigError as error: print(error)\n",
    )

    assert "[2. 4.]" in out
    assert "gpus= is not for launcher 'nice'" in out


def test_the_plugin_of_the_reference_has_an_algorithm_and_a_tracker_that_work(tmp_path: Path, start: Path) -> None:
    (code,) = blocks("plugin_hook")
    installed_as_mine(tmp_path, code)
    (tmp_path / "functions.py").write_text(EXACT_MATCH)

    listed = json.loads(asyncflow(tmp_path, "plugins", "--json"))
    script(
        tmp_path,
        given(start) + "from functions import exact_match\n"
        "af.Workflow(\n"
        "    prompts=prompts, rollout=af.Rollout('transformers', model=model, group_size=4, sampling=af.Sampling(max_tokens=4)),\n"
        "    reward=exact_match, train=af.Train('torch', model=model, algorithm=('reinforce', {'baseline': 0.25})),\n"
        "    batch_size=16, steps=2, track=['lines'],\n"
        ").run('run')\n",
    )

    assert [a["install"] for a in listed["adapters"] if a["name"] == "far"] == ["pip install 'mine[far]'"]
    assert len((tmp_path / "run" / "lines.txt").read_text().splitlines()) == 2
    steps = [
        line for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines() if '"event":"step"' in line
    ]
    assert all('"ratio":' in line for line in steps)


def test_the_algorithm_of_the_documents_keeps_its_promises_and_trains(tmp_path: Path, start: Path) -> None:
    (code,) = blocks("algorithm")
    assert len(code.splitlines()) <= 26
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "functions.py").write_text(
        "def first(response, answer):\n    return [float(a[:1] == b[:1]) for a, b in zip(response, answer)]\n"
    )

    checked = asyncflow(tmp_path, "check", "mine:LeaveOneOut", "--kind", "algorithm")
    script(
        tmp_path,
        given(start) + "from functions import first\nfrom mine import LeaveOneOut\n"
        "af.Workflow(\n"
        "    prompts=prompts, rollout=af.Rollout('transformers', model=model, group_size=4, sampling=af.Sampling(max_tokens=4)),\n"
        "    reward=first, train=af.Train('torch', model=model, algorithm=LeaveOneOut(most=3.0)), batch_size=16, steps=2,\n"
        ").run('run')\n",
    )

    assert "level reached: full" in checked
    steps = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert sum('"event":"step"' in line and '"weight":' in line for line in steps) == 2


@pytest.mark.starts("examples/ten_lines.py")
def test_the_ten_lines_train_evaluate_and_keep_the_best_version(tmp_path: Path, start: Path) -> None:
    out = trained("ten_lines", tmp_path, start, 2)

    assert "version 1 scored" in out
    assert "version 2 scored" in out
    for folder in ("model", "best", "models/step-000001", "models/step-000002"):
        files = {path.name for path in (tmp_path / "run" / folder).iterdir()}
        assert {"config.json", "tokenizer.json", "model.safetensors"} <= files


def test_an_example_that_is_given_too_little_says_what_it_takes(tmp_path: Path) -> None:
    done = started(tmp_path, REPOSITORY / "examples" / "whole_workflow.py", "model")

    assert done.returncode == 1
    assert "python examples/whole_workflow.py MODEL_FOLDER DATA.jsonl OUT_DIRECTORY [STEPS]" in done.stderr


def test_every_written_loop_names_the_weights_that_it_does_not_train() -> None:
    written = [
        path
        for folder in ("examples", "docs", "asyncflow_sdk", "adapters")
        for path in (REPOSITORY / folder).rglob("*.*")
        if path.suffix in (".py", ".md")
    ]

    loops = {path: re.findall(r"(?:publish|notify)\(.*named_weights\(\).*", path.read_text()) for path in written}

    assert sum(map(len, loops.values())) >= 13
    assert [
        path for path, found in loops.items() if not all("untrained=engine.untrained" in each for each in found)
    ] == []


@pytest.mark.parametrize("name", ["one_file_loop", "own_loop", "streamed_step", "remote_workers"])
@pytest.mark.starts(
    "examples/one_file_loop.py", "examples/own_loop.py", "examples/streamed_step.py", "examples/remote_workers.py"
)
def test_an_example_with_a_loop_of_its_own(tmp_path: Path, start: Path, name: str) -> None:
    out = trained(name, tmp_path, start)

    assert "step 1: reward" in out
    assert "put=128, live=0" in out
    assert out.count("a worker ended with 0") == (2 if name == "remote_workers" else 0)


@pytest.mark.starts("examples/whole_workflow.py")
def test_example_whole_workflow(tmp_path: Path, start: Path) -> None:
    out = trained("whole_workflow", tmp_path, start, 2)

    assert (tmp_path / "run" / "report.html").is_file()
    assert "run/report.html" in out


@pytest.mark.starts("examples/two_engines.py")
def test_example_two_engines(tmp_path: Path, start: Path) -> None:
    out = trained("two_engines", tmp_path, start, 3)

    rows = re.search(r"3 steps; rows by each engine: {'rollout-0': (\d+), 'rollout-1': (\d+)}", out)
    assert rows is not None, out
    assert min(map(int, rows.groups())) > 0


@pytest.mark.starts("examples/dapo_refill.py")
def test_example_dapo_refill(tmp_path: Path, start: Path) -> None:
    out = trained("dapo_refill", tmp_path, start, 2)

    rows = re.search(r"2 full steps; rows consumed 64, filtered (\d+)", out)
    assert rows is not None, out
    assert int(rows[1]) > 0
    for _, batch in af.read_steps(tmp_path / "run"):
        for group in np.unique(batch.groups):
            assert len(set(batch.array("reward")[batch.groups == group])) > 1


@pytest.mark.starts("examples/distillation.py")
def test_example_distillation(tmp_path: Path, start: Path) -> None:
    python(tmp_path, "-c", "from asyncflow_torch.reference import tiny_model as t; t('teacher', ends=True)")

    out = example("distillation", tmp_path, start / "model", "teacher", start / "data.jsonl", "run", 2)

    assert "rollout ── prompt_ids, response_ids, logprobs, version_spans, finish_reason ──▶ train" in out
    assert "closeness to the teacher -" in out
    for _, batch in af.read_steps(tmp_path / "run"):
        gaps = batch.ragged("teacher_logprobs").values - batch.ragged("logprobs").values
        means = np.array([part.mean() for part in np.split(gaps, batch.ragged("logprobs").offsets[1:-1])])
        np.testing.assert_allclose(batch.array("reward"), means, rtol=1e-5)


@pytest.mark.starts("examples/tool_use.py")
def test_example_tool_use(tmp_path: Path, start: Path) -> None:
    out = trained("tool_use", tmp_path, start, 2)

    calls, drawn, observed = map(int, re.findall(r"\d+", out.splitlines()[-1]))
    assert calls > 0
    assert drawn > 2 * 64
    assert observed > calls  # "none", for the most part


@pytest.mark.starts("examples/own_engine.py")
def test_example_own_engine(tmp_path: Path) -> None:
    out = example("own_engine", tmp_path)

    assert "failed" not in out
    assert "level reached: full" in out


def test_the_kit_of_the_documents_runs_under_pytest(tmp_path: Path) -> None:
    (code,) = blocks("conformance")
    (tmp_path / "test_mine.py").write_text(code)

    assert " passed" in python(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py")


def test_the_table_of_checks_is_what_the_command_prints(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / "conformance.md").read_text()
    (table,) = re.findall(r"<!-- checks: .*? -->\n(.*?)<!-- end of checks -->", text, re.S)

    assert asyncflow(tmp_path, "check", "--list", "--markdown") == table


def test_links_of_the_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
    modules = re.findall(r"`(\w+/[\w/]+\.py)`", (REPOSITORY / "docs" / "structures.md").read_text())
    assert [module for module in modules if not (REPOSITORY / "asyncflow_sdk" / module).exists()] == []


def test_each_message_of_the_troubleshooting_is_one_of_the_code() -> None:
    quoted = re.findall(r"^\| `(.+?)` \|", (REPOSITORY / "docs" / "troubleshooting.md").read_text(), re.M)
    texts = "\0".join(text for folder in ("asyncflow_sdk", "adapters") for text in messages(REPOSITORY / folder))

    assert quoted
    assert [each for each in quoted if not re.search(pattern_of(each), texts)] == []


def messages(folder: Path) -> Iterator[str]:
    """Every text of the code, with ... for what is filled in."""
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def pattern_of(quoted: str) -> str:
    """Find it within one text."""
    return "[^\0]*".join(re.escape(part) for part in quoted.split("...") if part)
