"""Tiny random models as Hugging Face folders, rows drawn from them, weight updates without a transport, receivers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dist_ends import Crew, Receiver
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from asyncflow_sdk.interfaces import Completion, Request, WeightUpdate
from asyncflow_sdk.interfaces.weights import TensorType
from asyncflow_sdk.types import Batch, Sampling
from asyncflow_torch.demo.model import tokenizer
from asyncflow_torch.rollout import TransformersEngine
from asyncflow_torch.train import TorchEngine

torch.set_num_threads(1)


def write_model(folder: Path, seed: int = 0, **options: Any) -> str:
    """A random Qwen3 of hidden size 64 with two layers, and the demo's tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=43,
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
        config = GPT2Config(vocab_size=43, n_positions=128, n_embd=64, n_layer=2, n_head=2, initializer_range=0.2)
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


async def until(condition: Callable[[], object]) -> None:
    """Wait for what happens in the decode thread."""
    while not condition():
        await asyncio.sleep(0.001)  # spinning would keep the interpreter's lock from it


@pytest.fixture(scope="session")
def busy() -> Callable[[TransformersEngine], Awaitable[None]]:
    """Waits until an engine decodes something."""
    return lambda engine: until(lambda: engine._thread._decoder.rows)


@pytest.fixture(scope="session")
def idle() -> Callable[[TransformersEngine], Awaitable[None]]:
    """Waits until an engine decodes nothing."""
    return lambda engine: until(lambda: not engine._thread._decoder.rows)


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


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """So many receivers, which live on for the next test unless they died in this one, or it failed."""
    everybody: list[Receiver] = []

    def alive(count: int) -> list[Receiver]:
        for lost in [each for each in everybody if each.owes or each.child._process.poll() is not None]:
            everybody.remove(lost)
            lost.child.kill()
        while len(everybody) < count:
            everybody.append(stack.enter_context(Receiver(f"r{next(numbers)}")))
        return everybody[:count]

    numbers = itertools.count()
    with contextlib.ExitStack() as stack:
        yield alive
