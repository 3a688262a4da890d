"""Tiny random models as Hugging Face folders, rows drawn from them, weight updates without a transport, forward passes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from asyncflow_sdk.interfaces import Completion, Request
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.testing.kit.updates import HeldUpdate
from asyncflow_sdk.types import Batch, Sampling
from asyncflow_sdk.types.dtypes import from_torch
from asyncflow_torch.reference import tiny_model

torch.set_num_threads(1)
TransformersEngine: Any = registry().get("rollout", "transformers").load()
TorchEngine: Any = registry().get("train", "torch").load()
LIMIT_S = 60.0
VOCABULARY = 43


def _folder(name: str, make: Callable[[Path], Any]) -> Any:
    """A fixture: the folder of a model that is made once."""

    @pytest.fixture(scope="session", name=name)
    def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
        made = tmp_path_factory.mktemp(name)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            make(made)
        return str(made)

    return folder


tiny = _folder("tiny", partial(tiny_model, ends=True, max_position_embeddings=128))
"""A random Llama of hidden size 64 with two layers and a context of 128 tokens."""
endless = _folder("endless", partial(tiny_model, max_position_embeddings=128))
"""It knows no end token: every response is as long as it may be."""
tied = _folder("tied", partial(tiny_model, ends=True, max_position_embeddings=128, tie_word_embeddings=True))
"""Its output layer is its embedding."""
_WINDOWED = Qwen3Config(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, max_position_embeddings=128, initializer_range=0.2, use_sliding_window=True,
    sliding_window=8, layer_types=["full_attention", "sliding_attention"], pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
windowed = _folder("windowed", lambda folder: Qwen3ForCausalLM(_WINDOWED).save_pretrained(folder))
"""Of another family; its second layer looks back eight tokens only."""
_LEARNED = GPT2Config(vocab_size=VOCABULARY, n_positions=128, n_embd=64, n_layer=2, n_head=2, initializer_range=0.2)
_LEARNED.bos_token_id = _LEARNED.eos_token_id = None
learned = _folder("learned", lambda folder: GPT2LMHeadModel(_LEARNED).save_pretrained(folder))
"""Of a third family: learned positions, which end at the context, and tied weights."""


@pytest.fixture
def rollout() -> Iterator[Callable[..., TransformersEngine]]:
    """Makes rollout engines and closes them."""
    made: list[TransformersEngine] = []

    def make(folder: str, **options: Any) -> TransformersEngine:
        made.append(TransformersEngine(folder, **options))
        return made[-1]

    yield make
    for engine in made:
        asyncio.run(engine.close())


@pytest.fixture(scope="session")
def make_update() -> Callable[..., HeldUpdate]:
    """Makes a version in memory. It announces ``tensors`` unless ``promised`` says otherwise."""

    def make(tensors: dict[str, Any], version: int = 1, promised: dict[str, Any] | None = None) -> HeldUpdate:
        arrays = [{name: from_torch(each) for name, each in of.items()} for of in (tensors, promised or tensors)]
        made, announced = (HeldUpdate(version, each) for each in arrays)
        made.tensors = announced.tensors
        return made

    return make


def collect(engine: TransformersEngine, requests: list[Request]) -> list[list[Completion]]:
    """All responses of requests made at once, a list a request, by index."""

    async def one(request: Request) -> list[Completion]:
        return sorted([c async for got in engine.generate(request) for c in got.each()], key=lambda c: c.index)

    async def every() -> list[list[Completion]]:
        return await asyncio.gather(*(one(request) for request in requests))

    return asyncio.run(every())


@pytest.fixture(scope="session")
def generate() -> Callable[[TransformersEngine, list[Request]], list[list[Completion]]]:
    return collect


class Passes:
    """The forward passes of a model in an engine's thread, and a gate before some of them: a pass in ``hold``, counted from
    1, or the first one ``of`` a shape waits for `go_on`. ``shapes``: (rows, tokens) read by each pass."""

    def __init__(self, *hold: int, vocabulary: int = VOCABULARY, of: tuple[int, int] | None = None) -> None:
        self.shapes, self._vocabulary, self._of = list[tuple[int, ...]](), vocabulary, of
        self._hold, self._reached, self._open = set(hold), threading.Event(), threading.Event()
        self._errors: dict[int, Exception] = {}

    def before(self, module: torch.nn.Module, args: Any) -> None:
        """Called by torch before each module; the embedding of tokens is the first of a model's."""
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings == self._vocabulary:
            self.shapes.append(tuple(args[0].shape))
            if len(self.shapes) in self._hold or self.shapes[-1] == self._of:
                self._of = None
                self._reached.set()
                assert self._open.wait(LIMIT_S)
                self._open.clear()
            if error := self._errors.pop(len(self.shapes), None):
                raise error

    async def reached(self) -> None:
        """Wait until a pass stands at the gate."""
        assert await asyncio.to_thread(self._reached.wait, LIMIT_S)
        self._reached.clear()

    def go_on(self) -> None:
        self._open.set()

    def hold(self, passes: int) -> None:
        """Hold so many passes from now on."""
        self._hold.add(len(self.shapes) + passes)

    def fail_at(self, number: int, error: Exception) -> None:
        """Raise in a later pass, once."""
        self._errors[number] = error

    async def load(self, engine: Any, *updates: Any) -> set[str]:
        """Load between the pass at the gate and the next one. Returns the names of the last update."""
        loading = [asyncio.ensure_future(engine.load_weights(update)) for update in updates]
        await asyncio.sleep(0)  # each load is queued, and so is whatever else the test has begun
        self.go_on()
        return (await asyncio.gather(*loading))[-1]


@pytest.fixture
def passes() -> Iterator[Callable[..., Passes]]:
    """Watches the passes of the engine that is used next, until the test ends."""
    hooks = []

    def watch(*hold: int, **options: Any) -> Passes:
        made = Passes(*hold, **options)
        hooks.append(torch.nn.modules.module.register_module_forward_pre_hook(made.before))
        return made

    yield watch
    for hook in hooks:
        hook.remove()


@pytest.fixture(scope="session")
def prompts() -> list[np.ndarray[Any, Any]]:
    """Six prompts of 2 to 12 tokens."""
    rng = np.random.default_rng(5)
    return [rng.integers(3, 43, length).astype(np.int32) for length in (6, 2, 12, 6, 9, 4)]


@pytest.fixture(scope="session")
def batch(tiny: str, prompts: list[np.ndarray[Any, Any]]) -> Batch:
    """Rows the tiny model generated: six groups of four, up to nine tokens each, rewarded at random."""
    engine = TransformersEngine(tiny)
    requests = [Request(p, Sampling(max_tokens=9), n=4, seed=i) for i, p in enumerate(prompts)]
    groups = collect(engine, requests)
    asyncio.run(engine.close())
    rows = [(g, c) for g, group in enumerate(groups) for c in group]
    rewards = np.random.default_rng(1).integers(0, 2, len(rows)).astype(np.float32)
    rewards[:4] = 1.0  # a group without spread
    columns = {"response_ids": [c.token_ids for _, c in rows], "logprobs": [c.logprobs for _, c in rows]}
    prompt_ids = [prompts[g] for g, _ in rows]
    return Batch.of({"prompt_ids": prompt_ids, **columns, "reward": rewards}, groups=[g for g, _ in rows])


@pytest.fixture
def trainer(tiny: str) -> Callable[..., TorchEngine]:
    """Makes train engines of the tiny model, with a learning rate that shows in one step."""
    return lambda folder=tiny, **options: TorchEngine(folder, **{"learning_rate": 1e-3} | options)
