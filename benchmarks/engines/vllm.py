"""vLLM in this process, through its asynchronous engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from asyncflow_vllm.rollout import VllmEngine

from .contender import Contender, Ids


class Vllm(Contender):
    def __init__(self) -> None:
        self._names = itertools.count()

    def make(self, model: str, rows: int) -> Any:
        return VllmEngine(model, dtype="float32", max_rows=rows, enforce_eager=True, kv_cache_memory_bytes=512 << 20)

    async def generate(self, engine: Any, prompts: Sequence[Ids], n: int, max_tokens: int) -> int:
        asked = SamplingParams(
            n=n, temperature=1.0, max_tokens=max_tokens, logprobs=0, flat_logprobs=True, detokenize=False,
            ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip

        async def answer(prompt: Ids) -> int:
            tokens = 0
            async for output in _llm(engine).generate(
                tokens_input(prompt.tolist()), asked, f"plain-{next(self._names)}"
            ):
                tokens += sum(len(each.token_ids) for each in output.outputs)
            return tokens

        return sum(await asyncio.gather(*(answer(prompt) for prompt in prompts)))

    async def update(self, engine: Any, folder: str) -> None:
        llm = _llm(engine)
        await llm.pause_generation(mode="keep", clear_cache=True)
        await llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        await llm.resume_generation()


def _llm(engine: Any) -> Any:
    return engine._access._llm


contender = Vllm
