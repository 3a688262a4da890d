"""Tiny random models as Hugging Face folders, rows drawn from them, weight updates without a transport, forward passes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from asyncflow_sdk.interfaces import Completion, Request, WeightUpdate
from asyncflow_sdk.interfaces.weights import TensorType
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.types import Batch, Sampling
from asyncflow_torch.demo.model import tokenizer

torch.set_num_threads(1)
TransformersEngine: Any = registry().get("rollout", "transformers").load()
TorchEngine: Any = registry().get("train", "torch").load()
LIMIT_S = 60.0
VOCABULARY = 43


def write_model(folder: Path, seed: int = 0, **options: Any) -> str:
    """A random Qwen3 of hidden size 64 with two layers, and the demo's tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=128,
            initializer_range=0.2,  # far from uniform, so that drawing and cutting have something to show
            pad_token_id=0,
            bos_token_id=1,
            **{"tie_word_embeddings": False, "eos_token_id": 2, "intermediate_size": 96} | options,
        )
        Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder."""
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder whose model knows no end token: every response is as long as it may be."""
    return write_model(tmp_path_factory.mktemp("endless"), eos_token_id=None)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder whose output layer is its embedding."""
    return write_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder whose second layer looks back eight tokens only."""
    layers = ["full_attention", "sliding_attention"]
    folder = tmp_path_factory.mktemp("windowed")
    return write_model(folder, use_sliding_window=True, sliding_window=8, layer_types=layers)


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder of another family: learned positions, which end at the context, and tied weights."""
    folder = tmp_path_factory.mktemp("learned")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=128, n_embd=64, n_layer=2, n_head=2, initializer_range=0.2
        )
        config.bos_token_id = config.eos_token_id = None
        GPT2LMHeadModel(config).save_pretrained(folder)
    return str(folder)


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


class Update(WeightUpdate):
    """A version at hand; it announces ``tensors`` unless ``promised`` says otherwise."""

    root = ""

    def __init__(self, tensors: dict[str, Any], version: int = 1, promised: dict[str, Any] | None = None) -> None:
        self.version = version
        self.tensors = {
            name: TensorType(str(t.dtype).removeprefix("torch."), tuple(t.shape))
            for name, t in (promised or tensors).items()
        }
        self._tensors = tensors

    def arrays(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        return ((name, tensor.numpy()) for name, tensor in self._tensors.items())

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._tensors.items())

    def release(self) -> None:
        pass


@pytest.fixture(scope="session")
def make_update() -> type[Update]:
    return Update


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
    """The forward passes of a model in an engine's thread, and a gate before some of them.

    ``shapes``: (rows, tokens) that each pass has read. A pass in ``hold``, counted from 1, waits for `go_on`.
    """

    def __init__(self, *hold: int) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self._hold, self._reached, self._open = set(hold), threading.Event(), threading.Event()
        self._errors: dict[int, Exception] = {}

    def before(self, module: torch.nn.Module, args: Any) -> None:
        """Called by torch before each module; the embedding of tokens is the first of a model's."""
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings == VOCABULARY:
            self.shapes.append(tuple(args[0].shape))
            if len(self.shapes) in self._hold:
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

    def watch(*hold: int) -> Passes:
        made = Passes(*hold)
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
    return Batch.of(
        {
            "prompt_ids": [prompts[g] for g, _ in rows],
            "response_ids": [c.token_ids for _, c in rows],
            "logprobs": [c.logprobs for _, c in rows],
            "reward": rewards,
        },
        groups=[g for g, _ in rows],
    )


@pytest.fixture
def trainer(tiny: str) -> Callable[..., TorchEngine]:
    """Makes train engines of the tiny model, with a learning rate that shows in one step."""
    return lambda folder=tiny, **options: TorchEngine(folder, **{"lr": 1e-3} | options)
