"""Inside: a vLLM that this process has started, through its asynchronous engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import warnings
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from asyncflow_sdk.errors import EngineError, EngineGone

from .access import Access, Answer
from .registering import owned

_Result = TypeVar("_Result")
LOOK_S = 1.0
"""How often it is looked whether a vLLM that does not answer still lives."""
CLOSE_S = 10.0
_MONITOR = "MPClientEngineMonitor"
"""vLLM's thread that sees its core end."""


class Inside(Access):
    """``config``: a VllmConfig. Raises what vLLM raises when it cannot be started."""

    def __init__(self, config: Any, *, disable_log_stats: bool) -> None:
        before = set(threading.enumerate())
        with owned():
            self._llm: Any = AsyncLLM.from_vllm_config(config, disable_log_stats=disable_log_stats)
        self._threads = [each for each in threading.enumerate() if each not in before and each.name == _MONITOR]

    async def prepare(self) -> bool:
        await self._ask(self._llm.get_supported_tasks())
        return all(await self._ask(self._llm.collective_rpc("asyncflow_whole_logprobs")))

    async def answers(
        self, name: str, prompt: list[int], parameters: Mapping[str, Any], n: int
    ) -> AsyncGenerator[Sequence[Answer], None]:
        asked = SamplingParams(**parameters, n=n, flat_logprobs=True, **_kind(n, parameters["max_tokens"]))
        begun: dict[int, Answer] = {}
        try:
            async with contextlib.aclosing(self._llm.generate(tokens_input(prompt), asked, name)) as outputs:
                async for whole in outputs:
                    said = [_answer(whole, each, begun.pop(each.index, None)) for each in whole.outputs]
                    begun |= {each.index: each for each in said if not each.reason}
                    if ended := [each for each in said if each.reason]:
                        yield ended
        except EngineDeadError as error:
            raise self._gone() from error
        except Exception as error:
            raise EngineError(f"vLLM refused or failed a request: {type(error).__name__}: {error}") from error

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
        """Idempotent. vLLM leaves its ZeroMQ context, three threads and their descriptors, to whoever collects the AsyncLLM; and a
        frame that some error of its imports has kept may refer to that for ever. So the context is ended here."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        context = llm.engine_core.resources.ctx
        await asyncio.to_thread(llm.shutdown, timeout=CLOSE_S)
        ends = threading.Thread(target=context.term, name="the end of its ZeroMQ context", daemon=True)
        ends.start()
        if left := await asyncio.to_thread(_join, [ends, *self._threads]):
            warnings.warn(f"vLLM was closed, and {CLOSE_S:g} s later is still there: {', '.join(left)}", stacklevel=2)

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


def _join(threads: Sequence[threading.Thread]) -> list[str]:
    """Names of those that do not end in time."""
    until = time.monotonic() + CLOSE_S
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))
    return [thread.name for thread in threads if thread.is_alive()]


def _kind(n: int, max_tokens: int) -> dict[str, Any]:
    """How vLLM gives what it draws. With ``FINAL_ONLY`` one response of several waits for the others. So each comes in two parts:
    its first token, and when it has ended the rest."""
    if n == 1:
        return {"output_kind": RequestOutputKind.FINAL_ONLY}
    return {"output_kind": RequestOutputKind.DELTA, "stream_interval": max_tokens + 1}


def _answer(whole: Any, output: Any, begun: Answer | None) -> Answer:
    """``output`` behind what has come of it before. Without a reason as long as it goes on."""
    ids: Sequence[int] = output.token_ids
    logprobs: Sequence[float] = () if output.logprobs is None else output.logprobs.logprobs
    return Answer(
        output.index,
        ids if begun is None else [*begun.token_ids, *ids],
        logprobs if begun is None else [*begun.logprobs, *logprobs],
        output.finish_reason or "",
        [(span.version, span.start, span.end) for span in output.weight_versions or ()],
        () if whole.prompt_logprobs is None else whole.prompt_logprobs.logprobs,
    )
