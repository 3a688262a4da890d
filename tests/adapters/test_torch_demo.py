"""The demo: its task, its tokenizer under both libraries, its warm-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncflow_sdk.interfaces import Request
from asyncflow_sdk.types import Sampling
from asyncflow_torch.demo.model import warm_up
from asyncflow_torch.demo.task import exact_match, prompts


def test_prompts_ask_for_the_reverse_and_repeat_with_their_seed() -> None:
    rows = prompts(50, seed=3)
    assert rows == prompts(50, seed=3) != prompts(50, seed=4)
    assert rows["prompt"] == [f"{answer[::-1]}=" for answer in rows["answer"]]
    assert all(len(answer) == 5 and answer.isdigit() for answer in rows["answer"])
    assert exact_match(rows["answer"], rows["answer"]) == [1.0] * 50
    assert exact_match(["52413", "5241", "52413 ", ""], ["52413"] * 4) == [1.0, 0.0, 0.0, 0.0]


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo model of five steps: as good as none at the task, but a whole folder."""
    folder = tmp_path_factory.mktemp("demo")
    warm_up(folder, seed=0, target=0.0)
    return folder


@pytest.mark.timeout(900)
def test_warm_up_repeats_with_its_seed_tells_its_progress_and_leaves_torch_as_it_was(
    warmed: Path, tmp_path: Path
) -> None:
    # given torch's generator in some state
    torch.manual_seed(5)
    wanted = torch.rand(1)
    torch.manual_seed(5)
    told: list[Any] = []

    # when
    end = warm_up(tmp_path / "again", seed=0, target=0.0, on_progress=lambda *args: told.append(args))
    drawn = torch.rand(1)
    other = warm_up(tmp_path / "other", seed=1, target=0.0)

    # then
    assert told == [(5, end[1], 0.0)]
    assert end[0] == other[0] == 5
    assert torch.equal(drawn, wanted)
    first, again, third = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (warmed, tmp_path / "again", tmp_path / "other")
    )
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(first["lm_head.weight"], third["lm_head.weight"])


def test_both_tokenizer_libraries_read_the_folder_alike(warmed: Path) -> None:
    # given
    fast = AutoTokenizer.from_pretrained(warmed)
    plain = Tokenizer.from_file(str(warmed / "tokenizer.json"))
    texts = ["31425=", "52413", "a b+9:z ", " "]

    for text in texts:
        # then one id a character, nothing added, and the same text back
        ids = fast(text)["input_ids"]
        assert ids == plain.encode(text).ids
        assert len(ids) == len(text)
        assert fast.decode([*ids, 2, 0, 0], skip_special_tokens=True) == text
        assert plain.decode([*ids, 2, 0, 0], skip_special_tokens=True) == text
    assert fast("0")["input_ids"] == [3]
    assert (len(fast), fast.pad_token_id, fast.bos_token_id, fast.eos_token_id) == (43, 0, 1, 2)
    with pytest.raises(Exception, match="UNK"):
        plain.encode("A")


def test_the_folder_is_what_the_engines_take(warmed: Path, rollout: Any, generate: Any, trainer: Any) -> None:
    ids = np.array(AutoTokenizer.from_pretrained(warmed)("31425=")["input_ids"], np.int32)
    (group,) = generate(rollout(str(warmed)), [Request(ids, Sampling(max_tokens=7), n=8)])
    assert len(group) == 8
    assert sum(t.numel() for _, t in trainer(str(warmed)).named_weights()) == 601920
