"""The AsyncFlow paper's service interface (arXiv 2507.01663) over a run: five calls, for people who
bring their own trainer.

with af.serve("runs/mine", max_staleness=1) as run, af.Trainer(run) as trainer:
    trainer.init_engines(af.Rollout("transformers", model=path, group_size=8), af.Stage(exact_match, gives=["reward"]), batch_size=64)
    trainer.put_prompts_data(prompts, group_size=8, key="epoch-0")
    for _ in range(steps):
        step = trainer.get_experience_data()
        loss = train(step.to_torch())                        # your code
        trainer.weight_sync_notify(model.named_parameters())
        trainer.put_experience_data(step)

Each call is one or two calls of ``Run``, its queue and its publisher, which remain available as
``trainer.run``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from .errors import ConfigError, DeadlineExceeded, Ended, SchemaError
from .interfaces import TRAIN_COLUMNS, LeasedBatch, PutRows
from .interfaces.weights import NamedWeights
from .types.defaults import SERVICE_CALL_S, STEP_LEASE_S
from .weights import TransportPublisher
from .workflow import Rollout, Run, Stage, load_prompts
from .workflow.data import Prompts


class Trainer:
    """The five calls of the paper's trainer, over ``run``, which is served here or connected to.
    ``timeout_s``: default limit of a call; after it DeadlineExceeded names the missing thing.
    ``transport``, ``options``: of ``run.weight_publisher``. For one thread. The caller closes ``run``."""

    def __init__(
        self, run: Run, *, timeout_s: float = SERVICE_CALL_S, transport: str = "auto", **options: Any
    ) -> None:
        self.run = run
        self._timeout_s = timeout_s
        self._transport, self._options = transport, options
        self._publisher: TransportPublisher | None = None
        self._trained = -1  # version of the step that was got last

    def init_engines(
        self,
        *engines: Rollout | Stage,
        batch_size: int | None = None,
        columns: Sequence[str] = TRAIN_COLUMNS,
        weights: NamedWeights | None = None,
        untrained: Sequence[str] = (),
        **task: Any,
    ) -> None:
        """Start engines, and declare the task "train" with steps of ``batch_size`` rows and ``columns``
        (None: it is declared elsewhere). ``weights``, ``untrained``: published as version 0, with which
        rollouts then start; without them, rollouts start with their own model. ``task``: arguments of
        ``queue.declare``, such as ``sampler``. Raises ConfigError, PluginError."""
        if batch_size is not None:
            self.run.queue.declare("train", needs=columns, batch_rows=batch_size, **{"lease_s": STEP_LEASE_S, **task})
        elif task:
            raise ConfigError(f"{', '.join(task)} belongs to the task of training: give batch_size with it")
        for engine in engines:
            self.run.start(engine, needs_first=isinstance(engine, Rollout) and weights is not None)
        if weights is not None:
            self.weight_sync_notify(weights, untrained=untrained)

    def put_prompts_data(
        self,
        prompts: Prompts,
        *,
        group_size: int,
        column: str = "prompt",
        key: str = "",
        timeout_s: float | None = None,
    ) -> PutRows:
        """Put each prompt ``group_size`` times: columns by name, records, or the path of a file of
        records, with ``column``. Repeating a ``key`` adds nothing. Waits while the queue is full.
        Raises the errors of ``queue.put``."""
        data, limit_s = dict(load_prompts(prompts, column)), self._timeout_s if timeout_s is None else timeout_s
        return self.run.queue.put(data, group_size=group_size, key=key, timeout_s=limit_s)

    def get_experience_data(
        self,
        task: str = "train",
        columns: Sequence[str] | None = None,
        count: int = 1,
        *,
        timeout_s: float | None = None,
    ) -> LeasedBatch:
        """Lease rows of ``task`` that have all needed columns: one whole step of "train", up to
        ``count`` rows of other tasks. ``columns``: the columns to read. Without a following
        ``put_experience_data`` the rows are leased again, by any client. Raises the errors of
        ``queue.get``, such as Ended after the last row, and the error of a failed worker of this run."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            batch = self.run.queue.get(task, count, columns=columns, timeout_s=limit_s)
        except (Ended, DeadlineExceeded):
            self.run.check()
            raise
        if batch.index >= 0:
            self._trained = batch.version
        return batch

    def put_experience_data(
        self,
        batch: LeasedBatch,
        columns: Mapping[str, Any] | None = None,
        *,
        index: npt.ArrayLike | None = None,
        filtered: npt.ArrayLike | None = None,
    ) -> None:
        """Write ``columns`` of leased rows and complete them; without columns, only complete them.
        ``index``, ``filtered``: as in ``batch.complete``. Raises SchemaError for columns of other
        types than the first ones written, and for an object that is no batch."""
        if not isinstance(batch, LeasedBatch):
            raise SchemaError(
                f"put_experience_data takes the batch that get_experience_data gave, not {type(batch).__name__}"
            )
        batch.complete(columns, index=index, filtered=filtered)

    def weight_sync_notify(
        self, weights: NamedWeights, *, version: int | None = None, untrained: Sequence[str] = ()
    ) -> int:
        """Make ``weights`` the current version. Rollouts fetch it while they generate, and load it at their
        next safe point. Return its number: by default the version that the last step trained towards, and 0
        before a step. Blocks for one copy. ``untrained`` and errors: as of ``TransportPublisher.publish``."""
        if self._publisher is None:
            self._publisher = self.run.weight_publisher(self._transport, **self._options)
        number = self._trained + 1 if version is None else version
        return self._publisher.publish(number, weights, untrained=untrained).version

    def close(self) -> None:
        """Wait until the published version is current, and release the publisher's role.
        Idempotent."""
        if self._publisher is not None:
            self._publisher.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
