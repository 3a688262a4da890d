"""Specifications of tasks, samplers and staleness policies, as they are declared."""

from __future__ import annotations

import msgspec

from .defaults import LEASE_S


class SamplerSpec(msgspec.Struct, frozen=True):
    """A sampler by the name it is registered with, and the options it is made of."""

    name: str
    options: dict[str, bool | int | float | str | None] = {}


class PolicySpec(msgspec.Struct, frozen=True):
    """A staleness policy by the name it is registered with, and the options it is made of."""

    name: str
    options: dict[str, bool | int | float | str | None] = {}


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One use of rows.

    ``needs``: columns a row must have; ``gives``: columns it writes. ``lease_s``: ledger seconds until
    unfinished rows go back. ``max_attempts``: leases a row may lose before its group fails. ``admits``:
    the staleness rule decides when its groups are leased (rollout); groups that a step can take as they were
    put skip it. ``batch_rows``: rows of one step; whole groups are selected into steps, each leased whole
    (train). Without ``gives`` it is an end of the stream: a row is consumed when every task of its partition,
    one of them an end, has completed it. ``partitions``: those whose rows it takes; ``("*",)`` takes all.
    ``sampler``: chooses among ready rows; None takes the first. ``Declare`` refuses tasks that no row of a partition
    can get through.
    """

    name: str
    needs: tuple[str, ...]
    gives: tuple[str, ...] = ()
    lease_s: float = LEASE_S
    max_attempts: int = 3
    admits: bool = False
    batch_rows: int | None = None
    partitions: tuple[str, ...] = ("",)
    sampler: SamplerSpec | None = None

    def takes(self, partition: str) -> bool:
        return partition in self.partitions or "*" in self.partitions

    @property
    def grouped(self) -> bool:
        return self.admits or self.batch_rows is not None
