"""EngineProducer: the rollout worker of a loop of one's own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...interfaces import Producer, RolloutEngine
from ...queue import QueueClient
from ..specs import declare_task, rollout_task
from ..work import tokenizer_file
from .agent import Agent
from .leased_rows import RolloutOptions
from .rollout_worker import RolloutWorker
from .tokenizer import Tokenizer


class EngineProducer(Producer):
    """Runs one engine until the stream ends: ``work`` in this thread, or ``run`` on an event loop.
    Call one of them, once.

    ``given``: the fields of ``RolloutOptions``: ``task``, ``prompt`` (the column of prompts; "prompt_ids" holds token
    ids), ``text`` (the folder of a tokenizer, for text or chats), ``chat``, ``prompt_limit``, ``prefix``, ``sampling``,
    ``samplings``, ``agent`` (or its function), ``trained``, ``needs_first``, ``swap``, ``verify``. Raises ConfigError, with the reason,
    for options the engine does not support.
    """

    def __init__(self, queue: QueueClient, engine: RolloutEngine, **given: Any) -> None:
        text, agent = given.get("text"), given.get("agent")
        if isinstance(text, (str, Path)):
            given["text"] = Tokenizer(tokenizer_file(text, ""))
        if callable(agent):
            given["agent"] = Agent(function=agent)
        options = RolloutOptions(**given)
        if options.prompt != "prompt_ids" and options.text is None:
            raise ConfigError(f"column {options.prompt!r} is text; a producer needs a tokenizer to encode it")
        self._queue, self._worker = queue, RolloutWorker(queue, engine, options)
        task = options.task, options.prompt, options.prefix, options.text is not None, options.agent
        self._spec = rollout_task(*task, chat=options.chat, columns=tuple(self._worker.gives))

    def work(self) -> None:
        declare_task(self._queue, self._spec)
        asyncio.run(self.run())

    async def run(self) -> None:
        await self._worker.run()
