"""Prompts from files, tables, data sets and streams: what is read, what is refused with its place, and a stream that goes on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from echo_runs import Driver, column, echo_workflow
from gates import Gates

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError

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


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"read by pyarrow, .*: pip install 'asyncflow-sdk\[data\]'"):
        af.load_prompts(tmp_path / "a.parquet")


# ---- streams

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


def test_a_bad_record_of_a_stream_ends_the_run_with_its_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the stream of prompts, line 20: column 'prompt_ids' is a list of str"):
        echo_workflow(prompts=broken, steps=30).run(tmp_path / "run")
    with pytest.raises(ConfigError, match="prompts are a stream, which is not loaded as a whole"):
        af.load_prompts(plain, "prompt_ids")
