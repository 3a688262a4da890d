"""Steps of a trainer, leased whole or in parts: either way one call trains a step, also again.

for step in trainer_steps(queue, engine, log, task="train", part_rows=32):
    work = step.train(version)                # a step in parts: raises StepLost, and the engine has aborted it
    step.ack(work)
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from ...errors import LeaseLost, StepAborted
from ...interfaces import LeasedBatch, LeasedStep, StepPart, StepResult, TrainEngine
from ...queue import QueueClient
from ...types import AgeSums, Batch
from ...types.defaults import NEXT_S
from ...types.spans import FINISH_REASON
from ..rewards import RewardSums, reward_means, reward_sums
from .rank_communicator import RankCommunicator
from .worker_log import WorkerLog


class StepLost(Exception):
    """The lease of a step in parts ended before the step was trained: the queue delivers it again."""


@dataclass(frozen=True)
class StepWork:
    """What a rank has trained of a step. ``rewards``: sums of single ones, and of truncated responses. ``parts``:
    number of parts; 0 for a whole step."""

    result: StepResult
    ages: AgeSums
    rewards: tuple[RewardSums, ...] = ()
    parts: int = 0

    def packed(self) -> bytes:
        """Encode what ``step_metrics`` merges over the ranks."""
        return msgspec.msgpack.encode((self.ages, self.rewards))


def step_metrics(packed: Iterable[bytes]) -> dict[str, float]:
    """Return the ages, single rewards and ``truncated_fraction`` of a whole step, from each rank's
    ``StepWork.packed``."""
    ranks = [msgspec.msgpack.decode(each, type=tuple[AgeSums, list[RewardSums]]) for each in packed]
    rewards = [part for _, parts in ranks for part in parts]
    return AgeSums.all(ages for ages, _ in ranks).metrics() | reward_means(rewards)


def _sums(batch: Batch) -> RewardSums:
    cut = batch.texts(FINISH_REASON).count("length") if FINISH_REASON in batch else -1
    return reward_sums(batch) | ({} if cut < 0 else {"truncated_fraction": (float(cut), batch.rows)})


class TrainerStep(abc.ABC):
    """A leased step. ``version``: the one it trains by its lease."""

    def __init__(self, step: LeasedBatch | LeasedStep, engine: TrainEngine, log: WorkerLog) -> None:
        self.index, self.version = step.index, step.version
        self._engine, self._log = engine, log

    @abc.abstractmethod
    def train(self, version: int) -> StepWork:
        """Train ``version`` on all rows. Call it again after a rollback: it trains the same rows. Raises
        StepLost, and then the engine has discarded the step."""

    @abc.abstractmethod
    def ack(self, work: StepWork) -> None:
        """Acknowledge the step. Raises LeaseLost."""


class WholeStep(TrainerStep):
    """A step of one batch."""

    def __init__(self, batch: LeasedBatch, engine: TrainEngine, log: WorkerLog) -> None:
        super().__init__(batch, engine, log)
        self._batch = batch

    def train(self, version: int) -> StepWork:
        ages = AgeSums.of(self._batch.ages(self.index))
        with self._log.timed("train", rows=self._batch.rows, tokens=ages.tokens, version=version):
            result = self._engine.train_step(self._batch)
        return StepWork(result, ages, (_sums(self._batch),))

    def ack(self, work: StepWork) -> None:
        self._batch.ack(filtered=work.result.filtered)


class StepInParts(TrainerStep):
    """A step whose parts arrive while the rest of it is being generated.

    It keeps the delivered parts: a step trained again begins with them.
    """

    def __init__(self, step: LeasedStep, engine: TrainEngine, log: WorkerLog) -> None:
        super().__init__(step, engine, log)
        self._step = step
        self._delivered: list[StepPart] = []

    def train(self, version: int) -> StepWork:
        ages = []
        self._engine.begin_step(self.index)
        try:
            for part in self._parts():
                ages.append(AgeSums.of(part.ages(self.index)))
                what = f"part {part.part} of step {self.index}"
                with self._log.timed("train", rows=part.rows, tokens=ages[-1].tokens, version=version, detail=what):
                    self._engine.accumulate(part)
            with self._log.timed("train", version=version, detail=f"update of step {self.index}"):
                result = self._engine.end_step()
        except (LeaseLost, StepAborted) as error:  # or another rank's: the ranks have one lease
            self._engine.abort_step()
            raise StepLost(str(error)) from error
        rewards = tuple(map(_sums, self._delivered))
        return StepWork(result, AgeSums.all(ages), rewards, len(ages))

    def ack(self, work: StepWork) -> None:
        self._step.ack(filtered=work.result.filtered)

    def _parts(self) -> Iterator[StepPart]:
        yield from self._delivered
        for part in self._step.parts():
            self._delivered.append(part)
            yield part


def trainer_steps(
    queue: QueueClient, engine: TrainEngine, log: WorkerLog, ranks: RankCommunicator, *, task: str, part_rows: int = 0
) -> Iterator[TrainerStep]:
    """Lease one step after another until the stream ends: whole, or with ``part_rows`` in parts of at
    least so many rows. Raises the errors of ``TransferQueue.get``, except Ended."""
    rank, size = ranks.rank, ranks.world_size
    if part_rows:
        parts = queue.steps(task, part_rows=part_rows, timeout_s=NEXT_S, group=task, rank=rank, world_size=size)
        for step in parts:
            yield StepInParts(step, engine, log)
    else:
        batches = queue.stream(task, timeout_s=NEXT_S, group=task, rank=rank, world_size=size, ahead=True)
        for batch in batches:
            yield WholeStep(batch, engine, log)
