"""What trainers say of checkpoints: steps become final, or are trained again, from wherever one likes."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule
from ledger_queue import publishing
from machine_run import MachineRun, one_in, small

from asyncflow_sdk.ledger import commands as cmd


class TrainingRules(MachineRun):
    """Checkpoints are made and gone on from; and whoever leased rows hears which have ended."""

    @rule(
        who=small,
        what=st.sampled_from(["keep", "cover", "cover", "go on", "go on", "go on", "begin anew", "ask"]),
        back=st.sampled_from([0, 0, 1, 1, 2, -1]),
        known=st.sampled_from(["at its step", "at its step", "current", "none", "newer"]),
        turns=st.integers(0, 3),
        publishes=one_in(2),
    )
    def keep_or_train_again(
        self, who: int, what: str, back: int, known: str, turns: int, publishes: bool
    ) -> None:  # fmt: skip
        naive, session = self.run.naive, self.session(who)
        for _ in range(turns if {"rollout", "train"} <= naive.tasks.keys() else 0):
            for role in self.fair.roles:
                if role == "feeder" or role in naive.tasks:
                    self.fair.turn(role)
        step = max(naive.next_to_train() - back, 0) if naive.train() is not None else back
        current = naive.version
        at_step = [each.version for each in naive.published if naive.trains[each.version] == step]
        version = {"at its step": (at_step or [-1])[-1], "current": current, "none": -1, "newer": current + 1}[known]
        commands: dict[str, Any] = {
            "keep": cmd.Checkpoint(step=step, covers=naive.covered, version=version),
            "cover": cmd.Checkpoint(step=step, covers=max(step - who % 2, 0), version=version),
            "go on": cmd.Resume(step=step, version=version),
            "begin anew": cmd.Resume(step=0),
            "ask": cmd.GetCut(),
        }
        reply = self.run.send(session, commands[what])
        if isinstance(reply, cmd.Resumed) and reply.publish and publishes:
            for other in list(naive.ranks.values()):
                self.run.send(other, cmd.ClosePublisher())
            for command in publishing(reply.version)[: 3 + who % 2]:
                self.run.send(session, command)

    @rule(who=small, wait=st.sampled_from([4.0, 40.0]))
    def await_lost(self, who: int, wait: float) -> None:
        self.run.send(self.session(who), cmd.AwaitLost(timeout_s=wait))
