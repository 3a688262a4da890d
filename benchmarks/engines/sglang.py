"""SGLang in this process, through its ``sglang.Engine``."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from asyncflow_sglang.engine import SGLangEngine

from .contender import Contender, Ids


class SGLang(Contender):
    def make(self, model: str, rows: int) -> Any:
        return SGLangEngine(
            model, dtype="float32", max_rows=rows, device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
            max_total_tokens=32768, max_running_requests=rows, mem_fraction_static=0.5, sleep_on_idle=True,
        )  # fmt: skip

    async def generate(self, engine: Any, prompts: Sequence[Ids], n: int, max_tokens: int) -> int:
        inside = engine._link._engine
        asked = {"temperature": 1.0, "max_new_tokens": max_tokens, "ignore_eos": True, "n": n}

        async def answer(prompt: Ids) -> int:
            got = await inside.async_generate(
                input_ids=prompt.tolist(), sampling_params=dict(asked), return_logprob=True, logprob_start_len=-1
            )
            return sum(len(each["output_ids"]) for each in (got if isinstance(got, list) else [got]))

        async def all_of_them() -> int:
            return sum(await asyncio.gather(*(answer(prompt) for prompt in prompts)))

        return await _there(engine, all_of_them())  # type: ignore[no-any-return]

    async def update(self, engine: Any, folder: str) -> None:
        from sglang.srt.managers.io_struct import (
            ContinueGenerationReqInput,
            PauseGenerationReqInput,
            UpdateWeightFromDiskReqInput,
        )

        manager = engine._link._engine.tokenizer_manager

        async def load() -> None:
            await manager.pause_generation(PauseGenerationReqInput(mode="retract"))
            loaded, said, _ = await manager.update_weights_from_disk(UpdateWeightFromDiskReqInput(model_path=folder))
            assert loaded, said
            await manager.continue_generation(ContinueGenerationReqInput())

        await _there(engine, load())


async def _there(engine: Any, work: Coroutine[Any, Any, Any]) -> Any:
    """On the event loop that SGLang has, with nothing of the SDK between."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, engine._link._loop))


contender = SGLang
