"""The model of the conformance kit: a small random Llama in a folder with common traps for engines.

    kit_model(Path("models/kit"))

- ``generation_config.json`` has narrow sampling and a repetition penalty, which must not affect requests.
- It names an end token missing from ``config.json``. Greedy decoding reaches each of the two after some prompts.
- The tokenizer merges: the text of most ids is encoded as other ids.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .policy import element, no_progress_bar

PAD, BOS, END, END_OF_TURN = range(4)
VOCABULARY, LETTERS = 320, "abcdefghijkl"
_SPECIAL = ("<pad>", "<bos>", "<end>", "<end_of_turn>")
TEMPTING = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.3}
"""What engines take from a folder's generation_config.json unless they are told not to."""


def merging_tokenizer() -> Any:
    """Return a tokenizer of letters, all pairs of them and some triples, merged in random order."""
    random = np.random.default_rng(0)
    pairs = list(itertools.product(LETTERS, LETTERS))
    triples = [(a + b, c) for a, b, c in itertools.product(LETTERS, LETTERS, LETTERS)]
    random.shuffle(pairs)
    random.shuffle(triples)
    merges = [*pairs, *triples][: VOCABULARY - len(_SPECIAL) - len(LETTERS)]
    tokens = [*_SPECIAL, *LETTERS, *map("".join, merges)]
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    made.decoder = decoders.Fuse()
    pad, bos, end, turn = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, bos_token=bos, eos_token=end, additional_special_tokens=[turn],
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def kit_model(folder: Path, *, seed: int = 0, dtype: str = "float32") -> str:
    """Write the model (two layers, hidden size 64, heads of 32, 320 tokens; weights of ``dtype``)
    and its tokenizer; return the path."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, tie_word_embeddings=False,
        initializer_range=0.2,  # far from uniform, so that what is drawn, and by which weights, shows
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=END,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), no_progress_bar():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(element(dtype))
        model.generation_config = GenerationConfig(
            pad_token_id=PAD, bos_token_id=BOS, eos_token_id=[END, END_OF_TURN], **TEMPTING
        )
        model.save_pretrained(folder)
    merging_tokenizer().save_pretrained(folder)
    return str(folder)
