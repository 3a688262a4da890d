"""The demo model: 0.6 M parameters and a character tokenizer, warmed up until rewards are not all
zero.

steps, accuracy = warm_up(Path("runs/demo/model"), seed=0)     # a Hugging Face folder, in about 10 s

python -m asyncflow_torch.demo.model FOLDER [ACCURACY] [ROWS]

writes FOLDER/model, warmed up to ACCURACY (0.15), and FOLDER/data.jsonl with ROWS (256) prompts and answers.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from asyncflow_sdk.errors import EngineError
from asyncflow_sdk.types import Ragged, Sampling

from ..generation.decode import Decoder
from ..generation.sequence_slots import DecodeWork
from ..policy import no_progress_bar
from .task import DIGITS, exact_match, prompts

PAD, BOS, EOS = 0, 1, 2
_SPECIAL = ("<pad>", "<bos>", "<eos>")
_VOCABULARY = (*_SPECIAL, *"0123456789+=:abcdefghijklmnopqrstuvwxyz ")
_MAX_STEPS = 1000
_ROWS = 128  # of a training step
_SAMPLES = 256  # of a check
_CHECK_EVERY = 5
_TOKENS = DIGITS + 2  # room for one digit too many before the end token


def tokenizer(*, ends: bool = True) -> Any:
    """43 entries, one token a character; unknown characters are an error, nothing is added around a
    text. ``ends``: name the end token."""
    vocabulary = {token: i for i, token in enumerate(_VOCABULARY)}
    made = Tokenizer(models.WordLevel(vocabulary))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    pad, bos, eos = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos if ends else None,
        clean_up_tokenization_spaces=False,
    )


def tiny_model() -> Any:
    """A Qwen3 of 0.6 M parameters, randomly initialised from torch's generator."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(_VOCABULARY),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    )


def warm_up(
    folder: Path,
    *,
    seed: int,
    target: float = 0.15,
    on_progress: Callable[[int, float, float], None] = lambda step, accuracy, target: None,
    threads: int = 1,
) -> tuple[int, float]:
    """Train supervised until the sampled accuracy is ``target``, then write a model folder.

    Calls ``on_progress(step, accuracy, target)`` at every check. Returns the last step and
    accuracy, the same for the same seed with one thread. Raises EngineError if the target is not
    reached.
    """
    tokens = tokenizer()
    with _seeded(seed, threads):
        model = tiny_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, betas=(0.9, 0.95))
        for step in range(1, _MAX_STEPS + 1):
            optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, step / 50)
            _supervised_step(model, optimizer, tokens, prompts(_ROWS, _seed(seed, step, 0)))
            if step % _CHECK_EVERY == 0:
                accuracy = _accuracy(model, tokens, prompts(_SAMPLES, _seed(seed, step, 1)), seed + step)
                on_progress(step, accuracy, target)
                if accuracy >= target:
                    _save(model, tokens, folder)
                    return step, accuracy
    raise EngineError(f"seed {seed} did not reach an accuracy of {target} in {_MAX_STEPS} steps; try another")


def _seed(seed: int, step: int, use: int) -> int:
    """Return a seed for the rows of a step, distinct for each step and use."""
    return (seed * _MAX_STEPS + step) * 2 + use


def _supervised_step(model: Any, optimizer: Any, tokens: Any, rows: dict[str, list[str]]) -> None:
    texts = [prompt + answer for prompt, answer in zip(rows["prompt"], rows["answer"], strict=True)]
    ids = torch.tensor([[*row, EOS] for row in tokens(texts)["input_ids"]])
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, DIGITS:]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, DIGITS + 1 :].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _accuracy(model: Any, tokens: Any, rows: dict[str, list[str]], seed: int) -> float:
    """The share of prompts answered rightly by one response each, at temperature 1."""
    decoder, sampling = Decoder(model, [EOS]), Sampling(max_tokens=_TOKENS)
    works = [
        DecodeWork(i, np.array(ids, np.int32), 1, sampling, seed=seed * _SAMPLES + i)
        for i, ids in enumerate(tokens(rows["prompt"])["input_ids"])
    ]
    parts = decoder.admit(works)
    while decoder.rows:
        parts.append(decoder.step())
    done = [part for part in parts if part is not None]
    texts = tokens.batch_decode(
        list(Ragged.concat([part.ragged["token_ids"] for part in done])), skip_special_tokens=True
    )
    answers = [rows["answer"][i] for part in done for i in part.work]
    return sum(exact_match(texts, answers)) / len(answers)


def _save(model: Any, tokens: Any, folder: Path) -> None:
    model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    with no_progress_bar():
        model.save_pretrained(folder)
    tokens.save_pretrained(folder)


@contextlib.contextmanager
def _seeded(seed: int, threads: int) -> Iterator[None]:
    """torch seeded and on ``threads`` threads, and as it was afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(before)


def main(out: str, accuracy: str = "0.15", rows: str = "256") -> None:
    """Write a model and its data."""
    folder = Path(out)
    step, reached = warm_up(folder / "model", seed=0, target=float(accuracy))
    columns = prompts(int(rows), seed=0)
    records = (json.dumps(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True))
    (folder / "data.jsonl").write_text("".join(f"{record}\n" for record in records))
    print(f"{folder / 'model'}: {step} steps, right with {reached:.2f}; {folder / 'data.jsonl'}: {rows} lines")


if __name__ == "__main__":
    main(*sys.argv[1:]) if sys.argv[1:] else sys.exit(__doc__)
