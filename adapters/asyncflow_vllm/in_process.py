"""InProcessAccess: a vLLM started by this process, through its asynchronous engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import warnings
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from asyncflow_http.limits import interval
from asyncflow_sdk.errors import EngineError, EngineGone
from asyncflow_sdk.interfaces import StopWatch

from .access import Access, VllmAnswer, Watch
from .registration import owned

_Result = TypeVar("_Result")
LOOK_S = 1.0
"""Interval of checks whether a vLLM that does not answer still lives."""
CLOSE_S = 10.0
_MONITOR = "MPClientEngineMonitor"
"""Name of vLLM's thread that watches its core."""


class InProcessAccess(Access):
    """``config``: a VllmConfig. Raises vLLM's errors if it cannot be started."""

    def __init__(self, config: Any, *, disable_log_stats: bool) -> None:
        super().__init__()
        before = set(threading.enumerate())
        with owned():
            self._llm: Any = AsyncLLM.from_vllm_config(config, disable_log_stats=disable_log_stats)
        self._threads = [each for each in threading.enumerate() if each not in before and each.name == _MONITOR]

    async def prepare(self) -> bool:
        """Start vLLM's output loop, and return log-probs under the whole vocabulary if its workers can."""
        await self._call(self._llm.get_supported_tasks())
        return all(await self._call(self._llm.collective_rpc("asyncflow_whole_logprobs")))

    async def answers(
        self, name: str, prompt: list[int], parameters: Mapping[str, Any], n: int, watch: Watch = None
    ) -> AsyncGenerator[Sequence[VllmAnswer], None]:
        """Run one request of vLLM for all responses; with stop texts, one for each."""
        if watch is not None:
            async with contextlib.aclosing(super().answers(name, prompt, parameters, n, watch)) as watched:
                async for answers in watched:
                    yield answers
            return
        started: dict[int, VllmAnswer] = {}
        self._names[name] = [name]
        try:
            async with contextlib.aclosing(
                self._outputs(name, prompt, parameters, n, **_output(n, parameters["max_tokens"]))
            ) as outputs:
                async for whole in outputs:
                    parts = [_answer(whole, each, started.pop(each.index, None)) for each in whole.outputs]
                    started |= {each.index: each for each in parts if not each.reason}
                    if ended := [each for each in parts if each.reason]:
                        yield ended
        finally:
            del self._names[name]

    async def answer(
        self, index: int, name: str, prompt: list[int], parameters: Mapping[str, Any], watch: StopWatch | None
    ) -> VllmAnswer:
        """Run one request of vLLM for one response, and abort it at a stop text."""
        parts = {"output_kind": RequestOutputKind.CUMULATIVE, "stream_interval": interval(parameters["max_tokens"])}
        answer = VllmAnswer(index, (), (), "abort", ())
        async with contextlib.aclosing(self._outputs(name, prompt, parameters, 1, **parts)) as outputs:
            async for whole in outputs:
                answer = replace(_answer(whole, whole.outputs[0], None), index=index)
                if watch is not None and watch.found(answer.token_ids):
                    if not answer.reason:
                        await self.abort_named([name])
                    answer = replace(answer, reason="stop")
        return answer

    async def _outputs(
        self, name: str, prompt: list[int], parameters: Mapping[str, Any], n: int, **kind: Any
    ) -> AsyncGenerator[Any, None]:
        drawn_by = SamplingParams(**parameters, n=n, flat_logprobs=True, **kind)
        try:
            async with contextlib.aclosing(self._llm.generate(tokens_input(prompt), drawn_by, name)) as outputs:
                async for whole in outputs:
                    yield whole
        except EngineDeadError as error:
            raise self._gone() from error
        except Exception as error:
            raise EngineError(f"vLLM refused or failed a request: {type(error).__name__}: {error}") from error

    async def abort_named(self, names: Sequence[str]) -> None:
        """Abort requests."""
        await self._llm.abort(list(names))

    async def pause(self) -> None:
        """Pause generation and clear the caches."""
        await self._call(self._llm.pause_generation(mode="keep", clear_cache=True))

    async def load(self, handed: str) -> list[tuple[str, list[str]]]:
        """Update the weights, and ask the workers for the outcome."""
        await self._call(self._llm.start_weight_update())
        await self._call(self._llm.update_weights(WeightTransferUpdateRequest(update_info={"handed": handed})))
        await self._call(self._llm.finish_weight_update())
        outcomes = await self._call(self._llm.collective_rpc("asyncflow_outcome"))
        return [(each["failure"], each["taken"]) for each in outcomes]

    async def name_version(self, version: int) -> None:
        """Set vLLM's weight version."""
        await self._call(self._llm.update_weight_version(str(version)))

    async def resume(self) -> None:
        """Resume generation."""
        await self._call(self._llm.resume_generation())

    def check_alive(self) -> None:
        """Raise EngineGone if vLLM has failed."""
        if self._llm.errored:
            raise self._gone()

    async def close(self) -> None:
        """End vLLM. Idempotent. vLLM frees its ZeroMQ context (three threads and their descriptors) and the two pipes
        of each process only when the AsyncLLM is collected, which a stored traceback can delay for ever, and those of
        a killed process when it starts the next one. So all are closed here."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        held = llm.engine_core.resources
        processes = list(getattr(held.engine_manager, "processes", ()))
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # else it logs the end of the core as a failure
        await asyncio.to_thread(llm.shutdown, timeout=CLOSE_S)
        closing = threading.Thread(target=held.ctx.term, name="termination of its ZeroMQ context", daemon=True)
        closing.start()
        if left := await asyncio.to_thread(_join, [closing, *self._threads, *processes]):
            warnings.warn(f"vLLM was closed, and {CLOSE_S:g} s later still runs: {', '.join(left)}", stacklevel=2)
        for process in processes:
            with contextlib.suppress(ValueError):  # it still runs
                process.close()

    async def _call(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Return the result of a call. Raises EngineGone if vLLM dies during it, where the call
        itself would wait for ever."""
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
        return EngineGone("vLLM's EngineCore has died; the worker's log above says why")


def _join(running: Sequence[threading.Thread | BaseProcess]) -> list[str]:
    """Return the names of threads and processes that do not end in time."""
    until = time.monotonic() + CLOSE_S
    for each in running:
        each.join(max(until - time.monotonic(), 0.0))
    return [each.name for each in running if each.is_alive()]


def _output(n: int, max_tokens: int) -> dict[str, Any]:
    """Return the kind of vLLM's output. With ``FINAL_ONLY`` each of several responses would wait
    for the others, so they come in two parts: the first token, and the rest after the end."""
    if n == 1:
        return {"output_kind": RequestOutputKind.FINAL_ONLY}
    return {"output_kind": RequestOutputKind.DELTA, "stream_interval": max_tokens + 1}


def _answer(whole: Any, output: Any, first: VllmAnswer | None) -> VllmAnswer:
    """Append ``output`` to the ``first`` part of its response. The reason is empty until the end."""
    ids: Sequence[int] = output.token_ids
    logprobs: Sequence[float] = () if output.logprobs is None else output.logprobs.logprobs
    return VllmAnswer(
        output.index,
        ids if first is None else [*first.token_ids, *ids],
        logprobs if first is None else [*first.logprobs, *logprobs],
        output.finish_reason or "",
        [(span.version, span.start, span.end) for span in output.weight_versions or ()],
        () if whole.prompt_logprobs is None else whole.prompt_logprobs.logprobs,
    )
