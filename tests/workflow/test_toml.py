"""Workflows as TOML: what Python says can be said there, and what is wrong is told with its key."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from functions import length
from test_stages import Shouting, busy

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError

WHOLE = """\
steps = 12
batch_size = 16
epochs = 50
seed = 3
capacity_rows = 48
on_failure = "continue"
prompts = { prompt_ids = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]] }

[[rollout]]
engine = "echo"
prompt = "prompt_ids"
group_size = 4
delay_s = 0.002
sampling = { max_tokens = 8, seed = 1 }

[[rollout]]
engine = "test_stages:Shouting"
prompt = "prompt_ids"
task = "second"
group_size = 4
replicas = 2
env = { A = "1" }

[reward]
work = "functions:length"
task = "reward"
needs = ["response_ids"]
gives = ["reward"]
batch = 32

[[stages]]
work = "test_stages:busy"
gives = ["busy"]
concurrency = 2

[[stages]]
gives = ["ref_logprobs"]
work = { logprobs = "echo", delay_s = 0.0 }

[[stages]]
work = { generate = "echo", sampling = { temperature = 0, max_tokens = 2 } }
needs = ["response_ids"]
gives = ["said"]

[train]
engine = "echo"
needs = ["busy", "ref_logprobs", "said", "second_response_ids"]
algorithm = { name = "grpo", clip_high = 0.3 }

[staleness]
max_staleness = 2

[weights]
transport = "file"
swap = "boundary"
options = { path = "./versions" }
"""


def given_file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return file


def in_python(tmp_path: Path) -> af.Workflow:
    sampling = af.Sampling(max_tokens=8, seed=1)
    return af.Workflow(
        prompts={"prompt_ids": [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]},
        rollout=[
            af.Rollout("echo", prompt="prompt_ids", group_size=4, delay_s=0.002, sampling=sampling),
            af.Rollout(Shouting, prompt="prompt_ids", task="second", group_size=4, replicas=2, env={"A": "1"}),
        ],
        reward=af.Stage(length, task="reward", needs=["response_ids"], gives=["reward"], batch=32),
        stages=[
            af.Stage(busy, gives=["busy"], concurrency=2),
            af.Stage(af.Logprobs("echo", delay_s=0.0), gives=["ref_logprobs"]),
            af.Stage(
                af.Generate("echo", sampling=af.Sampling(temperature=0, max_tokens=2)), needs=["response_ids"],
                gives=["said"],
            ),
        ],
        train=af.Train(
            "echo", needs=["busy", "ref_logprobs", "said", "second_response_ids"], algorithm=af.GRPO(clip_high=0.3)
        ),
        batch_size=16, steps=12, epochs=50, seed=3, capacity_rows=48, on_failure="continue",
        staleness=af.Staleness(max_staleness=2),
        weights=af.Weights(transport="file", swap="boundary", options={"path": str(tmp_path / "versions")}),
    )  # fmt: skip


def test_a_file_says_what_python_says(tmp_path: Path) -> None:
    read, written = af.load_workflow(given_file(tmp_path, WHOLE)), in_python(tmp_path)

    assert read.describe() == written.describe()
    assert str(read) == str(written)
    for ours, theirs in zip(read.plan.stages, written.plan.stages, strict=True):
        assert (ours.declare(), ours.path, ours.whole_groups) == (theirs.declare(), theirs.path, theirs.whole_groups)
        assert getattr(ours.work, "options", None) == getattr(theirs.work, "options", None)
        assert (ours.batch, ours.concurrency) == (theirs.batch, theirs.concurrency)


def test_numbers_of_a_sampling_may_be_written_as_elsewhere(tmp_path: Path) -> None:
    written = WHOLE.replace("{ max_tokens = 8, seed = 1 }", "{ max_tokens = 8.0, seed = 1, top_k = -1 }")

    read = af.load_workflow(given_file(tmp_path, written))

    assert read.plan.rollout.sampling == af.Sampling(max_tokens=8, seed=1)
    with pytest.raises(ConfigError, match="rollout.0.sampling.max_tokens: .*max_tokens must be int, not float: 8.5"):
        af.load_workflow(given_file(tmp_path, written.replace("8.0", "8.5")))


def test_a_workflow_of_a_file_runs(tmp_path: Path) -> None:
    parts = ["rollout.0", "rollout.1", "reward", "stages.0", "stages.1", "stages.2", "train"]
    threads = {f"{part}.launcher": "thread" for part in parts} | {"rollout.1.env": "{}"}
    workflow = af.load_workflow(given_file(tmp_path, WHOLE), threads | {"steps": "3", "weights.swap": "drain"})

    result = workflow.run(tmp_path / "run")

    assert result.summary["steps"] == 3
    assert any((tmp_path / "versions").iterdir())
    _, batch = next(iter(af.read_steps(tmp_path / "run")))
    assert {"said", "busy", "ref_logprobs", "second_response_ids"} <= set(batch)


SMALL = """\
steps = 3
batch_size = 16
reward = "functions:length"
prompts = { prompt_ids = [[1], [2]] }
rollout = { engine = "echo", prompt = "prompt_ids", group_size = 4 }
train = { engine = "echo" }
"""


@pytest.mark.parametrize(
    ("old", "new", "messages"),
    [
        ("batch_size", "batch_sise", ["batch_sise: there is no such key; did you mean 'batch_size'?", "batch_size: the value is missing"]),
        ("batch_size = 16", "batch_size = 18", ["batch_size: batch_size=18 is not a multiple of group_size=4"]),
        ("steps = 3", 'steps = "3"', ["steps: Workflow: steps must be int, not str: '3'"]),
        ("group_size", "groupsize", ["rollout.groupsize: engine 'echo' has no option 'groupsize'; did you mean 'group_size'?"]),
        ("functions:length", "functions:lenght", ["reward: 'functions:lenght' cannot be imported"]),
        ("functions:length", "functions", ['reward: a function is named "module:function"']),
        ("functions:length", "exits_at_once:f", ["reward: importing 'exits_at_once:f' failed: SystemExit: 3"]),
        ("{ prompt_ids = [[1], [2]] }", '"functions:doubled"', ["prompts: doubled.* raised TypeError"]),
        ("{ prompt_ids = [[1], [2]] }", "3", ["prompts: prompts are texts, .*, not int: 3"]),
        ('{ engine = "echo", prompt', '"echo" #', ["rollout: Workflow: rollout must be Rollout or a list of Rollout"]),
        ("steps = 3", 'steps = 3\nlong_prompts = "cut"', ["long_prompts: Workflow: long_prompts must be 'error' or 'drop' or 'truncate_left', not str: 'cut'"]),
        ("steps = 3", "steps = 3\nx = " + "[" * 5000 + "]" * 5000, ["is no TOML: .*recursion"]),
        ("functions:length", "no_such_module:f", ["reward: .*No module named 'no_such_module'"]),
        ("{ prompt_ids = [[1], [2]] }", '"data.jsonl"', ["prompts: there is no file .*data.jsonl"]),
        ("prompt_ids = [[1]", "question = [[1]", ["prompts: the data has no column 'prompt_ids'"]),
        ('{ engine = "echo" }', '"echo"', ["train: a table is expected, not text"]),
        ('{ engine = "echo" }', '{ engine = "ech" }', ["train.engine: no train adapter is named 'ech'"]),
        ('{ engine = "echo" }', "{ delay_s = 1 }", ["train.engine: the value is missing"]),
        ('{ engine = "echo" }', '{ engine = "echo", algorithm = "PPO" }', ["train.algorithm: no algorithm adapter is named 'PPO'"]),
        ('{ engine = "echo" }', '{ engine = "echo", algorithm = { clip_hi = 1 } }', ["train.algorithm.clip_hi: there is no such key; did you mean 'clip_high'"]),
        ('{ engine = "echo" }', '{ engine = "echo" }\n[staleness]\nmax_staleness = -1', ["staleness: max_staleness must be 0"]),
        ('{ engine = "echo" }', '{ engine = "echo" }\n[staleness]\nmax_staleness = 2\npolicy = "no_such_module:P"', ["staleness.policy: 'no_such_module:P' cannot be imported: No module"]),
        ('{ engine = "echo" }', '{ engine = "echo" }\nstaleness = { policy = "dorp" }', ["staleness.policy: no staleness adapter is named 'dorp'"]),
        ("steps = 3", "steps = 3\ncapacity_rows = 8", ["capacity_rows: a queue of capacity_rows=8 is too small"]),
        ("group_size = 4", "group_size = 4, sampling = { max_token = 3 }", ["rollout.sampling.max_token: there is no such key; did you mean 'max_tokens'"]),
        (
            '{ engine = "echo" }', '{ engine = "echo" }\n[[stages]]\nwork = "functions:doubled"\ntask = "a"\nneeds = ["rewards"]',
            ["stages.0: task 'a' needs 'rewards' .did you mean 'reward', of task 'reward'"],
        ),
        ('{ engine = "echo" }', '{ engine = "echo" }\n[[stages]]\nwork = { lopgrobs = "echo" }', ["stages.0.work: an engine's"]),
        ("steps = 3", "steps = = 3", ["is no TOML: .*line 1, column 9"]),
        ('{ engine = "echo" }', '{ engine = "echo" }\n[[stages]]\nwork = "functions:doubled"\n[[stages]]\n"ga in" = 1', ["stages.1.ga in: there is no such key"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_key(tmp_path: Path, old: str, new: str, messages: list[str]) -> None:
    assert old in SMALL
    (tmp_path / "exits_at_once.py").write_text("raise SystemExit(3)\n")
    file = given_file(tmp_path, SMALL.replace(old, new, 1))

    for message in messages:
        with pytest.raises(ConfigError, match=f"(?s)run.toml.*{message}"):
            af.load_workflow(file)


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    file = given_file(tmp_path, SMALL.replace("batch_size = 16", "batch_size = 18").replace('"echo" }', '"ech" }'))

    with pytest.raises(
        ConfigError, match=r"(?s)2 things in .*run.toml cannot work:\n  .*: batch_size: .*\n  .*: train.engine: "
    ):
        af.load_workflow(file)


@pytest.mark.parametrize(
    ("name", "value", "seen"),
    [
        ("steps", "7", lambda flow: flow.plan.options.steps == 7),
        ("train.delay_s", "1e-3", lambda flow: flow.plan.train.options == {"delay_s": 0.001}),
        ("rollout.sampling.max_tokens", "9", lambda flow: flow.plan.rollout.sampling.max_tokens == 9),
        ("weights.transport", "tcp", lambda flow: flow.plan.weights.transport == "tcp"),
        ("weights.probe", "false", lambda flow: flow.plan.weights.probe is False),
        (
            "rollout",
            '[{engine="echo", prompt="prompt_ids", group_size=2}]',
            lambda flow: flow.plan.rollout.group_size == 2,
        ),
    ],
)
def test_a_key_takes_another_value(tmp_path: Path, name: str, value: str, seen: Any) -> None:
    assert seen(af.load_workflow(given_file(tmp_path, SMALL), {name: value}))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("train.learning_rate", "1e-5", "^train.learning_rate=1e-5: engine 'echo' has no option 'learning_rate'"),
        ("stages.0.batch", "1", "^stages.0.batch=1: .*has nothing at stages.0"),
        ("steps.²", "1", "has nothing at steps.²"),
        ("steps.more", "1", "has nothing at steps.more"),
        ("train", "{ delay_s = 1 }", "^train={ delay_s = 1 }: train.engine: the value is missing"),
        ("train.model", "models/mine", "^train.model=models/mine: there is no folder models/mine here, and no model"),
    ],
)
def test_a_changed_key_is_named_as_it_was_given(tmp_path: Path, name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        af.load_workflow(given_file(tmp_path, SMALL), {name: value})


def test_paths_are_relative_to_the_file_and_its_folder_is_importable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt_ids": [1, 2]}))
    (tmp_path / "beside_the_file.py").write_text("def one(response_ids):\n    return [1.0 for _ in response_ids]\n")
    text = SMALL.replace("{ prompt_ids = [[1], [2]] }", '"data.jsonl"').replace(
        "functions:length", "beside_the_file:one"
    )
    file = given_file(tmp_path, text.replace('"echo" }', '"echo", model = "no-model", python = ".venv/bin/python" }'))

    with pytest.raises(ConfigError) as caught:
        af.load_workflow(file)

    assert f"train model '{tmp_path / 'no-model'}' is no model folder" in str(caught.value)
    assert f"cannot start '{tmp_path / '.venv/bin/python'}'" in str(caught.value)
    assert str(caught.value).startswith("2 things")


def test_a_run_of_a_file_is_resumed(tmp_path: Path) -> None:
    text = "checkpoint = { every = 1 }\n" + SMALL.replace(
        "group_size = 4", 'group_size = 4, launcher = "thread"'
    ).replace('{ engine = "echo" }', '{ engine = "echo", launcher = "thread" }')
    result = af.load_workflow(given_file(tmp_path, text)).run(tmp_path / "run")

    assert af.Workflow.resume(tmp_path / "run").summary == result.summary
    again = json.loads((tmp_path / "run" / "workflow.json").read_text())["again"]
    assert str(tmp_path) in again["path"]  # where its functions are
    assert again["workflow"]["$type"].endswith(":Workflow")


def test_a_function_that_only_another_interpreter_has_is_not_imported_here(tmp_path: Path) -> None:
    text = SMALL.replace(
        '"functions:length"', '{ work = "not_here:f", task = "reward", needs = ["response_ids"], python = "python3" }'
    )

    (stage,) = af.load_workflow(given_file(tmp_path, text)).plan.stages

    assert stage.path == "not_here:f"
    assert not stage.here


def test_prompts_may_come_from_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "given_prompts.py").write_text("def load():\n    return {'prompt_ids': [[1], [2], [3]]}\n")
    text = SMALL.replace("{ prompt_ids = [[1], [2]] }", '"given_prompts:load"')

    assert af.load_workflow(given_file(tmp_path, text)).plan.data.rows == 3
