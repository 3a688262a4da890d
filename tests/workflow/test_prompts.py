"""Prompts from files, tables, data sets and streams: what is read, what is refused with its place, and a stream that goes on."""

from __future__ import annotations

import datetime
import decimal
import importlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import warm_python
from echo_runs import PROMPTS, Driver, column, echo_workflow, events_of
from gates import Gates

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, SchemaError
from asyncflow_sdk.workflow.data import HEAD, PromptStream, Selection, StreamedPrompts
from asyncflow_sdk.workflow.loops.chat import PromptEncoder
from asyncflow_sdk.workflow.loops.tokenizer import Tokenizer

ROWS = [{"prompt": "2+3=", "answer": "5"}, {"prompt": "1+1=", "answer": "2"}]
CHAT = [{"role": "user", "content": "2+3="}]


def files(folder: Path) -> dict[str, Path]:
    """The same rows in each format."""
    import pyarrow
    import pyarrow.parquet

    contents = {
        "rows.jsonl": '{"prompt": "2+3=", "answer": "5"}\n\n{"prompt": "1+1=", "answer": "2"}\n',
        "rows.json": '[{"prompt": "2+3=", "answer": "5"},\n {"prompt": "1+1=", "answer": "2"}]',
        "rows.csv": '\ufeffprompt,answer\n"2+3=",5\n1+1=,2\n',
        "rows.tsv": "prompt\tanswer\n2+3=\t5\n1+1=\t2\n",
    }
    for name, text in contents.items():
        (folder / name).write_text(text)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    return {path.suffix: path for path in folder.iterdir()}


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    datasets = pytest.importorskip("datasets")
    given: dict[str, Any] = {
        **files(tmp_path),
        "list": ROWS,
        "columns": {"prompt": ["2+3=", "1+1="], "answer": ["5", "2"]},
        "table": pyarrow.Table.from_pylist(ROWS),
        "dataset": datasets.Dataset.from_list(ROWS),
        "function": lambda: ROWS,
    }
    for kind, prompts in given.items():
        batch = af.load_prompts(prompts)
        assert {name: batch[name] for name in batch} == {"prompt": ["2+3=", "1+1="], "answer": ["5", "2"]}, kind


@pytest.mark.parametrize("prompts", [[CHAT, CHAT], {"prompt": [CHAT, CHAT]}, [{"prompt": CHAT}, {"prompt": CHAT}]])
def test_chats_and_records_are_columns_as_they_were_given(prompts: Any) -> None:
    batch = af.load_prompts(prompts)
    assert str(batch.spec("prompt")) == "json"
    assert batch["prompt"] == [CHAT, CHAT]
    assert batch.take([1]).to_torch() == {"prompt": [CHAT]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "a"}\n\n{"prompt": 1', r"a.jsonl, line 3: not a JSON object"),
        ("a.jsonl", '{"prompt": "a"}\n\n{"prompt": null}', r"a.jsonl, line 3: column 'prompt' is None"),
        ("a.jsonl", '{"prompt": "a"}\n[1]', r"a.jsonl, line 2: not a JSON object"),
        ("a.jsonl", '{"prompt": "a"}\n{"question": "a"}', "a.jsonl, line 2 differs from the first in its columns: prompt, q"),
        ("a.jsonl", '{"question": "a"}', "a.jsonl: the data has no column 'prompt'; it has: question"),
        ("a.json", '[{"prompt": "a"}, 3]', r"a.json: not a list of JSON objects: .*\$\[1\]"),
        ("a.csv", 'prompt,answer\n"a\nb",1\nc\n', r"a.csv, line 4: 1 fields, and the header has 2"),
        ("a.csv", "", "a.csv: the data set is empty"),
        ("a.csv", b"prompt\n\xff\n", "cannot read prompts from .*a.csv: .*utf-8"),
        ("a.parquet", b"PAR1\x15\x04\xff", "cannot read prompts from .*a.parquet: "),
        ("a.txt", "2+3=", "a.txt, line 1: not a JSON object"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_with_its_file_line_and_reason(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        af.load_prompts(tmp_path / name)


def test_json_lines_of_python_and_of_windows_are_read(tmp_path: Path) -> None:
    lines = ['{"prompt": "a", "x": NaN, "y": {"z": [-Infinity, null]}}', '{"prompt": "b", "x": 1, "y": {"z": 3}}']
    for name, text in (("a.jsonl", "\n".join(lines)), ("a.json", f"[{','.join(lines)}]")):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        batch = af.load_prompts(tmp_path / name)
        assert batch["prompt"] == ["a", "b"]
        assert str(batch["x"]) == "[nan  1.]"
        assert batch["y"] == [{"z": [-math.inf, None]}, {"z": 3}]


# ---- prompts that leave no room


def long_stream() -> Iterator[dict[str, Any]]:
    for number in range(ENDLESS):
        yield {"prompt": " ".join(["1"] * (12 if number % 8 == 7 else 2))}


def long_ids() -> Iterator[dict[str, Any]]:
    for record in long_stream():
        yield {"prompt_ids": [1] * len(record["prompt"].split())}


def small_model(folder: Path) -> None:
    """The tokenizer of the words 1 and 2, and a context of 16 tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"1": 1, "2": 2}))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"max_position_embeddings": 16}')


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize(
    ("column", "short", "long"), [("prompt", "1 2", "1 " * 9 + "2"), ("prompt_ids", [1, 2], [1] * 9 + [2])]
)
def test_held_out_prompts_that_leave_no_room_are_refused_dropped_or_cut(
    tmp_path: Path, column: str, short: Any, long: Any, aside: bool
) -> None:
    small_model(tmp_path)
    place: dict[str, Any] = {"model": tmp_path, "prompt": column}

    def held_out(long_prompts: str) -> af.Workflow:
        evaluation = af.Evaluation(
            prompts={column: [short, long, short]}, every=2, reward=lambda response_ids: [1.0] * len(response_ids),
            rollout=af.Rollout("echo", model=tmp_path, launcher="thread") if aside else None,
            sampling=af.Sampling(max_tokens=8, temperature=0),
        )  # fmt: skip
        return echo_workflow(
            prompts={column: [long] * 4}, rollout=place | {"sampling": af.Sampling(max_tokens=4)},
            evaluate=evaluation, long_prompts=long_prompts,
        )  # fmt: skip

    with pytest.raises(ConfigError, match="held-out prompt 1 has 10 tokens, and 1 of 3 .* max_tokens=8 .* 1 to 8"):
        held_out("error")
    dropped, cut = held_out("drop").plan, held_out("truncate_left").plan
    assert dropped.held_out is not None
    assert cut.held_out is not None
    assert dropped.held_out.rows == 2
    assert [text.split("; ")[1] for text in dropped.warnings] == ["they are left out"]
    last = cut.held_out[column][1]  # a worker cuts texts
    assert last == long if column == "prompt" else last.tolist() == [1] * 7 + [2]
    assert [plan.data.rows for plan in (dropped, cut)] == [4, 4], "training's max_tokens leave room for its prompts"


def test_long_prompts_are_dropped_or_cut_and_counted(tmp_path: Path) -> None:
    small_model(tmp_path)
    text = {"prompt": ["1 2", "1 1 " * 5 + "2 2", "2 1", "1 1"]}
    ids = {"prompt_ids": [[1, 2], [1] * 10 + [2, 2], [2, 1], [1, 1]]}
    given: list[tuple[str, Any]] = [("text", text), ("ids", ids), ("stream", long_stream), ("id-stream", long_ids)]
    for kind, prompts in given:
        for long in ("drop", "truncate_left"):
            workflow = echo_workflow(
                prompts=prompts, long_prompts=long,
                rollout={"model": tmp_path, "sampling": af.Sampling(max_tokens=8), "prompt": "prompt_ids" if "id" in kind else "prompt"},
            )  # fmt: skip
            result = workflow.run(tmp_path / kind / long)
            lengths = {len(row) for row in column(tmp_path / kind / long, "prompt_ids")}
            assert lengths == ({2, 8} if long == "truncate_left" else {2}), (kind, long)
            dropped = result.summary["prompts_left_out"]
            assert dropped == 0 if long == "truncate_left" else dropped >= 1, (kind, long)
    last = [list(row) for row in column(tmp_path / "text" / "truncate_left", "prompt_ids") if len(row) == 8]
    assert last[0] == [1] * 6 + [2, 2], "the end of the prompt is kept"


@pytest.mark.parametrize(("column", "word"), [("prompt", "1 "), ("prompt_ids", [1])])
def test_a_long_record_of_a_stream_is_refused_at_its_head_and_left_out_later(
    tmp_path: Path, column: str, word: Any
) -> None:
    small_model(tmp_path)

    def read(long: int) -> PromptStream:
        workflow = echo_workflow(
            prompts=lambda: ({column: word * (12 if number == long else 2)} for number in range(20)),
            rollout={"model": tmp_path, "sampling": af.Sampling(max_tokens=8), "prompt": column},
        )  # fmt: skip
        assert workflow.plan.stream is not None
        return workflow.plan.stream

    with pytest.raises(ConfigError, match="prompt 7 has 12 tokens"):
        read(7)
    notes = list[str]()
    assert StreamedPrompts(read(13), 1, notes.append).next(20).rows == 19
    reason = "its prompt has 12 tokens, and may have 1 to 8"
    assert notes == [f"record 13 of the stream of prompts is left out: {reason} (1 so far)"]


# ---- as files, by the command

WORDS = ["<unk>", "<|im_start|>", "<|im_end|>", "<|", "im_end", "|>", "user", "assistant", "say", "add", "sub", "1"]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for message in messages %}"
    "<|im_start|>{{ message.role }} {{ message.content }} <|im_end|>{% endfor %}<|im_start|>assistant"
)
LONG = """\
steps = 2
batch_size = 16
prompts = "data.jsonl"
rename = { question = "prompt", "ground truth" = "answer" }
long_prompts = "drop"
reward = "rewards:same"
rollout = { engine = "echo", model = ".", group_size = 4, sampling = { max_tokens = 8 } }
train = { engine = "echo", needs = ["answer"] }
checkpoint = { every = 1 }
"""
CHATS = """\
steps = 1
batch_size = 8
prompts = "data.jsonl"
reward = "rewards:same"
train = { engine = "echo", needs = ["response", "second_prompt_ids", "second_response"] }
[[rollout]]
engine = "echo"
model = "."
group_size = 4
sampling = { max_tokens = 16 }
chat = { tools = "tools" }
[[rollout]]
task = "second"
engine = "echo"
model = "."
group_size = 4
sampling = { max_tokens = 16 }
keep_special = true
chat = { tools = "tools", control_tokens = true }
"""


def run_command(folder: Path, *arguments: str) -> str:
    """Run `asyncflow` in a folder."""
    command = [warm_python(), "-m", "asyncflow_sdk.cli", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def write_model(folder: Path, unknown: str = "<unk>") -> Path:
    """Write a tokenizer with a chat template. ``unknown``: the token of unknown words; one without a number refuses them."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=unknown)
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(WORDS[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text('{"max_position_embeddings": 32}')
    return folder


def write_run(folder: Path, workflow: str, rows: list[Any]) -> None:
    """Write a workflow, its model, its data and its reward."""
    write_model(folder)
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "rewards.py").write_text(
        "def same(response, answer):\n    return [float(a == b) for a, b in zip(response, answer)]\n"
    )
    (folder / "run.toml").write_text(workflow)


def test_a_file_renames_columns_and_drops_long_prompts_and_its_run_goes_on_so(tmp_path: Path) -> None:
    rows: list[Any] = [{"question": "say " * number, "ground truth": f"{number}"} for number in (1, 2, 3, 25)]
    rows[1]["ground truth"] = "say say"
    write_run(tmp_path, LONG, [row | {"note": None} for row in rows])

    said = run_command(tmp_path, "run", "run.toml", "out")
    run_command(tmp_path, "resume", "out", "--set", "steps=3")

    assert "prompt 3 has 25 tokens, and 1 of 4 prompts do not fit" in said
    assert "no task needs note; question is named prompt; ground truth is named answer" in said
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["prompts_left_out"]) == ("completed", 3, 1)
    steps = [batch for _, batch in af.read_steps(tmp_path / "out")]
    assert [batch.rows for batch in steps] == [16] * 3
    answers = {1: "1", 2: "say say", 3: "3"}
    for batch in steps:
        assert not {"question", "ground truth", "note"} & set(batch)
        lengths = batch.ragged("prompt_ids").lengths.tolist()
        assert batch["answer"] == [answers[length] for length in lengths]
        assert batch["reward"].tolist() == [float(length == 2) for length in lengths]


def test_a_file_gives_each_chat_its_tools_and_says_what_becomes_of_control_tokens(tmp_path: Path) -> None:
    add, sub = ({"type": "function", "function": {"name": name, "parameters": None}} for name in ("add", "sub"))
    write_run(
        tmp_path, CHATS, [
            {"prompt": [{"role": "user", "content": "say 1"}], "tools": [add, sub], "answer": "1"},
            {"prompt": [{"role": "user", "content": "say <|im_end|>"}], "tools": json.dumps([sub]), "answer": "2"},
        ],
    )  # fmt: skip

    run_command(tmp_path, "run", "run.toml", "out")

    (_, batch), *_ = af.read_steps(tmp_path / "out")
    names = ("prompt_ids", "second_prompt_ids")
    found = [[" ".join(WORDS[token] for token in ids) for ids in batch[name].tolist()] for name in names]
    assert {*zip(*found, batch["response"], batch["second_response"], strict=True)} == {
        (
            "add sub <|im_start|> user say 1 <|im_end|> <|im_start|> assistant",
            "add sub <|im_start|> user say 1 <|im_end|> <|im_start|> assistant",
            "add sub user say 1 assistant",
            "add sub <|im_start|> user say 1 <|im_end|> <|im_start|> assistant",
        ),
        (
            "sub <|im_start|> user say <| im_end |> <|im_end|> <|im_start|> assistant",
            "sub <|im_start|> user say <|im_end|> <|im_end|> <|im_start|> assistant",
            "sub user say <| im_end |> assistant",
            "sub <|im_start|> user say <|im_end|> <|im_end|> <|im_start|> assistant",
        ),
    }


def chats(*tools: int) -> list[Any]:
    """Chats with so many tools each."""
    add = {"type": "function", "function": {"name": "add"}}
    return [{"prompt": [{"role": "user", "content": "say 1"}], "tools": [add] * count} for count in tools]


def test_prompts_of_a_stream_are_measured_with_their_tools(tmp_path: Path) -> None:
    rollout = {"model": write_model(tmp_path), "prompt": "prompt", "chat": af.Chat(tools="tools")}
    workflow = echo_workflow(
        prompts=lambda: iter(chats(*[1] * HEAD, 99)), long_prompts="drop",
        rollout=rollout | {"sampling": af.Sampling(max_tokens=8)},
    )  # fmt: skip
    stream: Any = workflow.plan.stream

    assert stream.row(chats(2)[0]).rows == 1
    with pytest.raises(SchemaError, match="its prompt has 106 tokens, and may have 1 to 24"):
        stream.row(chats(99)[0])
    with pytest.raises(ConfigError, match=r"needs 'tool' \(did you mean 'tools'"):
        echo_workflow(prompts=chats(1, 2), rollout=rollout | {"chat": af.Chat(tools="tool")})


def test_a_control_token_that_a_tokenizer_cannot_read_as_text_is_a_fault_of_its_row(tmp_path: Path) -> None:
    encoder = PromptEncoder(Tokenizer(str(write_model(tmp_path, "none") / "tokenizer.json")), af.Chat())

    good, bad = encoder.encode([[{"role": "user", "content": text}] for text in ("say 1", "say <unk>")])

    assert isinstance(good, np.ndarray)
    assert "holds the text of a control token, and the tokenizer refuses it: WordLevel error" in str(bad)


def test_empty_prompts_are_named(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"1": 0})).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="prompts: record 1: column 'prompt' is empty"):
        echo_workflow(prompts=["1", ""], rollout={"model": tmp_path, "prompt": "prompt"})


# ---- columns

DAY = datetime.datetime(2020, 1, 2)
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "none": (["a", None], ["a", None]),
    "flag": ([True, None], [True, None]),
    "texts": ([["a", "b"], []], [["a", "b"], []]),
    "date": ([DAY, None], ["2020-01-02T00:00:00", None]),
    "decimal": ([decimal.Decimal("1.50"), decimal.Decimal(2)], ["1.50", "2"]),
    "huge": ([2**70, 1], [2**70, 1]),
    "large": ([2**63, 1], [2**63, 1]),
    "nested": ([{"a": {"b": [None, 1.5]}}, {"a": None}], [{"a": {"b": [None, 1.5]}}, {"a": None}]),
    "ragged": ([[[1, 2], [3]], [[4]]], [[[1, 2], [3]], [[4]]]),
    "empty": ([[], []], [[], []]),
    "mixed": ([1, "one"], [1, "one"]),
    "bytes": ([b"a", None], ["YQ==", None]),
    "ground-truth": (["x", "y"], ["x", "y"]),
    "class": (["x", "y"], ["x", "y"]),
}
"""Columns that are no numbers, texts or records alone: given, and as a function has them."""


def test_any_value_travels_to_the_function_that_needs_it(tmp_path: Path) -> None:
    seen: dict[str, dict[int, Any]] = {name: {} for name in VALUES}

    def judge(**columns: Any) -> list[float]:
        for name, found in seen.items():
            found |= {int(ids[0]): value for ids, value in zip(columns["prompt_ids"], columns[name], strict=True)}
        return [1.0] * len(columns["prompt_ids"])

    data = {"prompt_ids": [[1], [2]], **{name: given for name, (given, _) in VALUES.items()}}
    reward = af.Stage(judge, task="reward", needs=["prompt_ids", "response_ids", *VALUES])
    result = echo_workflow(prompts=data, reward=reward, batch_size=8, steps=1).run(tmp_path / "run")
    assert result.summary["balanced"]
    assert {name: [found[1], found[2]] for name, found in seen.items()} == {
        n: wanted for n, (_, wanted) in VALUES.items()
    }


def test_values_of_tables_data_sets_and_files_are_those_of_lists(tmp_path: Path) -> None:
    pyarrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    # one type a column, as tables have
    names = ("none", "flag", "texts", "date", "decimal", "nested", "ragged")
    columns = {"prompt": ["a", "b"], **{name: VALUES[name][0] for name in names}}
    importlib.import_module("pyarrow.parquet")
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    for kind, prompts in {
        "table": pyarrow.table(columns),
        "dataset": datasets.Dataset.from_dict(columns),
        "parquet": tmp_path / "a.parquet",
    }.items():
        batch = af.load_prompts(prompts)
        found = {name: batch[name] for name in names if name != "decimal"}
        assert found == {name: VALUES[name][1] for name in found}, kind
        assert [float(text) for text in batch["decimal"]] == [1.5, 2.0], kind
    nan = [{"a": math.nan, "b": None}, {"a": 1.0, "b": None}]
    assert str(af.load_prompts({"prompt": ["a", "b"], "x": nan})["x"]) == str(nan)


def test_columns_without_a_task_are_left_out_in_one_line_whatever_they_hold(tmp_path: Path) -> None:
    extra: dict[str, list[Any]] = {f"column {number}": [object()] * 4 for number in range(80)}
    workflow = echo_workflow(
        prompts=PROMPTS | extra | {"reward": [0.5] * 4, "logprobs": ["x"] * 4, "question": ["?"] * 4},
        rename={"question": "asked"}, stages=[af.Stage(lambda asked, data_reward: data_reward, task="kept")], steps=1,
    )  # fmt: skip
    assert set(workflow.plan.data) == {"prompt_ids", "asked", "data_reward"}
    workflow.run(tmp_path / "run")
    (line,) = [
        each["reason"] for each in events_of(tmp_path / "run", "chosen") if each["what"].startswith("columns of")
    ]
    assert line.startswith("no task needs column 0, column 1, ")
    assert line.endswith("column 79, logprobs; reward is named data_reward; question is named asked")
    assert set(column(tmp_path / "run", "data_reward")) == {0.5}


@pytest.mark.parametrize("as_records", [False, True])
def test_a_function_of_all_columns_gets_those_that_a_queue_can_hold(as_records: bool) -> None:
    def judge(response_ids: Any, **columns: Any) -> list[float]:
        return [1.0] * len(response_ids)

    odd: dict[str, list[Any]] = {"ground truth": ["x"] * 4, "image": [object()] * 4}
    data: dict[str, Any] = PROMPTS | odd | {"answer": [1, 2, 3, 4]}
    prompts: Any = data
    if as_records:  # the last one lacks a column
        odd = odd | {"hint": ["?"] * 3}
        prompts = [
            {name: values[row] for name, values in (data | odd).items() if row < len(values)} for row in range(4)
        ]
    evaluation = af.Evaluation(prompts=prompts, every=2, reward=judge)

    plan = echo_workflow(prompts=prompts, reward=judge, evaluate=evaluation).plan

    assert plan.held_out is not None
    assert set(plan.data) == set(plan.held_out) == {"prompt_ids", "answer"}
    assert [set(stage.needs) for stage in plan.stages] == [{"prompt_ids", "response_ids", "answer"}] * 2
    (line,) = [each.reason for each in plan.choices if each.what == "columns of the prompts"]
    assert (
        line
        == f"**columns goes without {', '.join(odd)}: a queue has no such name, type or room, or a record lacks them"
    )
    with pytest.raises(ConfigError, match="column 'image' is of type object"):
        echo_workflow(prompts=prompts, reward=judge, stages=[af.Stage(len, task="a", needs=["image"])])


def test_a_function_of_all_columns_gets_no_more_than_there_is_room_for() -> None:
    def judge(response_ids: Any, **columns: Any) -> list[float]:
        return [1.0] * len(response_ids)

    plan = echo_workflow(prompts=PROMPTS | {f"c{n}": [n] * 4 for n in range(80)}, reward=judge).plan

    taken = [name for name in plan.data if name != "prompt_ids"]
    assert taken == [f"c{n}" for n in range(len(taken))]
    assert len({*plan.data, *(name for node in plan.nodes for name in (*node.needs, *node.gives))}) == 64
    assert f"goes without c{len(taken)}, c{len(taken) + 1}, " in plan.columns.changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": [af.Stage(len, task="a", needs=["ground truth"])]}, r"cannot be named 'ground truth'.*rename=\{'ground truth': 'NAME'\}"),
        ({"stages": [af.Stage(lambda class_: class_, task="a")]}, r"needs 'class_' \(did you mean 'class', .* rename={'class': 'class_'}"),
        ({"stages": [af.Stage(lambda reward, again: again, task="again")]}, "Leave one of these needs out, or name it 'data_again'"),
        ({"rename": {"clas": "label"}}, "rename= names 'clas', and the data has: prompt_ids, ground truth, class"),
        ({"rename": {"prompt_ids": "asked"}}, "the data has no column 'prompt_ids'; it has: asked, ground truth, class"),
        ({"rename": {"class": "again"}, "stages": [af.Stage(len, task="a", needs=["again"])]}, "'class' would be named 'again', as another"),
        ({"stages": [af.Stage(len, task="a", needs=["thing"])]}, "prompts: record 1: column 'thing' is of type object"),
        ({"stages": [af.Stage(len, task="a", needs=["class"], gives=[f"c{i}" for i in range(60)])]}, "give 6. columns, and .* at most 64"),
        ({"evaluate": af.Evaluation(prompts={"prompt_ids": [[1]], "class": [3.5]}, every=1, reward=lambda response_ids: [1.0]),
          "stages": [af.Stage(len, task="a", needs=["class"])]}, "held-out record 0 differs .* column 'class' is fixed int64.*: 3.5"),
    ],
)  # fmt: skip
def test_columns_that_cannot_be_given_are_refused_with_the_cure(changes: dict[str, Any], message: str) -> None:
    ids = PROMPTS["prompt_ids"]
    data = {
        "prompt_ids": ids,
        "ground truth": ["a"] * 4,
        "class": [1, 2, 3, 4],
        "again": [1] * 4,
        "thing": [1, object(), 1, 1],
    }
    with pytest.raises(ConfigError, match=message):
        echo_workflow(prompts=data, **changes)


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"read by pyarrow, .*: pip install 'asyncflow-sdk\[data\]'"):
        af.load_prompts(tmp_path / "a.parquet")


# ---- streams


@pytest.mark.parametrize("long_prompts", ["drop", "truncate_left"])
def test_token_ids_of_a_stream_may_be_arrays_and_bad_ones_are_left_out(long_prompts: str) -> None:
    odd: list[Any] = [np.arange(3), 5, None, np.arange(9), []]
    good = [{"prompt_ids": np.arange(2)}] * HEAD
    stream = PromptStream(lambda: iter([*good]), Selection(prompt="prompt_ids"))
    stream.limit(lambda row: len(row["prompt_ids"][0]), 4) if long_prompts == "drop" else stream.cut(4)

    read: list[Any] = []
    for prompt in odd:
        try:
            read.append(stream.row({"prompt_ids": prompt})["prompt_ids"][0].tolist())
        except SchemaError as error:
            read.append(str(error))

    assert read[0] == [0, 1, 2]
    assert read[3] == ("its prompt has 9 tokens, and may have 1 to 4" if long_prompts == "drop" else [5, 6, 7, 8])
    assert [isinstance(each, str) for each in read] == [False, True, True, long_prompts == "drop", True]


def test_one_split_of_a_dictionary_of_data_sets_is_asked_for() -> None:
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    with pytest.raises(
        ConfigError, match=r"a dictionary of data sets, 'train': give one of them, prompts=data\['train'\]"
    ):
        af.load_prompts(splits)


ENDLESS = 10**9


def shuffled() -> Any:
    """A stream that is shuffled through a buffer, as in training on data that fits no memory."""
    import datasets

    return datasets.IterableDataset.from_generator(_generate).shuffle(seed=3, buffer_size=16)


def _generate() -> Iterator[dict[str, Any]]:
    for number in range(64):
        yield {"prompt_ids": [number + 1, 7]}


def plain() -> Iterator[dict[str, Any]]:
    for number in range(ENDLESS):
        yield {"prompt_ids": [number % 1000 + 1]}


def broken() -> Iterator[dict[str, Any]]:
    for number in range(ENDLESS):
        yield {"prompt_ids": [number + 1]} if number < 20 else {"prompt_ids": ["no", "ids"]}


def streamed(name: str = "shuffled") -> af.Workflow:
    return echo_workflow(
        prompts=globals()[name], steps=6, checkpoint=af.Checkpoint(every=2), train=af.Train("gates:Gated"),
        staleness=af.Staleness(max_staleness=0),
    )  # fmt: skip


def test_a_killed_run_over_a_shuffled_stream_trains_the_prompts_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    # given what an uninterrupted run trains
    streamed().run(tmp_path / "whole")
    whole = sorted(map(tuple, map(list, column(tmp_path / "whole", "prompt_ids"))))
    assert len(set(whole)) == 24
    assert whole[::4] != [(number + 1, 7) for number in range(24)], "the stream is in its own order"
    # when a run is killed in its midst and resumed
    gates = Gates(tmp_path / "gates", 4)
    monkeypatch.setenv("GATES", str(gates.folder))
    driver = Driver(tmp_path / "run", "test_prompts:streamed")
    driver.follow(3)
    driver.kill_all()
    driver.end()
    gates.open(4)
    af.resume(tmp_path / "run")
    # then
    assert sorted(map(tuple, map(list, column(tmp_path / "run", "prompt_ids")))) == whole


def test_a_stream_is_read_on_demand_and_ends_with_its_epochs() -> None:
    # given a stream of three records, put twice
    seen: list[int] = []

    class Records:
        def __init__(self) -> None:
            self.epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[dict[str, Any]]:
            for number in range(3):
                seen.append(number)
                yield {"prompt": f"{self.epoch}-{number}"}

    with af.serve() as run:
        run.queue.declare("train", needs=["prompt"], batch_rows=2)
        feeder = run.feed(Records(), group_size=1, chunk=2, epochs=2)
        # when
        texts = [text for step in run.consumer("train") for text in _acked(step)]
        feeder.join(60)
    # then
    assert texts == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"]
    assert len(seen) == 9, "three for the columns, and each record once an epoch"


def _acked(step: Any) -> list[str]:
    texts: list[str] = step.texts("prompt")
    step.ack()
    return texts


def test_a_run_reads_no_more_of_an_endless_stream_than_it_needs(tmp_path: Path) -> None:
    workflow = echo_workflow(prompts=plain)
    assert "a stream of prompts: prompt_ids" in str(workflow)
    assert workflow.run(tmp_path / "run").summary["steps"] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": (row for row in [{"prompt_ids": [1]}])}, r"an iterator, which .* give the function that makes it"),
        ({"prompts": lambda: iter(())}, "the data set is empty"),
        ({"prompts": lambda: (1 / 0 for _ in "ab")}, "the stream of prompts raised ZeroDivisionError: "),
        ({"prompts": lambda: plain(), "checkpoint": af.Checkpoint()}, "a resumed run reads again .* function of a module"),
    ],
)  # fmt: skip
def test_streams_that_cannot_be_fed_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        echo_workflow(**changes)


CHANGES: dict[int, Any] = {
    20: {"answer": None},
    21: {"answer": 7, "score": 2.0},
    22: {"score": 2.5},
    23: {"note": {"a": [None]}, "more": object()},
    24: {"prompt_ids": None},
    25: {"prompt_ids": []},
}


def changing() -> Iterator[dict[str, Any]]:
    for number in range(ENDLESS):
        record = {"prompt_ids": [number + 1], "answer": "a", "score": 1, "note": "n", **CHANGES.get(number, {})}
        yield {name: value for name, value in record.items() if number != 26 or name not in ("answer", "note")}


def test_records_of_a_stream_that_change_are_cast_or_left_out_by_name(tmp_path: Path) -> None:
    seen: dict[int, Any] = {}

    def judge(prompt_ids: Any, answer: list[str], score: Any) -> list[float]:
        seen.update({int(ids[0]) - 1: pair for ids, *pair in zip(prompt_ids, answer, score.tolist(), strict=True)})
        return [1.0] * len(answer)

    result = echo_workflow(prompts=changing, reward=judge, steps=10).run(tmp_path / "run")
    assert result.summary["prompts_left_out"] == 5
    assert set(range(40)) - set(seen) == {20, 22, 24, 25, 26}
    assert seen[21] == ["7", 2]
    assert seen[23] == ["a", 1]
    notes = [note["text"] for note in events_of(tmp_path / "run", "note") if "left out" in note["text"]]
    assert [note.split("; ")[0] for note in notes] == [
        "record 20 of the stream of prompts is left out: column 'answer' is None",
        "record 22 of the stream of prompts is left out: column 'score' is fixed int64[], and here fixed float64[]: 2.5 (2 so far)",
        "record 24 of the stream of prompts is left out: column 'prompt_ids' is None",
    ]  # fmt: skip


def test_a_feeder_goes_on_behind_records_that_were_left_out() -> None:
    records = [{"prompt": None if number in (9, 14, 16) else f"{number}"} for number in range(19)]
    with af.serve() as run:
        run.queue.declare("train", needs=["prompt"], batch_rows=2)
        # given a put of records 13 and 15
        run.queue.put({"prompt": ["13", "15"]}, key="prompts-13")
        # when
        feeder = run.feed(lambda: iter(records), group_size=1, chunk=2, epochs=1)
        feeder.join(60)
        texts = [text for step in run.consumer("train") for text in _acked(step)]
    # then
    assert texts == ["13", "15", "17", "18"]
    assert feeder.left_out == 3, "the one before the put, too"


def test_a_stream_of_which_nothing_can_be_used_any_more_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="record 1019 .* 'prompt_ids' is a list of str.* So were the 999 before it"):
        echo_workflow(prompts=broken, steps=30).run(tmp_path / "run")
    with pytest.raises(ConfigError, match="prompts are a stream, which is not loaded as a whole"):
        af.load_prompts(plain, "prompt_ids")
