"""EngineProducer: the rollout worker of a loop of one's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...interfaces import Producer, RolloutEngine
from ...queue import QueueClient
from ...types import Chat, Sampling
from ...types import events as ev
from ...weights import choose_swap
from ..specs import rollout_task
from ..work import tokenizer_file
from ..workers.worker_log import WorkerLog
from .agent import Agent
from .chat import PromptEncoder
from .completion_batcher import ResponseColumns
from .prompt_lease import PromptReader
from .rollout_worker import RolloutWorker
from .tokenizer import Tokenizer, with_stop_ids


class EngineProducer(Producer):
    """Runs one engine until the stream ends: ``work`` in this thread, or ``run`` on an event loop.
    Call one of them, once.

    ``prompt``: the column of prompts; "prompt_ids" holds token ids, any other text or chats,
    which need ``text``: the folder of a tokenizer. ``chat``: arguments of its chat template; a text is
    then a chat of one message. ``prefix``: of the names of the columns it gives.
    ``agent``: answers each row by a conversation. ``needs_first``: generate nothing before a
    published version is loaded; else the engine's own weights are version 0. ``swap``: when new
    versions are loaded: "drain", "boundary", "partial", "in_flight"; "auto": the engine's best.
    ``samplings``: of the rows of other partitions, by name. ``trained``: False for rows that are not
    trained, which it may wait for without a limit.
    ``verify``: checks of a load beyond the names of its tensors: "probe", "held". Raises
    ConfigError, with the reason, for options the engine does not support.
    """

    def __init__(
        self,
        queue: QueueClient,
        engine: RolloutEngine,
        *,
        task: str = "rollout",
        prefix: str = "",
        sampling: Sampling | None = None,
        prompt: str = "prompt_ids",
        text: Tokenizer | str | Path | None = None,
        chat: Chat | None = None,
        agent: Agent | Callable[..., Awaitable[Any]] | None = None,
        needs_first: bool = False,
        swap: str = "auto",
        verify: Sequence[str] = (),
        samplings: Mapping[str, Sampling] | None = None,
        trained: bool = True,
    ) -> None:
        tokenizer = text if text is None or isinstance(text, Tokenizer) else Tokenizer(tokenizer_file(text, ""))
        if prompt != "prompt_ids" and tokenizer is None:
            raise ConfigError(f"column {prompt!r} is text; a producer needs a tokenizer to encode it")
        if agent is not None and not isinstance(agent, Agent):
            agent = Agent(function=agent)
        can, sampling = engine.capabilities, with_stop_ids(sampling or Sampling(), tokenizer)
        can.check(type(engine).__name__, sampling)
        encoder = PromptEncoder(tokenizer, chat) if tokenizer is not None else None
        stop = sampling.stop if agent is None else ()  # a conversation is kept whole
        chosen = choose_swap(type(engine).__name__, can.swap, swap, token_versions=can.token_versions, verify=verify)
        if swap == "auto":
            log = WorkerLog(queue.connection)
            log.report(ev.Chosen, what=chosen.what, chosen=chosen.chosen, reason=chosen.reason)
        self._queue, self._spec = queue, rollout_task(task, prompt, prefix, tokenizer is not None, agent)
        self._worker = RolloutWorker(
            queue, engine, task=task, prompts=PromptReader(prompt, encoder),
            columns=ResponseColumns(tokenizer, prefix=prefix, prompt_ids=prompt != "prompt_ids", stop=stop),
            sampling=sampling, tokenizer=tokenizer, agent=agent,
            swap=chosen.chosen, verify=verify, needs_first=needs_first,
            samplings={name: with_stop_ids(each, tokenizer) for name, each in (samplings or {}).items()},
            trained=trained,
        )  # fmt: skip

    def work(self) -> None:
        self._queue.declare(**{name: getattr(self._spec, name) for name in self._spec.__struct_fields__})
        asyncio.run(self.run())

    async def run(self) -> None:
        await self._worker.run()
