"""What publishers and replicas say of versions, and rollbacks, in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import rule
from ledger_harness import COLUMN
from ledger_queue import part, publishing
from machine_run import ORDINARY, MachineRun, one_in, small, waits
from naive import PARKED

from asyncflow_sdk.ledger import commands as cmd


class VersionRules(MachineRun):
    """Versions are published in parts, staged, loaded, and given up."""

    @rule(who=small, what=st.sampled_from(["publish", "publish", "load", "load", "await"]), by=small, wait=waits)
    def handle_versions(self, who: int, what: str, by: int, wait: float) -> None:
        current = self.run.naive.version
        if what == "publish":
            version = max(current + [1, 1, 1, 2, 5, 0, 1, 1][by], 0)
            for command in publishing(version):
                self.run.send(self.session(who), command)
            return
        if what == "load":
            command: Any = cmd.Loaded(version=current - [0, 0, 0, 1, 2, -1, 0, 1][by])
        else:
            command = cmd.AwaitVersion(after=current - by // 4, timeout_s=wait)
        self.run.send(self.session(who), command)

    @rule(
        who=small,
        what=st.sampled_from(
            ["open", "announce", "publish", "publish", "withdraw", "close", "all ranks", "restored", "to restore"]
        ),
        rank=st.sampled_from([0, 0, 1, 1, 2, -1]),
        size=st.sampled_from([2, 2, 2, 1]),
        by=small,
        outlives=st.booleans(),
        wait=waits,
    )
    def publish_in_parts(
        self, who: int, what: str, rank: int, size: int, by: int, outlives: bool, wait: float
    ) -> None:  # fmt: skip
        """Ranks of a publisher say this and that, in any order; or all that is needed, but for what one may leave out."""
        coming = self.run.naive.coming
        version = coming.version if coming is not None and by < 6 else self.run.naive.version + 1 + by // 6
        share = part(version, max(rank, 0), outlives=outlives)
        commands: dict[str, Any] = {
            "open": cmd.OpenPublisher(rank=rank, world_size=size, no_rollback="it cannot" * (by == 7)),
            "restored": cmd.Restored(version=self.run.naive.version - (by == 0), optimizer="fresh"),
            "to restore": cmd.GetRestoration(),
            "announce": cmd.Announce(version=version, timeout_s=wait),
            "publish": cmd.Publish(version=version, part=share, probe=b"p" * (rank == 0)),
            "withdraw": cmd.Withdraw(version=version, reason="why not"),
            "close": cmd.ClosePublisher(),
        }
        if what != "all ranks":
            self.run.send(self.session(who), commands[what])
            return
        for each in range(size):
            session = self.session(who + each)
            self.run.send(session, cmd.OpenPublisher(rank=each, world_size=size))
            self.run.send(session, commands["announce"])
        for each in range(size - (by == 3)):
            share = part(version, each, outlives=outlives)
            self.run.send(self.session(who + each), cmd.Publish(version=version, part=share))

    @rule(
        who=small,
        what=st.sampled_from(["fetch", "stage", "stage", "swap", "swap", "load", "fail", "retire", "whole"]),
        by=st.sampled_from([0, 0, 0, 0, 1, 2, -1]),
        wait=waits,
    )
    def be_a_replica(self, who: int, what: str, by: int, wait: float) -> None:
        version, session = self.run.naive.version - by, self.session(who)
        commands: dict[str, Any] = {
            "fetch": cmd.AwaitVersion(after=version - 1, timeout_s=wait),
            "stage": cmd.Staged(version=version, skipped=by > 0, moved=7, encoding="full"),
            "swap": cmd.Swap(
                version=self.run.naive.staged.get(session, version) if by < 2 else version, timeout_s=wait
            ),
            "load": cmd.Loaded(version=version),
            "fail": cmd.NotLoaded(version=version, reason="it would not"),
            "retire": cmd.Retire(),
        }
        for step in ("fetch", "stage", "swap", "load") if what == "whole" else (what,):
            if self.run.send(session, commands[step]) == PARKED:
                break

    @rule(
        who=small,
        ahead=st.sampled_from([0, 1, 1, 2, 3]),
        loads=st.booleans(),
        works=st.integers(0, 3),
        announces=one_in(4),
        back=st.sampled_from([1, 1, 1, 2, 3, 0, -1]),
        forgets=one_in(4),
    )
    def roll_back(
        self, who: int, ahead: int, loads: bool, works: int, announces: bool, back: int, forgets: bool
    ) -> None:  # fmt: skip
        """To a version before those that are published here; replicas may have begun with them."""
        for _ in range(ahead):
            for session in list(self.run.naive.ranks.values()):
                self.run.send(session, cmd.ClosePublisher())
            for command in publishing(self.run.naive.version + 1)[:3]:
                self.run.send(self.session(who), command)
            if loads:
                self.run.send(self.session(who + 1), cmd.Loaded(version=self.run.naive.version))
            for at in range(works if "rollout" in self.run.naive.tasks else 0):
                put = cmd.Put(groups=2, group_size=self.size, columns=ORDINARY)
                self.run.send(self.session(who), put)
                got = self.run.send(self.session(who + 1), cmd.Lease(task="rollout", count=self.size + 1))
                if isinstance(got, cmd.Leased) and at:  # in part, perhaps with what it loads meanwhile
                    index = np.arange(max(len(cmd.unpack_ids(got.ids)) - works // 2, 1), dtype="<i4").tobytes()
                    self.run.send(self.session(who + 1), cmd.Loaded(version=self.run.naive.version))
                    done = cmd.Complete(token=got.token, columns={"response": COLUMN}, index=index)
                    self.run.send(self.session(who + 1), done)
        if announces:
            self.run.send(self.session(who), cmd.Announce(version=self.run.naive.version + 1))
        kept = [version.version for version in self.run.naive.kept]
        version = kept[max(-1 - back, -len(kept))] if kept and back >= 0 else self.run.naive.version - back
        self.run.send(self.session(who), cmd.Rollback(version=version, reason="it diverged"))
        self.run.send(self.session(who), cmd.GetRestoration())
        if not forgets:
            self.run.send(self.session(who), cmd.Restored(version=self.run.naive.version))
