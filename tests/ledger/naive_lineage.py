"""What a naive ledger knows of versions and steps: which step trains a version, and which versions were given up."""

from __future__ import annotations

from dataclasses import dataclass

from naive_rows import Lease, NaiveRows


@dataclass
class Planned:
    """A trainer goes on from a checkpoint: the number that is to be published next, the step it trains, and what it comes after."""

    number: int
    step: int
    parent: int


class NaiveLineage(NaiveRows):
    def __init__(self) -> None:
        super().__init__()
        self.parents: dict[int, int] = {}
        self.resumed: tuple[int, int, int] | None = None  # step leased again, the next version, by which it is ahead
        self.planned: Planned | None = None
        self.turns: list[
            tuple[int, bool]
        ] = []  # versions not at the place of their number, and whether rollbacks made them

    def shift(self) -> int:
        """By which versions are ahead of the steps that train them."""
        if self.planned is not None:
            return self.planned.number - self.planned.step
        if self.resumed is not None and self.version < self.resumed[1]:
            return self.resumed[2]
        return self.version - self.trains[self.version]

    def resume(self, step: int) -> None:
        """A step is leased: if it was published already, it takes the next number."""
        if self.version > step + self.shift():
            self.resumed = step, self.version + 1, self.version - step

    def in_training(self) -> int:
        """The first step that was not published, as far as one can tell."""
        train = self.train()
        assert train is not None
        waiting = {r.step for r in self.live().values() if r.state[train.name] == "open"} - {None, self.step}
        step = self.next_to_train()
        while self.version > step + self.shift() and step + 1 < self.step and step + 1 not in waiting:
            step += 1
        return step

    def version_of(self, step: int) -> int:
        """What a step trains; numbers that were told of it, or of one before it that is leased, stay as they are."""
        train, versions = self.train(), [step + self.shift()]
        for token, lease in self.leases.items():
            earlier = self.rows[lease.ids[0]].step
            if train is not None and lease.task == train.name and self.held(token) and earlier is not None:
                versions += [lease.newest + step - earlier] * (earlier <= step)
        return max(versions)

    def given_up(self, version: int) -> bool:
        """Whether the current version does not descend from it."""
        newest = line = self.version if self.planned is None else self.planned.number
        while line > max(version, -1):
            line = self.parents[line]
        return line != version and -1 < version <= newest

    def rolled_back(self, version: int) -> bool:
        """Whether it was given up on purpose."""
        gone = any(back and self.parents[number] < version < number for number, back in self.turns)
        return gone and self.given_up(version)

    def follows(self, version: int, other: int) -> bool:
        """Whether what was begun by another version may be gone on with by this one."""
        if self.given_up(other) and not self.rolled_back(other):
            return self.trains[version] >= self.trains[other]
        return version >= other

    def plan(self, number: int, step: int, parent: int) -> None:
        """A version will come that is trained at this step, and comes after ``parent``; what was planned before will not."""
        for never in [each for each in self.trains if each > number]:
            del self.trains[never], self.parents[never]
        for skipped in range(self.version + 1, number):
            self.parents.setdefault(skipped, skipped - 1)
            self.trains.setdefault(skipped, skipped - self.shift())
        self.parents[number], self.trains[number] = parent, step
        self.planned, self.resumed = Planned(number, step, parent), None

    def number_to(self, number: int) -> None:
        """Versions up to this one have their places, unless they had them already."""
        for each in range(self.version + 1, number + 1):
            if self.planned is None or each != self.planned.number:
                self.parents.setdefault(each, each - 1)
                self.trains.setdefault(each, each - self.shift())

    def next_to_train(self) -> int:
        train = self.train()
        assert train is not None
        open_ones = [
            r for r in self.live().values() if r.step is not None and r.state[train.name] in ("open", "leased")
        ]
        return min((r.step for r in open_ones if r.step is not None), default=self.step)

    def acknowledged(self, lease: Lease) -> None:
        """A step was: if it was leased before the last rollback, what it was trained to is nowhere in the current version; or
        it is there, if that was rolled back to it. Likewise if it was leased before the version that it made had its place."""
        acknowledged = self.rows[lease.ids[0]].step
        assert acknowledged is not None
        if self.resumed is not None:
            step, first, ahead = self.resumed
            if acknowledged == step and self.version == first:
                ahead = min(ahead, self.version - self.next_to_train())
                self.trains[first] = max(self.trains[first], first - ahead)
            return
        if not self.turns or self.version != self.turns[-1][0]:
            return
        before, rolled_back = lease.turns < len(self.turns), self.turns[-1][1]
        in_it = rolled_back and acknowledged < self.trains[self.parents[self.version]]
        if in_it or (before and (rolled_back or lease.newest < self.version)):
            self.trains[self.version] = max(self.trains[self.version], self.next_to_train())
