"""Declarations of tasks, samplers and staleness policies."""

from __future__ import annotations

import msgspec

from .defaults import LEASE_S, MAX_ATTEMPTS


class SamplerSpec(msgspec.Struct, frozen=True):
    """A sampler: its registered name and its options."""

    name: str
    options: dict[str, bool | int | float | str | None] = {}


class PolicySpec(msgspec.Struct, frozen=True):
    """A staleness policy: its registered name and its options."""

    name: str
    options: dict[str, bool | int | float | str | None] = {}


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One use of rows. ``needs``: columns required of a row. ``gives``: columns it writes. ``lease_s``: ledger
    seconds until unfinished rows return to the task. ``max_attempts``: leases a row may lose before its group fails.
    ``admits``: the staleness policy admits its groups (rollout); groups put with all columns of a step skip it.
    ``batch_rows``: rows of one step; whole groups are selected into steps, and each step is leased whole or in parts
    (train). A task without ``gives`` is an end of the stream: a row is consumed once every task of its partition,
    including an end, has completed it. ``partitions``: whose rows it leases; ``("*",)``: all. ``sampler``: chooses
    among ready rows; None: the first."""

    name: str
    needs: tuple[str, ...]
    gives: tuple[str, ...] = ()
    lease_s: float = LEASE_S
    max_attempts: int = MAX_ATTEMPTS
    admits: bool = False
    batch_rows: int | None = None
    partitions: tuple[str, ...] = ("",)
    sampler: SamplerSpec | None = None

    def takes(self, partition: str) -> bool:
        """True if it leases rows of this partition."""
        return partition in self.partitions or "*" in self.partitions

    @property
    def grouped(self) -> bool:
        """True if it leases whole groups."""
        return self.admits or self.batch_rows is not None
