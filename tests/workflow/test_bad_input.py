"""What users get wrong: a clear error before anything starts, or at once when it happens, with the data kept."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main
from echo_runs import declare_rollout, echo_workflow
from functions import length

import asyncflow_sdk as af
from asyncflow_sdk.cli.worker_command import worker
from asyncflow_sdk.errors import ConfigError, PluginError, SchemaError, WorkerFailed
from asyncflow_sdk.testing import EchoRollout


def typed_stage(*options: str) -> None:
    """``asyncflow worker ADDRESS stage`` with these options."""
    typer.main.get_command(worker).main(["runs/x", "stage", "functions:length", *options], standalone_mode=False)


DATA = type("Dataset", (), {"column_names": ["prompt"]})()
"""A data set, as of the package ``datasets``."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"group_size": 1}}, "group_size is 1.*use groups of 2 or more"),
        ({"batch_size": 18}, "batch_size=18 is not a multiple of group_size=4; use 16"),
        ({"batch_size": 2}, "batch_size=2 is not a multiple of group_size=4; use 4"),
        ({"steps": 0}, "steps must be 1 or more"),
        ({"prompts": []}, "the data set is empty"),
        ({"prompts": {"prompt_ids": af.Ragged.of([])}}, "the data set is empty"),
        ({"prompts": {"question": ["a"]}}, "no column 'prompt_ids'; it has: question"),
        ({"prompts": [{"prompt_ids": [1]}, {"prompt_id": [1]}]}, "record 1 differs from the first in its columns"),
        ({"rollout": {"model": "/no/such/folder"}}, "'/no/such/folder' is no model folder: it has no config.json"),
        ({"reward": af.Stage(length, needs=["answer"], task="reward")}, "'reward' needs 'answer'.*There are"),
        (
            {"reward": af.Stage(length, task="reward", gives=["score"])},
            "task 'train' needs 'reward', which nobody gives; reward=FUNCTION gives it",
        ),
        ({"reward": af.Stage(length, task="train", gives=["reward"])}, "two tasks have the same name"),
        (
            {"rollout": {"sampling": af.Sampling(temperature=0.7)}},
            r"sampled at temperature 0.7.*Train\(..., temperature=0.7\)",
        ),
        ({"rollout": {"sampling": af.Sampling(temperature=0)}}, "temperature 0 draws the same response"),
        ({"rollout": {"replicas": 0}}, "replicas must be 1 or more"),
        ({"rollout": {"delay_s": object()}}, "options travel as JSON"),
        ({"rollout": {"delay_s": [1.0, float("inf")]}}, r"'delay_s': options travel as JSON, and \[1.0, inf\]"),
        ({"batch_size": "16"}, "Workflow: batch_size must be int, not str: '16'"),
        ({"checkpoint": True}, "checkpoint must be Checkpoint or None, not bool"),
        ({"stages": [length]}, "stages must be a list of Stage"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"steps": 10**30}, "steps is 10*, and at most"),
        ({"rollout": {"env": {"A": 1}}}, "Rollout: env must be a mapping of str to str"),
        ({"rollout": {"lease_s": 0}}, "lease_s must be above 0"),
        (
            {"reward": af.Stage(length, gives=["reward"], task="ok"), "prompts": 3},
            "prompts are texts, .*, not int: 3",
        ),
        (
            {"prompts": {"prompt_ids": [[1.5], [2.0, 3.0]]}},
            r"token ids, a list of whole numbers a row, and not ragged float64\[n\]",
        ),
        ({"prompts": {"prompt_ids": [[1], [2, 2**31]]}}, "row 1 has 2147483648, which is no token id"),
        ({"prompts": {"prompt_ids": [[1, -1], [2]]}}, "row 0 has -1, which is no token id"),
        ({"prompts": {"prompt_ids": [[1], []]}}, "^prompts: record 1: column 'prompt_ids' is empty: "),
    ],
)
def test_refused_before_anything_starts(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        echo_workflow(**changes).run(tmp_path / "run")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: af.GRPO(beta=0.1), "did you mean kl=af.KL(coef=...) of the algorithm, with the stage af.Stage(af.Logprobs("),
        (lambda: echo_workflow(train={"lr": 1e-5}), "did you mean learning_rate= of Train? It takes: delay_s"),
        (lambda: af.Workflow(learning_rate=1e-5), "did you mean learning_rate= of Train?"),
        (lambda: echo_workflow(train={"optim": "adamw"}), "weight_decay= of Train: the optimizer is AdamW?"),
        (lambda: echo_workflow(train={"options": {"delay_s": 1}}), "did you mean its names, each as a keyword argument?"),
        (lambda: echo_workflow(rollout={"max_tokens": 7}), "did you mean sampling=af.Sampling(max_tokens=...) of Rollout?"),
        (lambda: echo_workflow(rollout={"num_generations": 8}), "did you mean group_size= of Rollout?"),
        (lambda: af.Workflow(max_steps=8), "did you mean steps= of Workflow?"),
        (lambda: echo_workflow(train={"peft_config": {}}), "LoRA is not supported yet: all weights are trained. It takes"),
        (lambda: af.Workflow(lora_rank=8), "LoRA is not supported yet"),
        (
            lambda: echo_workflow(train={"algorithm": af.GRPO(kl=af.KL(coef=0.1))}),
            "needs 'ref_logprobs', which nobody gives; a stage gives log-probs of a reference model: stages=[af.Stage("
            "af.Logprobs('torch', model=REFERENCE), gives=['ref_logprobs'])]",
        ),
        (lambda: echo_workflow(prompts={"train": DATA, "test": DATA}), "prompts are a DatasetDict, a dictionary of data sets, 'train', 'test': give one of them, prompts=data['train']"),
        (lambda: echo_workflow(prompts=[{"question": "a"}]), "it has: question. Rename a column, or name the column of the prompts: Rollout(prompt=NAME)"),
        (lambda: echo_workflow(rollout={"prompt": "prompt"}, prompts=["a"]), "Rollout('echo') needs model=, or tokenizer=, since prompts are text"),
        (lambda: typed_stage("--needs", "response, answer"), "is several names: give --needs response --needs answer"),
        (lambda: typed_stage("--needs", "response", "--gives", "a,b"), "is several names: give --gives a --gives b"),
    ],
)  # fmt: skip
def test_a_hint_names_the_right_thing(given: Callable[[], Any], words: str) -> None:
    """Names of TRL's options, and arguments given to another class."""
    with pytest.raises((ConfigError, TypeError, typer.BadParameter)) as raised:
        given()

    assert words in str(raised.value)


def test_a_lora_adapter_is_no_model_folder(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")

    with pytest.raises(ConfigError, match="no config.json, but a LoRA adapter, which is not supported yet: merge it"):
        echo_workflow(rollout={"model": str(tmp_path)})


def test_a_prompt_that_the_tokenizer_has_no_tokens_for_is_named(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"1": 0})).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')

    with pytest.raises(ConfigError, match=r"prompts: prompt 1: 'é' cannot be encoded by .*tokenizer.json: "):
        echo_workflow(
            prompts=["1", "é"], rollout={"model": str(tmp_path), "prompt": "prompt"}, reward=lambda response: []
        )


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"transport": "sharedmem"}, "no transport adapter is named 'sharedmem'; installed: .*shm"),
        ({"transport": "tcp", "options": {"lisen": 1}}, "'tcp' has no option 'lisen'; its options: listen, insecure, delta_bytes"),
        ({"options": {"path": 1, "keep": 2}}, "'shm' has no option 'keep', 'path'; it has none"),
        ({"options": {"dtype": "bfloat16"}}, "'dtype' is no option of a transport; give it beside the options"),
        ({"transport": "tcp", "options": {"delta_bytes": "1GB"}}, "'tcp' cannot be made with options .*1GB"),
        ({"transport": "file"}, r"transport 'file' needs a path.*Weights\(transport=.file., options="),
        ({"dtype": "bf16"}, "not 'bf16': use 'bfloat16'"),
        ({"probe": {"a": 1}}, "a probe must be an af.Probe.*not dict"),
        ({"probe": af.Probe(((1,),), ((),))}, "sequence 0 of the probe has no prompt or no response"),
    ],
)  # fmt: skip
def test_weights_that_could_not_be_published_are_refused_before_anything_starts(
    weights: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, PluginError), match=message):
        echo_workflow(weights=af.Weights(**weights))


def test_options_of_the_publisher_itself_pass() -> None:
    assert (
        echo_workflow(
            weights=af.Weights(transport="tcp", options={"digests": False, "insecure": True})
        ).plan.weights.transport
        == "tcp"
    )


def test_a_transport_whose_engine_is_not_there_says_what_brings_it_and_which_need_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("asyncflow_torch.transport")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        PluginError, match=r"transport 'cuda-ipc'.*pip install 'asyncflow-sdk\[torch\]'.*nothing more: .*shm"
    ):
        echo_workflow(weights=af.Weights(transport="cuda-ipc"))


@pytest.mark.parametrize("task", ["", "../x", "a\0b", "x" * 101])
def test_a_task_whose_workers_could_have_no_log_of_its_name_is_refused(task: str) -> None:
    with pytest.raises(ConfigError, match="the name of a task is 1 to 100 letters"):
        af.Stage(length, task=task or " \n")
    with pytest.raises(ConfigError, match="the name of a task is 1 to 100 letters"):
        af.Rollout("echo", task=task)


def test_a_stage_that_yields_is_refused() -> None:
    def yields(response_ids: Any) -> Any:
        yield from response_ids

    with pytest.raises(ConfigError, match="stage 'yields': a function returns its values"):
        af.Stage(yields)


@pytest.mark.parametrize(
    ("ids", "said"),
    [([[1.5, 2.0]], "holds token ids"), ([[[1]], [[2]]], "holds token ids"), ([[1], [2**40]], "row 1 has")],
)
def test_token_ids_that_are_put_by_hand_are_looked_at_too(ids: Any, said: str) -> None:
    with af.serve() as run:
        declare_rollout(run)
        run.queue.declare("train", needs=["response_ids"], batch_rows=len(ids))
        run.queue.put({"prompt_ids": ids})
        run.queue.end()
        with pytest.raises(SchemaError, match=said):
            asyncio.run(asyncio.wait_for(af.EngineProducer(run.queue, EchoRollout()).run(), 60))


def test_an_unknown_engine_lists_the_known_ones() -> None:
    with pytest.raises(
        PluginError, match=r"no rollout adapter is named 'vlm'; installed: .*echo.* Did you mean 'vllm'\?"
    ):
        af.Workflow(
            prompts={"prompt_ids": [[1]]}, rollout=af.Rollout("vlm", prompt="prompt_ids"), reward=length,
            train=af.Train("echo"), batch_size=8, steps=1,
        )  # fmt: skip


def test_a_prompt_that_does_not_fit_the_context_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 16}))

    with pytest.raises(ConfigError, match=r"prompt 1 has 12 tokens, and 1 of 2 prompts do not fit.*context is 16"):
        echo_workflow(
            prompts={"prompt_ids": [[1], [1] * 12]},
            rollout={"model": tmp_path, "sampling": af.Sampling(max_tokens=8)},
        )
    with pytest.raises(
        ConfigError, match=r"^max_tokens=256 leaves no room for a prompt: the model's context is 16; say"
    ):
        echo_workflow(rollout={"model": tmp_path})


def raises(response_ids: Any) -> Any:
    raise KeyError("no such answer")


def says_no_text(response_ids: Any) -> Any:
    raise ValueError("\ud800")


def gives_none_for_the_last(response_ids: Any) -> Any:
    return [*length(response_ids)[:-1], None]


def filters_oddly(response_ids: Any) -> Any:
    return {"reward": length(response_ids), "filtered": np.zeros((len(response_ids), 1), bool)}


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (raises, r"raises\(\) raised KeyError: 'no such answer'\ncalled with response_ids of row"),
        (
            lambda response_ids: [math.nan for _ in response_ids],
            r"<lambda>\(\) returned, as column 'reward', nan\nrow \d+ was given",
        ),
        (lambda response_ids: [1.0] * (len(response_ids) + 1), r"<lambda>\(\) returned \d+ values for"),
        (
            gives_none_for_the_last,
            r"gives_none_for_the_last\(\) returned, as column 'reward', None; a column has one number.*\nrow \d+ was given"
            r" {'response_ids'",
        ),
        (filters_oddly, r"filters_oddly.*returned 'filtered' as bool of \(\d+, 1\)"),
        (says_no_text, r"says_no_text\(\) raised ValueError: \\ud800"),
        (lambda response_ids: sys.exit(0), r"<lambda>\(\) raised SystemExit: 0"),
    ],
)
def test_a_wrong_reward_function_ends_the_run_at_once(tmp_path: Path, reward: Any, message: str) -> None:
    place = {} if reward.__name__ == "<lambda>" else {"launcher": "thread", "max_restarts": 0}
    stage = af.Stage(reward, task="reward", needs=["response_ids"], gives=["reward"], **place)
    with pytest.raises(ConfigError, match=message):
        echo_workflow(reward=stage, max_failed=0).run(tmp_path / "run")

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["balanced"]
    assert summary["rows_put"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": 1}, r"engine 'echo' has no option 'delay'; did you mean 'delay_s'\?"),
        ({"delay_s": "0.1"}, r"engine 'echo', option 'delay_s' must be float, not str: '0.1'"),
    ],
)
def test_a_wrong_option_is_named_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        echo_workflow(train=options)
    with pytest.raises(ConfigError, match=message):
        echo_workflow(stages=[af.Stage(af.Generate("echo", **options), needs=["prompt_ids"], gives=["verdict"])])


def test_a_wrong_option_for_another_interpreter_is_named_by_its_worker(tmp_path: Path) -> None:
    """Nobody knows the engines of that one here."""
    with pytest.raises(
        WorkerFailed, match=r"engine 'echo' has no option 'delay'; did you mean 'delay_s'\? It takes: delay_s"
    ):
        echo_workflow(train={"delay": 1, "python": sys.executable}).run(tmp_path / "run")


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot start '/no/python'"):
        echo_workflow(rollout={"python": "/no/python"}).run(tmp_path / "run")


def test_what_is_no_directory_of_a_run_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for checkpoint in (None, af.Checkpoint()):
        for directory in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(ConfigError, match=f"{directory} cannot be the directory of a run"):
                echo_workflow(checkpoint=checkpoint).run(directory)


def test_prompts_from_a_file_name_the_bad_line(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt_ids": [1, 2]}\n{"prompt_ids": [3]\n')

    with pytest.raises(ConfigError, match=r"data.jsonl, line 2: not a JSON object"):
        echo_workflow(prompts=str(file))
    file.write_bytes(b'{"prompt_ids": [1, 2]}\n{"prompt_ids": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"data.jsonl, line 2: not a JSON object"):
        echo_workflow(prompts=str(file))
    file.write_text('{"prompt_ids": [1, 2]}\n\n{"prompt_ids": [3]}\n')
    assert echo_workflow(prompts=file).plan.data.rows == 2


def test_a_group_larger_than_the_engine_takes_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="groups of 4 do not fit EchoRollout, which generates 2 rows at once"):
        echo_workflow(rollout={"max_rows": 2}).run(tmp_path / "run")


def test_a_listener_that_raises_is_left_out_and_named(tmp_path: Path) -> None:
    def listener(event: object) -> None:
        raise RuntimeError("no screen")

    result = echo_workflow().run(tmp_path / "run", on_event=listener)

    assert result.summary["status"] == "completed"
    assert "no screen" in result.summary["warnings"][0]


class Records:
    """A data set with the methods of ``datasets.Dataset``."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"prompt_ids": self._prompts[index]}


def test_a_data_set_of_another_class_is_taken_as_prompts() -> None:
    data = echo_workflow(prompts=Records([[1, 2], [3]])).plan.data
    assert [list(ids) for ids in data["prompt_ids"]] == [[1, 2], [3]]
