"""Meeting: where the ranks of a trainer wait for each other, so that a step, a checkpoint and a resume are one for all of them.

meeting = Meeting(queue, rank=0, world_size=2)
words = meeting.words("step 7", b"mine")                  # of all ranks, when all are there
with meeting.all_or_none("the checkpoint of step 7"):     # when it raises in one rank, it raises in all
    engine.save(path)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import msgspec

from ..errors import DeadlineExceeded, LeaseLost, ServerLost, error_from_name
from ..ledger import commands as cmd
from ..queue import QueueClient

TIMEOUT_S = 3600.0
"""A rank may take so long to come, as with a large checkpoint; one that dies ends its group long before."""
APART = (DeadlineExceeded, LeaseLost, ServerLost)
"""What a meeting itself fails with: the ranks cannot go on together."""


class _Word(msgspec.Struct, frozen=True):
    error: tuple[str, str] | None = None
    said: bytes = b""


class Meeting:
    """Of ``world_size`` ranks; one alone meets nobody, and needs no queue. Not thread-safe."""

    def __init__(
        self, queue: QueueClient | None = None, group: str = "train", rank: int = 0, world_size: int = 1
    ) -> None:
        self._queue, self._group, self.rank, self.world_size = queue, group, rank, world_size

    @property
    def first(self) -> bool:
        """Whether this rank says what is said once."""
        return self.rank == 0

    def words(self, what: str, word: bytes = b"", timeout_s: float = TIMEOUT_S) -> tuple[bytes, ...]:
        """Wait until every rank has come to ``what``, and return what each has said there. Raises DeadlineExceeded that says
        who has not come; LeaseLost when another process is this rank now."""
        if self._queue is None or self.world_size == 1:
            return (word,)
        command = cmd.AllGather(
            group=self._group,
            what=what,
            rank=self.rank,
            world_size=self.world_size,
            payload=word,
            timeout_s=timeout_s,
        )
        reply: cmd.AllGathered = self._queue.send(command)
        return reply.payloads

    @contextlib.contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """What is done in here by every rank has been done by all when it is left; or it raises in each."""
        try:
            yield
        except Exception as error:
            if isinstance(error, APART):
                raise
            self._tell(what, _Word(_said(error)))
            raise
        for rank, word in enumerate(self._tell(what, _Word())):
            if word.error is not None:
                raise error_from_name(word.error[0], f"rank {rank}: {word.error[1]}")

    def by_first(self, what: str, do: Callable[[], bytes]) -> bytes:
        """What ``do`` returns in rank 0, in every rank; what it raises there is raised in all."""
        word = _Word()
        if self.first:
            try:
                word = _Word(None, do())
            except Exception as error:
                self._tell(what, _Word(_said(error)))
                raise
        found = self._tell(what, word)[0]
        if found.error is not None:
            raise error_from_name(found.error[0], f"rank 0: {found.error[1]}")
        return found.said

    def _tell(self, what: str, word: _Word) -> list[_Word]:
        if self.world_size == 1:
            return [word]
        return [msgspec.msgpack.decode(each, type=_Word) for each in self.words(what, msgspec.msgpack.encode(word))]


def _said(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error)
