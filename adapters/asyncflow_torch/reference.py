"""HuggingFacePolicy: a model folder for the conformance kit; its answers are computed one sequence
at a time.

    policy = HuggingFacePolicy()                       # a small random Llama, in a folder with common traps for engines
    policy = HuggingFacePolicy("models/mine")          # yours, in the dtype of its weights
"""

from __future__ import annotations

import functools
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from asyncflow_sdk.testing import Policy
from asyncflow_sdk.types import from_torch, to_torch
from asyncflow_sdk.workflow.loops.tokenizer import end_tokens
from asyncflow_sdk.workflow.model_folder import copy_small_files

from .demo.model import BOS, EOS, PAD, tokenizer
from .folder_map import FlatRun, FolderMap, runs_of
from .kit_model import kit_model
from .policy import context_of, element, load_policy, no_progress_bar, vocabulary_of

Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float64]
Weights = Mapping[str, npt.NDArray[Any]]


def tiny_model(folder: Path, *, seed: int = 0, ends: bool = False, dtype: str = "float32", **options: Any) -> str:
    """Write a random Llama of two layers (hidden size 64, heads of 32, 43 tokens) and its
    tokenizer; returns the path.

    ``dtype``: of its weights. ``ends``: whether it has an end token; without, responses are as long
    as they may be. ``options``: of LlamaConfig.
    """
    config: dict[str, Any] = {
        "vocab_size": 43, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256, "tie_word_embeddings": False,
        # far from uniform, so that what is drawn, and by which weights, shows
        "initializer_range": 0.2, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS if ends else None,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]), no_progress_bar():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**config | options)).to(element(dtype))
        model.generation_config = GenerationConfig(
            pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS if ends else None
        )
        model.save_pretrained(folder)
    tokenizer(ends=ends).save_pretrained(folder)
    return str(folder)


class HuggingFacePolicy(Policy):
    """``folder``: a Hugging Face model folder; None makes `kit_model` in a temporary one.
    ``dtype``: of the engines' weights; "auto": the folder's, float32 for a made one.

    Weights are returned in this dtype. Answers are computed from them on the CPU in float32,
    without the rounding of any engine. Version 0 is the folder's. Each later version adds to each
    weight random numbers of its own spread, seeded by version and name.
    """

    def __init__(self, folder: str | None = None, *, dtype: str = "auto") -> None:
        if folder is None:
            self._made = tempfile.TemporaryDirectory(prefix="asyncflow-policy-")
            folder = kit_model(Path(self._made.name), dtype="float32" if dtype == "auto" else dtype)
        self._folder, self._dtype = folder, dtype
        self._model, self._map, self._runs = _in_float32(folder, dtype)
        self.vocabulary, self.context = vocabulary_of(self._model), context_of(self._model) or 1024
        self._first = {name: from_torch(self._map.whole(name, self._runs)).copy() for name in self._map.kinds}
        self.ends = tuple(end_tokens(folder))
        # of the folder's, only where a response ends: what else it asks for (penalties) is no part of the policy
        self._model.generation_config = GenerationConfig(
            eos_token_id=list(self.ends) or None, pad_token_id=self.ends[0] if self.ends else None
        )
        self._held: int | Weights = 0
        self._versions = functools.lru_cache(maxsize=4)(self._changed)
        self._responses = functools.lru_cache(maxsize=256)(self._greedy)
        self._answers = functools.lru_cache(maxsize=64)(self._all_logprobs)

    @property
    def folder(self) -> str:
        """The model folder."""
        return self._folder

    def tensors(self, version: int) -> Weights:
        """Return the weights of a version."""
        return self._versions(version)

    def logprobs(self, version: int, prompt: Ids, response: Ids, temperature: float = 1.0) -> Logprobs:
        """Return log-probs of a response under a version."""
        ids = np.concatenate([prompt, response]).astype(np.int64)
        rows = self._answers(version, ids.tobytes(), temperature)[len(prompt) - 1 : -1]
        return np.asarray(rows[np.arange(len(response)), ids[len(prompt) :]], np.float64)

    def logprobs_of(self, tensors: Weights, prompt: Ids, response: Ids) -> Logprobs:
        """Return log-probs of a response under given weights."""
        if self._held is not tensors:
            self._write(tensors)
            self._held = tensors
        ids = np.concatenate([prompt, response]).astype(np.int64)
        rows = self._scored(ids, 1.0)[len(prompt) - 1 : -1]
        return np.asarray(rows[np.arange(len(response)), ids[len(prompt) :]], np.float64)

    def text(self, ids: Ids) -> str | None:
        """Return the text, None without a tokenizer."""
        tokenizer = self._tokenizer
        return None if tokenizer is None else tokenizer.decode(ids.tolist(), skip_special_tokens=True)

    def retokenised(self, ids: Ids) -> Ids | None:
        """Return the ids after decoding and encoding, None without a tokenizer."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return None
        return np.array(tokenizer.encode(tokenizer.decode(ids.tolist()), add_special_tokens=False), np.int32)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        """None where the folder has none."""
        try:
            return AutoTokenizer.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError):
            return None

    def read(self, folder: Path) -> Weights:
        """Return the weights in a folder."""
        _, found, runs = _in_float32(str(folder), self._dtype)
        return {name: from_torch(found.whole(name, runs)) for name in found.kinds}

    def rounded(self, dtype: str) -> HuggingFacePolicy:
        """Return this policy with weights rounded to bfloat16, stored as ``dtype``."""
        place = tempfile.TemporaryDirectory(prefix="asyncflow-policy-")
        model = load_policy(self._folder, dtype="bfloat16", device="cpu")
        copy_small_files(self._folder, Path(place.name))
        with no_progress_bar():
            (model if dtype == "bfloat16" else model.float()).save_pretrained(place.name)
        policy = HuggingFacePolicy(place.name)
        policy._made = place
        return policy

    def next_logprobs(self, version: int, prompt: Ids, temperature: float = 1.0) -> Logprobs:
        """Return log-probs of all tokens after a prompt."""
        return np.asarray(self._answers(version, prompt.astype(np.int64).tobytes(), temperature)[-1])

    def ahead(self, version: int, prompt: Ids, response: Ids) -> Logprobs:
        """Return log-probs of all tokens at each position of a response."""
        ids = np.concatenate([prompt, response]).astype(np.int64)
        return np.asarray(self._answers(version, ids.tobytes(), 1.0)[len(prompt) - 1 : -1])

    def greedy(self, version: int, prompt: Ids, max_tokens: int) -> Ids:
        """Return the greedy response."""
        return self._responses(version, prompt.astype(np.int64).tobytes(), max_tokens)

    def _greedy(self, version: int, prompt: bytes, max_tokens: int) -> Ids:
        self._hold(version)
        ids = torch.from_numpy(np.frombuffer(prompt, np.int64).copy())[None]
        with torch.inference_mode():
            drawn = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, min_new_tokens=0
            )
        return np.asarray(drawn[0, ids.shape[1] :].numpy(), np.int32)

    def _hold(self, version: int) -> None:
        if not isinstance(self._held, int) or self._held != version:
            self._write(self.tensors(version))
            self._held = version

    def _write(self, tensors: Weights) -> None:
        for name in self._map.kinds:
            self._map.fill(name, to_torch(np.array(tensors[name])), self._runs)

    def _all_logprobs(self, version: int, ids: bytes, temperature: float) -> Logprobs:
        """Of each token after each position: float64 (length, vocabulary)."""
        self._hold(version)
        return self._scored(np.frombuffer(ids, np.int64), temperature)

    def _scored(self, ids: npt.NDArray[np.int64], temperature: float) -> Logprobs:
        with torch.inference_mode():
            tokens = torch.from_numpy(ids.copy())[None]
            logits = self._model(input_ids=tokens, use_cache=False).logits[0].double()
        return np.asarray(torch.log_softmax(logits / (temperature or 1.0), -1).numpy())

    def _changed(self, version: int) -> Weights:
        if version == 0:
            return self._first
        return {name: _noisy(name, array, version) for name, array in self._first.items()}


def _in_float32(folder: str, dtype: str) -> tuple[Any, FolderMap, dict[str, FlatRun]]:
    """Return the model of a folder, with its map and its parameters: the numbers of ``dtype``, in float32."""
    model = load_policy(folder, dtype=dtype, device="cpu").float().requires_grad_(False)
    found, runs = FolderMap.of(model, folder, dtype=dtype), runs_of(model)
    found.exact(runs)
    return model, found, runs


def _noisy(name: str, array: npt.NDArray[Any], version: int) -> npt.NDArray[Any]:
    if not np.issubdtype(array.dtype, np.floating) and array.dtype.kind != "V":
        return array
    random = np.random.default_rng([version, zlib.crc32(name.encode())])
    plain = array.astype(np.float32)
    spread = float(plain.std()) or 0.1 * float(np.abs(plain).mean()) or 0.1
    return (plain + spread * random.standard_normal(plain.shape, np.float32)).astype(array.dtype)
