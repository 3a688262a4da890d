"""SGLangServer: generates with an SGLang server, one of its own or one that runs already.

    af.Rollout("sglang", model="models/mine", server={"tp_size": 2, "mem_fraction_static": 0.8})
    af.Rollout("sglang", model="models/mine", url="http://127.0.0.1:30000")

Token ids go in and come out. A version goes to the server as a safetensors file in shared memory; what runs then is read anew
by it and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from asyncflow_http.calls import Calls, Dropped
from asyncflow_http.finding import Claim, call_now
from asyncflow_sdk.errors import AsyncFlowError, ConfigError, EngineError, EngineGone, WeightError
from asyncflow_sdk.interfaces import Capabilities, Completion, Request, RolloutEngine, WeightUpdate

from .arguments import own_arguments, own_environment
from .asking import Asked, Asking
from .checkpoint import Checkpoint
from .handing import Handing
from .process import ServerProcess, free_port
from .replies import NOTHING, Reply, completion, scores
from .requests import (
    answer_bytes,
    check_ids,
    generate_body,
    load_calls,
    read_body,
    response_seed,
    score_body,
    token_ids,
)
from .serving import ServerInfo, check_url, server_info

SHARED_TOKENS = 64
"""A prompt as long as this is read once for all responses of a group, before they are drawn."""
DEAD_S = 5.0
_log = logging.getLogger(__name__)


class SGLangServer(RolloutEngine):
    """``model``: a Hugging Face folder with weights in safetensors, which the server serves.

    ``server``: options of ``sglang.launch_server`` by their names, for a server of its own. It listens on this host alone, wants a
    key that nobody else has, has this process's environment, and ends with it. ``log``: a file that its output goes to. Or ``url``: a server that runs already and reads ``directory`` (this host's shared memory unless said otherwise);
    ``key_env``: the environment variable that holds its key. No one else may load weights into it.

    ``max_rows``: responses asked for at once. ``version``: what the weights in the folder count as; a server that runs already must
    have them. ``start_s``, ``request_s``, ``update_s``: how long a start, a response and a load may take; a server that takes
    longer counts as lost.

    Log-probs are under the whole vocabulary at the request's temperature (at 1 for greedy), also where top-k or top-p cut the
    draw. Seeds count where the server draws by them (``enable_deterministic_inference``). A server that is lost raises
    EngineGone in whatever waits for it: the worker ends, and its rows go to others.
    """

    def __init__(
        self,
        model: str,
        *,
        server: Mapping[str, Any] | None = None,
        log: str | None = None,
        url: str | None = None,
        key_env: str | None = None,
        directory: str | None = None,
        max_rows: int = 256,
        version: int = 0,
        start_s: float = 600.0,
        request_s: float = 1800.0,
        update_s: float = 600.0,
    ) -> None:
        if max_rows < 1:
            raise ConfigError(f"max_rows must be 1 or more, not {max_rows}")
        own = {"server": server, "log": log}
        if url is not None and any(value is not None for value in own.values()):
            raise ConfigError(
                f"url= names a server that runs already: {', '.join(own)} are of one that is to be started"
            )
        self._request_s, self._update_s, self._version = request_s, update_s, version
        self._process: ServerProcess | None = None
        self._claim: Claim | None = None
        self._torn, self._closed, self._told, self._interruptions = "", False, False, 0
        self._going_on: asyncio.Task[None] | None = None
        self._load = asyncio.Lock()
        self._calls: Calls
        self._context: int
        self._by_seeds: bool
        if url is None:
            self._start(model, dict(server or {}), log, start_s)
        else:
            self._attach(model, url, key_env)
        self._asking = Asking(self._calls, max_rows, request_s)
        self._handing = Handing(directory)
        self.capabilities = Capabilities(
            swap=frozenset({"drain", "partial", "in_flight"}),
            token_versions=True,
            max_rows=max_rows,
            context=self._context,
            logprobs=True,
        )

    # ---- the server

    def _start(self, model: str, options: dict[str, Any], log: str | None, start_s: float) -> None:
        options = {name.replace("-", "_"): value for name, value in options.items()}
        dtype, length = options.pop("dtype", None), options.pop("context_length", None)
        self._checkpoint = Checkpoint(model, None if dtype in (None, "auto") else str(dtype))
        context = int(length) if length else self._checkpoint.context
        port, key = free_port(), secrets.token_hex(16)
        arguments = own_arguments(
            model, options, port=port, key=key, dtype=self._checkpoint.dtype, context=context, version=self._version
        )
        self._process = ServerProcess(arguments, own_environment(), log)
        try:
            self._process.wait_ready(port, start_s)
            self._look_at(
                f"http://127.0.0.1:{port}", key, f"the SGLang server of this worker (process {self._process.pid})"
            )
        except BaseException:
            self._process.close()
            raise
        if context is not None:
            self._context = min(context, self._context)

    def _attach(self, model: str, url: str, key_env: str | None) -> None:
        key = os.environ.get(key_env) if key_env is not None else None
        if key_env is not None and not key:
            raise ConfigError(f"key_env={key_env!r}: this environment variable of the worker is not set")
        at = check_url(url, key)
        info = self._look_at(at, key, f"the SGLang server at {at}")
        dtype = info.dtype
        if dtype == "auto":  # SGLang's own rule
            dtype = Checkpoint(model).dtype.replace("float32", "float16")
        self._checkpoint = Checkpoint(model, {"half": "float16", "float": "float32"}.get(dtype, dtype))
        if self._checkpoint.context is not None:
            self._context = min(self._checkpoint.context, self._context)
        # Whoever used it before may have left it paused, or on other weights.
        folder = os.path.abspath(model)
        self._claim = Claim(at)
        try:
            for path, body in load_calls(folder, self._version, load_format="auto"):
                call_now(at, path, key, body, timeout_s=self._update_s)
        except BaseException:
            self._claim.close()
            raise

    def _look_at(self, url: str, key: str | None, name: str) -> ServerInfo:
        info = server_info(url, key)
        info.check(name)
        self._context, self._by_seeds = info.max_req_input_len, info.enable_deterministic_inference
        self._calls = Calls(url, key, name)
        return info

    async def _what_is_lost(self, error: Dropped) -> AsyncFlowError:
        """What a broken connection means: a server that still answers others has failed one request, and no more."""
        if self._process is not None and await asyncio.to_thread(self._process.ended, DEAD_S):
            return EngineGone(f"{error}; {self._process.last_words()}")
        try:
            await self._calls.get("/model_info", object, timeout_s=DEAD_S)
        except AsyncFlowError:
            return EngineGone(str(error))
        return EngineError(str(error))

    # ---- generating

    async def generate(self, request: Request) -> AsyncIterator[Completion]:
        """Yield each response as it finishes. Closing the generator aborts what is left."""
        prompt = token_ids(
            request,
            vocabulary=self._checkpoint.vocabulary,
            context=self._context,
            max_rows=self.capabilities.max_rows,
        )
        self._check_usable()
        interruptions = self._interruptions
        if request.n > 1 and len(prompt) >= SHARED_TOKENS:
            await self._reply(self._asking.ask(read_body(prompt), answer_bytes(0)))
        if interruptions != self._interruptions:
            for index in range(request.n):
                yield Completion(index, [], [], "aborted")
            return
        most = answer_bytes(request.sampling.max_tokens)
        asked = {
            self._asking.ask(generate_body(prompt, request.sampling, seed=self._seed(request, index)), most): index
            for index in range(request.n)
        }
        answers = {each.answer: each for each in asked}
        try:
            while answers:
                done, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    each = answers.pop(task)
                    yield completion(await self._reply(each), asked[each], interrupted=each.interrupted)
        finally:
            for each in answers.values():
                self._asking.end(each)

    async def interrupt(self) -> None:
        self._interruptions += 1
        self._asking.interrupt()

    async def logprobs(
        self, prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[float]]:
        """Log-probs of each response's tokens after its prompt, at temperature 1, under the weights held now. Raises EngineError for
        sequences the server cannot take."""
        self._check_usable()
        asked = []
        for prompt, response in zip(prompt_ids, response_ids, strict=True):
            whole = np.asarray([*prompt, *response], np.int64)
            check_ids(whole, self._checkpoint.vocabulary)
            if not len(prompt):
                raise EngineError("the first token of a response has no log-prob without a prompt")
            asked.append(self._asking.ask(score_body(whole.tolist()), answer_bytes(len(whole))))
        replies = [await self._reply(each) for each in asked]
        return [
            scores(reply, list(response), self._checkpoint.vocabulary)
            for reply, response in zip(replies, response_ids, strict=True)
        ]

    async def _reply(self, asked: Asked) -> Reply:
        """Its answer. Raises EngineError and EngineGone; cancelled, the request is ended."""
        try:
            await asyncio.wait([asked.answer])
        except asyncio.CancelledError:
            self._asking.end(asked)
            raise
        self._check_usable()
        if asked.spoiled:
            raise EngineError(asked.spoiled)
        if asked.answer.cancelled():  # it waited to be sent
            return NOTHING
        try:
            return asked.answer.result()
        except Dropped as error:
            raise await self._what_is_lost(error) from None

    def _seed(self, request: Request, index: int) -> int | None:
        seed = request.sampling.seed if request.seed is None else request.seed
        if self._by_seeds:
            return response_seed(seed, request.first + index)
        if seed is not None and not self._told:
            self._told = True
            _log.warning(
                "%s draws without seeds, so that a run with a seed does not repeat its tokens; it draws by them when it is started"
                " with enable_deterministic_inference", self._calls.name,
            )  # fmt: skip
        return None

    def _check_usable(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed")
        if self._torn:
            raise EngineError(self._torn)

    # ---- new weights

    async def load_weights(self, update: WeightUpdate) -> set[str]:
        """Hand the version to the server. What runs is stopped between two tokens, read anew by it and goes on.

        Raises WeightMismatch, and goes on under the old weights, for a version that does not fit the model, and whatever reading
        the update raises. A load that breaks off in the server leaves nobody knows what: what runs or waits gets an EngineError,
        and nothing is generated before a version has been loaded whole.
        """
        async with self._load:
            if self._closed:
                raise EngineError("the engine was closed")
            self._checkpoint.check(update)
            await _seen_through(asyncio.to_thread(self._handing.write, update))
            await self._asking.ended()
            try:
                for path, body in load_calls(str(self._handing.folder), update.version):
                    await self._calls.post(path, body, object, timeout_s=self._update_s)
            except BaseException as error:
                self._tear(f"version {update.version} did not come whole into {self._calls.name}: {error!r}")
                if isinstance(error, Dropped):
                    raise await self._what_is_lost(error) from None
                if isinstance(error, EngineError) and not isinstance(error, EngineGone):
                    raise WeightError(f"version {update.version} could not be loaded: {error}") from error
                raise
            self._torn = ""
        return set(update.tensors)

    def _tear(self, why: str) -> None:
        """Nobody knows what the server holds. What runs there ends, and its answers count no more."""
        self._torn = f"{why}. It must be loaded anew before it generates"
        self._asking.spoil(self._torn)
        self._handing.forget()  # the server may still be reading
        self._going_on = asyncio.create_task(self._go_on())

    async def _go_on(self) -> None:
        with contextlib.suppress(AsyncFlowError):  # the next load, or the next request, says so
            await self._calls.post("/continue_generation", {}, object)

    async def close(self) -> None:
        """End a server of its own; let go of another. Requests still running get an EngineError."""
        self._closed = True
        await self._asking.close()
        if self._going_on is not None:
            self._going_on.cancel()
            await asyncio.gather(self._going_on, return_exceptions=True)
        await self._calls.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.close)
        if self._claim is not None:
            self._claim.close()
        await asyncio.to_thread(self._handing.close)


async def _seen_through(work: Coroutine[Any, Any, None]) -> None:
    """Wait for it, also when cancelled: the caller releases then what it reads from."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
