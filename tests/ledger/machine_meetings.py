"""Ranks that come to meetings in any order, twice, too late, under each other's names, or not at all."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule
from machine_run import MachineRun, small, waits

from asyncflow_sdk.ledger import commands as cmd


class MeetingRules(MachineRun):
    @rule(
        who=small,
        ranks=st.sampled_from([[0], [1], [0, 1], [1, 0], [0, 2], [2, 1, 0], [0, 0, 1], [-1]]),
        size=st.sampled_from([2, 2, 2, 3, 1]),
        what=st.sampled_from(["a", "a", "a", "b"]),
        team=st.sampled_from(["t", "t", "t", "train"]),
        wait=waits,
    )
    def meet(self, who: int, ranks: list[int], size: int, what: str, team: str, wait: float) -> None:
        for number, rank in enumerate(ranks):
            command = cmd.Meet(
                team=team, what=what, rank=rank, world_size=size, word=b"%d of %d" % (rank, who), timeout_s=wait
            )
            self.run.send(self.session(who + number), command)
