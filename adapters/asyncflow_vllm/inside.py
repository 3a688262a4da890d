"""Inside: a vLLM that this process has started, through its asynchronous engine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from asyncflow_sdk.errors import EngineError, EngineGone

from .access import Access, Answer

_Result = TypeVar("_Result")
LOOK_S = 1.0
"""How often it is looked whether a vLLM that does not answer still lives."""
CLOSE_S = 10.0


class Inside(Access):
    """``llm``: an AsyncLLM."""

    def __init__(self, llm: Any) -> None:
        self._llm: Any = llm

    async def prepare(self) -> bool:
        await self._ask(self._llm.get_supported_tasks())
        return all(await self._ask(self._llm.collective_rpc("asyncflow_whole_logprobs")))

    async def answer(self, name: str, prompt: list[int], parameters: Mapping[str, Any]) -> Answer:
        asked = SamplingParams(**parameters, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY)
        try:
            outputs = [output async for output in self._llm.generate(tokens_input(prompt), asked, name)]
        except EngineDeadError as error:
            raise self._gone() from error
        except Exception as error:
            raise EngineError(f"vLLM refused or failed a request: {type(error).__name__}: {error}") from error
        whole = outputs[-1]
        (output,) = whole.outputs
        return Answer(
            output.token_ids,
            () if output.logprobs is None else output.logprobs.logprobs,
            output.finish_reason,
            [(span.version, span.start, span.end) for span in output.weight_versions or ()],
            () if whole.prompt_logprobs is None else whole.prompt_logprobs.logprobs,
        )

    async def abort(self, names: Sequence[str]) -> None:
        await self._llm.abort(list(names))

    async def pause(self) -> None:
        await self._ask(self._llm.pause_generation(mode="keep", clear_cache=True))

    async def take(self, told: str) -> list[tuple[str, list[str]]]:
        await self._ask(self._llm.start_weight_update())
        await self._ask(self._llm.update_weights(WeightTransferUpdateRequest(update_info={"told": told})))
        await self._ask(self._llm.finish_weight_update())
        outcomes = await self._ask(self._llm.collective_rpc("asyncflow_outcome"))
        return [(each["failure"], each["taken"]) for each in outcomes]

    async def name_version(self, version: int) -> None:
        await self._ask(self._llm.update_weight_version(str(version)))

    async def resume(self) -> None:
        await self._ask(self._llm.resume_generation())

    def check_alive(self) -> None:
        if self._llm.errored:
            raise self._gone()

    async def close(self) -> None:
        """Idempotent. Its threads and pipes go with the object, to which nothing refers then, whoever still has the engine."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, timeout=CLOSE_S)

    async def _ask(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """What a call of vLLM comes to, for which it would wait for ever when it dies over it."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=LOOK_S)
                if self._llm.errored and not task.done():
                    raise self._gone()
            return task.result()
        except EngineDeadError as error:
            raise self._gone() from error
        finally:
            task.cancel()

    def _gone(self) -> EngineGone:
        return EngineGone("vLLM's EngineCore has died; why is in the worker's log, above this")
