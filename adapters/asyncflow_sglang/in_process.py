"""InProcessLink: an ``sglang.Engine`` in this process, on a thread and an event loop of its own.

On the main thread SGLang would install signal handlers for the whole process. It also has the
kernel end its schedulers with the thread that started them: this thread lives as long as the
engine, so the schedulers end with the engine or the process.
"""

from __future__ import annotations

import asyncio
import atexit
import faulthandler
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from asyncflow_http.client import ANSWER_BYTES, HTTP_CALL_S, AnswerType
from asyncflow_sdk.errors import ConfigError, DeadlineExceeded, EngineError, EngineGone

from . import children
from .info import ServerInfo
from .launch import remove, shared_memory

END_S = 10.0


class InProcessLink:
    """``options``: of ``sglang.Engine``. ``info``: its description of itself. ``name``: in errors.
    Raises ConfigError for invalid options, EngineError if SGLang does not start, DeadlineExceeded
    after ``start_s``; nothing of it is left then.

    Calls can come from any event loop.
    """

    info: ServerInfo

    def __init__(self, options: Mapping[str, Any], start_s: float) -> None:
        self.name = "the SGLang of this worker"
        self._options = dict(options)
        self._engine: Any = None
        self._others = set(multiprocessing.active_children())
        self._failed: BaseException | None = None
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._dead: asyncio.Future[str] = self._loop.create_future()
        # A failing scheduler sends its parent SIGQUIT, which would kill the parent before it could report the error.
        faulthandler.register(signal.SIGQUIT, file=2, all_threads=False)
        self._thread = threading.Thread(target=self._run, name="sglang", daemon=True)
        self._thread.start()
        started = self._started.wait(start_s)
        if not started:
            _end(self._processes())
            self._started.wait(END_S)
        if self._failed is not None or not started:
            self.end()
            late = DeadlineExceeded(f"{self.name} took no requests in {start_s:g} s since it was started")
            raise (self._failed if started else None) or late

    async def post(
        self, path: str, body: Mapping[str, Any], answer: type[AnswerType], *, timeout_s: float = HTTP_CALL_S,
        most_bytes: int = ANSWER_BYTES, part: Callable[[AnswerType], None] | None = None,
    ) -> AnswerType:  # fmt: skip
        """Call SGLang on its own event loop."""
        if self._loop.is_closed():
            raise EngineError(f"{self.name} was closed")
        here = asyncio.get_running_loop()

        def read(got: Any) -> AnswerType:
            if answer is not object:
                try:
                    got = msgspec.convert(got, type=answer)
                except msgspec.ValidationError as error:
                    raise EngineError(f"{self.name} ({path}) answered what cannot be read: {error}") from None
            if part is not None:
                here.call_soon_threadsafe(part, got)
            return cast(AnswerType, got)

        call = asyncio.run_coroutine_threadsafe(self._ask(path, body, read, timeout_s), self._loop)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(call), timeout_s + END_S)
        except asyncio.TimeoutError:
            raise EngineGone(
                f"{self.name} ({path}) has not answered in {timeout_s:g} s, and its thread is stuck"
            ) from None

    async def close(self) -> None:
        """End SGLang. Idempotent."""
        await asyncio.to_thread(self.end)

    # ---- on SGLang's thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._engine = self._make()
            self.info = msgspec.convert(self._engine.get_server_info(), type=ServerInfo)
            for each in self._processes():
                self._loop.add_reader(each.sentinel, self._died, each)
            # All processes have mapped the files by now; removed files leave nothing when this process is killed.
            remove(shared_memory(each.pid for each in self._processes()))
        except BaseException as error:
            self._failed = error
        finally:
            self._started.set()
        if self._failed is None:
            self._loop.run_forever()
        self._loop.run_until_complete(self._cancel_tasks())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())

    def _make(self) -> Any:
        policy = asyncio.get_event_loop_policy()
        try:
            from sglang.srt.entrypoints.engine import Engine
        finally:
            asyncio.set_event_loop_policy(policy)  # the import sets another policy for the whole process
        engine = Engine.__new__(Engine)
        engine.run_scheduler_process_func = children.scheduler
        engine.run_detokenizer_process_func = children.detokenizer
        try:
            engine.__init__(**self._options)
            assert engine.loop is self._loop
        except (TypeError, ValueError) as error:
            raise ConfigError(f"SGLang cannot be started with these options: {error}") from error
        except (Exception, SystemExit) as error:
            raise EngineError(f"{self.name} did not start, see its output above: {error!r}") from error
        finally:
            atexit.unregister(engine.shutdown)  # it ends all child processes, not only SGLang's
        return engine

    def _processes(self) -> list[Any]:
        """Return SGLang's running processes: nothing else in a worker starts processes by multiprocessing."""
        return [each for each in multiprocessing.active_children() if each not in self._others]

    def _died(self, process: Any) -> None:
        self._loop.remove_reader(process.sentinel)
        process.join(END_S)  # its pipe closes a moment before it can be joined
        code = process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"status {code}"
        if not self._dead.done():
            self._dead.set_result(f"{self.name} has lost process {process.pid}, which ended with {how}")

    async def _ask(self, path: str, body: Mapping[str, Any], read: Callable[[Any], Any], timeout_s: float) -> Any:
        call = asyncio.ensure_future(_call(self._engine, path, body, read))
        try:
            await asyncio.wait([call, self._dead], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            if self._dead.done():
                raise EngineGone(f"{self._dead.result()}; in a call of {path}")
            raise EngineGone(f"{self.name} ({path}) has not answered in {timeout_s:g} s")
        except (EngineError, EngineGone):
            raise
        except Exception as error:
            raise EngineError(f"{self.name} ({path}) refused or failed: {type(error).__name__}: {error}") from error
        finally:
            call.cancel()

    async def _cancel_tasks(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    # ---- end

    def end(self) -> None:
        """End SGLang. Blocking. Idempotent."""
        if self._loop.is_closed():
            return
        running, engine, self._engine = self._processes(), self._engine, None
        if self._thread.is_alive():
            for each in running:
                self._loop.call_soon_threadsafe(self._loop.remove_reader, each.sentinel)
        manager = getattr(engine, "tokenizer_manager", None)
        watchdog = getattr(manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()  # it would report the end of its processes as a crash
        files = shared_memory(
            [os.getpid(), *(each.pid for each in running)]
        )  # this process maps those of dead ones, too
        _end(running)
        remove(files)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)
        if self._thread.is_alive():
            return  # stuck in SGLang: its loop cannot be closed
        sockets = [getattr(engine, "send_to_rpc", None)]
        sockets += [getattr(manager, name, None) for name in ("recv_from_detokenizer", "send_to_scheduler")]
        for socket in sockets:
            if socket is not None:
                socket.close(linger=0)
        self._loop.close()
        faulthandler.unregister(signal.SIGQUIT)


def _end(processes: list[Any]) -> None:
    for each in processes:
        each.kill()
    for each in processes:
        each.join(END_S)


_MANAGER_CALLS = {
    "/pause_generation": ("pause_generation", "PauseGenerationReqInput"),
    "/update_weights_from_disk": ("update_weights_from_disk", "UpdateWeightFromDiskReqInput"),
    "/continue_generation": ("continue_generation", "ContinueGenerationReqInput"),
    "/weights_checker": ("check_weights", "CheckWeightsReqInput"),
}
"""Method of SGLang's tokenizer manager and class of its argument, by route of SGLang's server."""


async def _call(engine: Any, path: str, body: Mapping[str, Any], read: Callable[[Any], Any]) -> Any:
    """Do in this process the work of a route of SGLang's server. Read its answer on its thread, since
    SGLang goes on to change it."""
    from sglang.srt.managers import io_struct

    if path == "/generate":  # a method of the engine's own has no parameter for sampling masks
        async for part in engine.tokenizer_manager.generate_request(io_struct.GenerateReqInput(**body), None):
            whole = read(part)
        return whole
    if path == "/abort_request":
        return read(engine.tokenizer_manager.abort_request(**body))
    method, kind = _MANAGER_CALLS[path]
    answer = await getattr(engine.tokenizer_manager, method)(getattr(io_struct, kind)(**body))
    if isinstance(answer, tuple) and not answer[0]:
        raise EngineError(f"SGLang refused {path}: {answer[1]}")
    return read({"per_engine_checksum": answer[3]} if path == "/weights_checker" else None)
