"""VllmEngine: generates with vLLM, whose engine runs in processes of its own.

    af.Rollout("vllm", model="models/mine", tensor_parallel=2, max_rows=256)

New weights are not sent to vLLM: its workers are told where the bytes lie that the SDK has fetched and verified. See `weight_engine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from asyncflow_sdk.errors import ConfigError, EngineError, EngineGone, WeightError, WeightMismatch
from asyncflow_sdk.interfaces import Capabilities, Completion, Request, RolloutEngine, WeightUpdate
from asyncflow_sdk.weights import Handover

from .checkpoint import Checkpoint, first_equal
from .registering import owned

_Result = TypeVar("_Result")
LOOK_S = 1.0
"""How often it is looked whether a vLLM that does not answer still lives."""
CLOSE_S = 10.0


class VllmEngine(RolloutEngine):
    """``model``: a Hugging Face folder with safetensors. ``dtype``: vLLM's; "auto" is the folder's. ``max_rows``: responses generated at once
    (vLLM's max_num_seqs). ``context``: the most tokens of prompt and response; None: the model's. ``version``: what the
    folder's weights count as. ``options``: any other engine argument of vLLM (``gpu_memory_utilization``, ``enforce_eager``, ...).

    Log-probs are under the whole vocabulary at the request's temperature (at 1 for greedy), also where top-k or top-p cut the draw. A
    request with a seed repeats its tokens but for rounding, which in vLLM depends on what runs beside it.

    A version must be whole: all tensors of the folder, in its shapes, in its dtypes or in that of the engine.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        tensor_parallel: int = 1,
        max_rows: int = 256,
        context: int | None = None,
        version: int = 0,
        **options: Any,
    ) -> None:
        if max_rows < 1 or tensor_parallel < 1:
            raise ConfigError(f"max_rows and tensor_parallel must be 1 or more, not {max_rows} and {tensor_parallel}")
        from vllm.v1.engine.async_llm import AsyncLLM

        from .requests import Limits, end_tokens
        from .starting import arguments, swaps

        self._checkpoint, swap = Checkpoint(model), swaps()
        made = arguments(
            model, dtype=dtype, tensor_parallel=tensor_parallel, max_rows=max_rows, context=context, options=options
        )
        try:
            config = made.create_engine_config()
            with owned():
                self._llm = AsyncLLM.from_vllm_config(config, disable_log_stats=made.disable_log_stats)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"vLLM cannot be started with {model!r}: {type(error).__name__}: {error}") from error
        self._limits = Limits(
            vocabulary=config.model_config.get_vocab_size(), context=config.model_config.max_model_len, rows=max_rows
        )
        self._checkpoint.dtype = str(config.model_config.dtype).removeprefix("torch.")
        self._ends = end_tokens(model)
        self.capabilities = Capabilities(
            swap=swap, token_versions=True, max_rows=max_rows, context=self._limits.context, logprobs=True
        )
        self._first_version, self._ids = version, itertools.count()
        self._handover = Handover()
        self._running: dict[str, asyncio.Task[Completion]] = {}
        self._interrupted: set[str] = set()
        self._refusal = ""
        self._prepared = False
        self._one = asyncio.Lock()
        """Held by a load, and by what prepares the first request."""

    # ---- generating

    async def generate(self, request: Request) -> AsyncIterator[Completion]:
        """Yield each response as it finishes. Closing the generator aborts what is left."""
        await self._prepare()
        prompt = self._limits.check(request)
        self._check_usable()
        tasks = []
        for index in range(request.n):
            name = f"asyncflow-{next(self._ids)}"
            task = asyncio.create_task(self._respond(name, prompt, request, index), name=name)
            self._running[name] = task
            task.add_done_callback(self._ended)
            tasks.append(task)
        try:
            for each in asyncio.as_completed(tasks):
                yield await each
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _respond(self, name: str, prompt: list[int], request: Request, index: int) -> Completion:
        from .requests import completion, drawing

        self._check_usable()  # a load may have broken off since it was asked for
        if name in self._interrupted:  # before vLLM knew of it
            return Completion(index, (), (), "aborted")
        (output,) = (await self._answer(name, prompt, drawing(request, index, self._ends))).outputs
        reason = output.finish_reason
        if reason == "abort" and name in self._interrupted:
            reason = "aborted"
        elif reason not in ("stop", "length"):
            self._check_usable()
            raise EngineError(f"vLLM ended a request with {reason!r} after {len(output.token_ids)} tokens")
        return completion(index, output, reason, self._first_version)

    async def _answer(self, name: str, prompt: list[int], parameters: Any) -> Any:
        """The one output of a request. Raises EngineError for what vLLM refuses, EngineGone when it is dead."""
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            outputs = [output async for output in self._llm.generate(tokens_input(prompt), parameters, name)]
        except EngineDeadError as error:
            raise self._gone() from error
        except Exception as error:
            raise EngineError(f"vLLM refused or failed a request: {type(error).__name__}: {error}") from error
        return outputs[-1]

    def _ended(self, task: asyncio.Task[Completion]) -> None:
        del self._running[task.get_name()]
        self._interrupted.discard(task.get_name())

    async def interrupt(self) -> None:
        self._interrupted |= self._running.keys()
        await self._llm.abort(list(self._running))

    async def logprobs(
        self, prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[float]]:
        """Log-probs of each response's tokens after its prompt, at temperature 1. A prompt and its response are one token less than the
        context at most. Raises EngineError."""
        await self._prepare()
        self._check_usable()
        if len(prompt_ids) != len(response_ids):
            raise EngineError(f"{len(prompt_ids)} prompts and {len(response_ids)} responses are no pairs")
        pairs = [
            (self._limits.tokens(prompt), self._limits.tokens(response))
            for prompt, response in zip(prompt_ids, response_ids, strict=True)
        ]
        return await asyncio.gather(*(self._score(*pair) for pair in pairs))

    async def _score(self, prompt: list[int], response: list[int]) -> list[float]:
        from .requests import scoring

        if not prompt or len(prompt) + len(response) >= self._limits.context:
            raise EngineError(
                f"a prompt of {len(prompt)} and a response of {len(response)} tokens cannot be scored: the prompt needs 1, and both"
                f" together can be {self._limits.context - 1}"
            )
        if not response:
            return []
        output = await self._answer(f"asyncflow-{next(self._ids)}", prompt + response, scoring())
        return [float(each) for each in output.prompt_logprobs.logprobs[-len(response) :]]

    # ---- new weights

    async def load_weights(self, update: WeightUpdate) -> set[str]:
        """Have every worker of vLLM load the update, between two tokens of what runs.

        Raises WeightMismatch, and goes on under the old weights, for a version that does not fit the model. A load that breaks off in the
        workers leaves a mixture: what runs or waits gets an EngineError, and nothing is generated before a version has
        been loaded whole.
        """
        task = asyncio.ensure_future(self._load(update))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])  # the caller releases the update now, and workers may be reading from it
            raise

    async def _load(self, update: WeightUpdate) -> set[str]:
        await self._prepare()
        async with self._one:
            second = await asyncio.to_thread(self._checkpoint.check, update)
            given = self._handover.give(update)
            told = await asyncio.to_thread(given.__enter__)
            try:
                await self._ask(self._llm.pause_generation(mode="keep", clear_cache=True))
                taken = await self._swapped(update, told, second)
                self._refusal = ""
                await self._ask(self._llm.resume_generation())
                return taken
            finally:
                given.__exit__(None, None, None)

    async def _swapped(self, update: WeightUpdate, told: str, second: dict[str, str]) -> set[str]:
        """The names that were taken; nothing is generated meanwhile."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._llm
        try:
            await self._ask(llm.start_weight_update())
            await self._ask(llm.update_weights(WeightTransferUpdateRequest(update_info={"told": told})))
            await self._ask(llm.finish_weight_update())
            failures, names = zip(*await self._ask(llm.collective_rpc("asyncflow_outcome")), strict=True)
            if any(failures):
                raise WeightError("; ".join(f"rank {rank}: {why}" for rank, why in enumerate(failures) if why))
            taken = await asyncio.to_thread(self._all_taken, update, set().union(*names), second)
            await self._ask(llm.update_weight_version(str(update.version)))
            return taken
        except BaseException as error:
            await self._refuse(f"vLLM holds a mixture of versions and must be loaded anew: {error}")
            if isinstance(error, (EngineGone, WeightMismatch)) or not isinstance(error, Exception):
                raise
            raise WeightError(f"version {update.version} could not be loaded whole: {error}") from error

    def _all_taken(self, update: WeightUpdate, taken: set[str], second: dict[str, str]) -> set[str]:
        """The names whose bytes vLLM holds. Raises WeightMismatch for those that it does not."""
        left = sorted(update.tensors.keys() - taken - second.keys())
        lost = [name for name in left if first_equal(update, name, sorted(taken)) is None]
        if lost:
            raise WeightMismatch(
                f"version {update.version}: vLLM has no place for {', '.join(lost[:10])}, nor are they equal to what is"
                " tied to them in this model"
            )
        return set(update.tensors)

    async def _refuse(self, why: str) -> None:
        """Generate nothing from here on. vLLM stays paused."""
        self._refusal = why
        with contextlib.suppress(Exception):
            await self._llm.abort(list(self._running))

    # ---- the whole of it

    async def close(self) -> None:
        """End vLLM and its processes. Requests still running get an EngineError."""
        self._refusal = self._refusal or "the engine was closed"
        running = list(self._running.values())
        with contextlib.suppress(Exception):
            await self._llm.abort(list(self._running))
        if running:
            await asyncio.wait(running, timeout=CLOSE_S)
        await asyncio.to_thread(self._llm.shutdown, timeout=CLOSE_S)
        self._handover.close()

    async def _prepare(self) -> None:
        """Once, on the loop on which it works."""
        if self._prepared:
            return
        async with self._one:
            if not self._prepared:
                await self._ask(self._llm.get_supported_tasks())
                self._limits.cuts = all(await self._ask(self._llm.collective_rpc("asyncflow_whole_logprobs")))
                self._prepared = True

    async def _ask(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """What a call of vLLM comes to. Raises EngineGone when vLLM dies over it, for which its calls would wait for ever."""
        from vllm.v1.engine.exceptions import EngineDeadError

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

    def _check_usable(self) -> None:
        if self._llm.errored and not self._refusal:
            raise self._gone()
        if self._refusal:
            raise EngineError(self._refusal)
