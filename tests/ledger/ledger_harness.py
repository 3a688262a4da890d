"""A ledger beside its naive model: every command goes to both, and everything is checked after each."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ledger_checks import check_counters, check_no_lost_wakeup, check_same, check_same_versions, freeze
from ledger_queue import publishing
from naive import PARKED, Naive
from naive_rows import Parked

from asyncflow_sdk.errors import AsyncFlowError, DeadlineExceeded, LeaseLost, WriteOnceError
from asyncflow_sdk.ledger import TERMINAL, Ledger, TaskSpec
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.ledger.rows import Rows
from asyncflow_sdk.types import ColumnSpec
from asyncflow_sdk.types import events as ev

COLUMN = ColumnSpec("ragged", "int64")


class Harness:
    """``capacity`` of the row arrays is small, so that they move and forget often."""

    def __init__(self, capacity: int = 8) -> None:
        self.ledger = Ledger()
        self.ledger.rows = Rows(capacity)
        self.naive = Naive()
        self.now = 0.0
        self.tickets = 0
        self.tokens: list[tuple[int, int]] = []  # every (session, token) there ever was
        self.retired: set[int] = set()
        self.sound = True

    def join(self, name: str) -> int:
        joined = self.send(0, cmd.Join(name=name))
        assert isinstance(joined, cmd.Joined)
        return joined.session

    def send(self, session: int, command: Any) -> Any:
        """The outcome: a reply, an error, or PARKED."""
        self.tickets += 1
        self.sound = False  # until it was checked
        before, takes_over = freeze(self.ledger), self._takes_over(session, command)
        self.ledger.apply(session, command, self.now, self.tickets)
        effects = self.ledger.drain()
        outcome: Any = PARKED
        own = [n for n, (ticket, _) in enumerate(effects.answers) if ticket == self.tickets]
        in_team = isinstance(command, cmd.Lease) and command.world_size > 1
        first = own == [0] or isinstance(command, cmd.Meet)  # those who waited are answered before who came last
        if own and (not self._waited(effects, own[0], takes_over) if in_team else first):
            outcome = effects.answers.pop(own[0])[1]
        self._note_dealt(outcome, effects)
        if isinstance(outcome, AsyncFlowError):
            assert not effects.answers
            assert not effects.events
            assert not effects.retired
            assert freeze(self.ledger) == before, f"{command} failed, and yet changed something"
        if isinstance(outcome, DeadlineExceeded):
            assert command.timeout_s <= 0
            self.naive.judge(session, command, PARKED)
        else:
            self.naive.judge(session, command, outcome)
        if outcome is PARKED:
            self.naive.take_over(session, command)
            self.naive.parked.append(Parked(self.tickets, session, command, self.now + command.timeout_s))
        self._remember(session, outcome)
        self._follow(effects)
        return outcome

    def _takes_over(self, session: int, command: Any) -> bool:
        """Whether a rank comes whose predecessor still holds something, if only its word."""
        if not isinstance(command, cmd.Lease) or command.world_size == 1:
            return False
        crews = [self.naive.leases[token].crew for token in self.naive.under(command)]
        return any(crew is not None and crew.members[command.rank] < session for crew in crews)

    def _waited(self, effects: Any, own: int, takes_over: bool) -> bool:
        """Whether a request came to wait, if for a moment: what it took over was returned, or failed, before it was
        answered."""
        reply = effects.answers[own][1]
        others = [a for _, a in effects.answers if isinstance(a, LeaseLost)]
        returned = any(isinstance(event, ev.LeaseReturned | ev.RowsEnded) for event in effects.events)
        return isinstance(reply, cmd.Leased) and bool(others or returned or takes_over)

    def _note_dealt(self, outcome: Any, effects: Any) -> None:
        """All shards of a lease of a team are told at once."""
        for reply in [outcome, *(answer for _, answer in effects.answers)]:
            if isinstance(reply, cmd.Leased) and reply.world_size > 1:
                self.naive.dealt.setdefault(reply.token, {})[reply.rank] = reply

    def pass_time(self, seconds: float) -> None:
        self.sound = False
        self.now = self.naive.now = self.now + seconds
        self.ledger.tick(self.now)
        self.naive.expire()
        self._follow(self.ledger.drain())
        assert all(parked.deadline > self.now for parked in self.naive.parked)

    def die(self, session: int) -> None:
        self.sound = False
        self.ledger.session_died(session, self.now, "its process ended")
        self.naive.drop(session, blame=True)
        self._follow(self.ledger.drain())

    def forget(self, ticket: int) -> None:
        self.sound = False
        self.ledger.forget(ticket, self.now)
        self.naive.parked = [p for p in self.naive.parked if p.ticket != ticket]
        self._follow(self.ledger.drain())

    def _remember(self, session: int, outcome: Any) -> None:
        if isinstance(outcome, cmd.Leased):
            self.tokens.append((session, outcome.token))

    def _follow(self, effects: Any) -> None:
        """What happened besides the command's own answer: woken requests, ended rows."""
        naive, late = self.naive, []
        self._note_dealt(None, effects)
        naive.settle()
        for ticket, outcome in effects.answers:
            (parked,) = (p for p in naive.parked if p.ticket == ticket)  # answered once, and only if it was asked
            if isinstance(outcome, DeadlineExceeded):
                assert parked.deadline <= self.now
                naive.judge(parked.session, parked.command, PARKED)
                late.append(parked)
                continue
            naive.parked = [p for p in naive.parked if p not in late]
            naive.judge(parked.session, parked.command, outcome)
            naive.parked.remove(parked)
            self._remember(parked.session, outcome)
            naive.settle()
        naive.parked = [p for p in naive.parked if p not in late]
        self._check_ended(effects)
        self.check()

    def _check_ended(self, effects: Any) -> None:
        ids = [i for part in effects.retired for i in part.tolist()]
        assert len(set(ids)) == len(ids)
        assert not self.retired & set(ids), "a row ended twice"
        said: Counter[str] = Counter()
        for event in effects.events:
            if isinstance(event, ev.RowsEnded):
                said[event.state] += event.count
        assert said == Counter(str(self.naive.rows[i].ended) for i in ids)
        self.retired |= set(ids)
        assert self.retired == {i for i, row in self.naive.rows.items() if row.ended is not None}

    def check(self) -> None:
        check_counters(self.ledger)
        check_same(self.ledger, self.naive)
        check_same_versions(self.ledger, self.naive)
        check_no_lost_wakeup(self.ledger)
        assert sorted(self.ledger.parked) == sorted(t for ws in self.ledger.waiters.values() for t in ws)
        assert sorted(self.ledger.parked) == sorted(p.ticket for p in self.naive.parked)
        assert not self.naive.owed, "whom another rank's coming concerns was told so"
        for parked in self.naive.parked:
            self.naive.judge(parked.session, parked.command, PARKED)
        self.sound = True


class Fair:
    """Workers that do their part: from any state, their turns bring a run to its end."""

    def __init__(self, harness: Harness, tasks: list[TaskSpec], group_size: int, *, team: bool = False) -> None:
        self.harness = harness
        self.team = team  # steps are trained by two ranks
        self.tasks = tasks
        self.group_size = group_size
        self.roles = ["feeder", *(task.name for task in tasks)]
        self._sessions: dict[str, int] = {}

    def turn(self, role: str) -> bool:
        """One turn of a worker; whether it got anywhere."""
        if self._sessions.get(role) not in self.harness.naive.loaded:
            self._sessions[role] = self.harness.join(f"fair {role}")
        if role == "feeder":
            return self._feed()
        task = next(task for task in self.tasks if task.name == role)
        published = task.batch_rows is not None and self._publish_what_is_due(role)
        return self._work(role, task) or published

    def _send(self, role: str, command: Any) -> Any:
        return self.harness.send(self._sessions[role], command)

    def _feed(self) -> bool:
        wanted = self._send("feeder", cmd.Wanted())
        if not isinstance(wanted, cmd.RowsWanted):
            return False
        put = cmd.Put(groups=1, group_size=self.group_size, columns={"prompt": COLUMN})
        return isinstance(self._send("feeder", put), cmd.PutDone)

    def _publish_what_is_due(self, role: str) -> bool:
        naive = self.harness.naive
        due = naive.next_to_train()
        if naive.version >= 0 and naive.trains[naive.version] >= due and naive.planned is None:
            return False
        number = due + naive.shift() if naive.version >= 0 else 0
        for session in list(naive.ranks.values()):  # others give the role up
            self.harness.send(session, cmd.ClosePublisher())
        if naive.to_restore >= 0:
            assert self._send(role, cmd.Restored(version=naive.to_restore)) == cmd.Done()
        opened, _, published, closed = [self._send(role, command) for command in publishing(number)]
        assert isinstance(opened, cmd.Publisher)
        assert closed == cmd.Done()
        return isinstance(published, cmd.Published)

    def _work_as_team(self, task: TaskSpec) -> bool:
        """Two ranks train a step; the second leaves after its word, and comes back."""
        ranks = [self.harness.join(f"fair rank {rank}") for rank in range(2)]
        asks = [
            cmd.Lease(task=task.name, count=4, timeout_s=60.0, team="fair", rank=rank, world_size=2)
            for rank in range(2)
        ]
        first = self.harness.send(ranks[0], asks[0])
        got = self.harness.send(ranks[1], asks[1])
        leased = isinstance(got, cmd.Leased)
        if leased:
            assert first == PARKED
            filtered = (
                b"\0\0\0\0" if got.step % 2 and got.ids else None
            )  # of a step that came back in part, it may have none
            for rank in (1, 0):
                done = cmd.Complete(token=got.token, columns={}, rank=rank, filtered=filtered)
                said = self.harness.send(ranks[rank], done)
                assert isinstance(said, cmd.Completed), said
                self.harness.send(ranks[rank], cmd.Leave())
            return True
        for session in ranks:
            self.harness.send(session, cmd.Leave())
        return False

    def _work(self, role: str, task: TaskSpec) -> bool:
        if self.team and task.batch_rows is not None and task.batch_rows > 1 and not task.gives:
            return self._work_as_team(task)
        got = self._send(role, cmd.Lease(task=task.name, count=4))
        if isinstance(got, cmd.LoadFirst):
            return isinstance(self._send(role, cmd.Loaded(version=got.version)), cmd.Done)
        if not isinstance(got, cmd.Leased):
            return False
        done = self._send(role, cmd.Complete(token=got.token, columns=dict.fromkeys(task.gives, COLUMN)))
        if isinstance(done, WriteOnceError):  # rows that came with what this task would write
            done = self._send(role, cmd.GiveBack(token=got.token, blame=True))
        assert isinstance(done, cmd.Completed | cmd.Done), done
        return True

    def _cover(self, session: int) -> bool:
        """Make a checkpoint of all that is acknowledged; whether it makes anything final."""
        naive = self.harness.naive
        before = naive.covered
        if naive.checkpoints and naive.train() is not None:
            step = naive.next_to_train()
            self.harness.send(session, cmd.Checkpoint(step=step, covers=step))
        return naive.covered > before

    def finish(self, rounds: int = 400) -> None:
        """Bring the run to its end. Fails if it cannot be brought there."""
        harness, ledger = self.harness, self.harness.ledger
        admin = harness.join("fair admin")
        declared = [harness.send(admin, cmd.Declare(task=task)) for task in self.tasks]
        cancel = any(isinstance(reply, AsyncFlowError) for reply in declared)  # a task could not be added: give up
        steps = ledger.steps
        if steps is not None and steps.task.spec.name not in {task.name for task in self.tasks}:
            cancel = True  # steps that nobody here takes would be waited for
        unlimited = ledger.steps is None or ledger.steps.window.slots is None
        for count in range(rounds):
            if cancel or (unlimited and count == 2):
                harness.send(admin, cmd.End(cancel=cancel))
                cancel = unlimited = False
            if ledger.ended and not harness.naive.live():
                break
            moved = [self.turn(role) for role in self.roles if role == "feeder" or role in ledger.tasks]
            if not any(moved) and not self._cover(admin):
                deadline = ledger.next_deadline()
                if deadline is None and not ledger.ended:
                    harness.send(admin, cmd.End())
                    continue
                assert deadline is not None, f"deadlock: {ledger.status()}"
                harness.pass_time(max(deadline - harness.now, 0.0))
        audit = ledger.audit()
        assert ledger.ended, f"no end in {rounds} rounds: {ledger.status()}"
        assert audit.live == 0, f"no end in {rounds} rounds: {ledger.status()}"
        assert len(self.harness.retired) == audit.put
        for task in ledger.tasks:
            assert type(harness.send(admin, cmd.Lease(task=task, count=1))).__name__ == "Ended"
        for session, token in harness.tokens[-5:]:  # every token is stale by now
            stale = harness.send(session, cmd.Complete(token=token, columns={}))
            assert isinstance(stale, LeaseLost)
        assert set(audit.terminal) == set(TERMINAL)
