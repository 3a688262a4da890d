"""The ledger: every row, every lease, every step, every version, and who may have what when.

A pure state machine: commands, the time and deaths go in; answers, events and retired rows come out
(``drain``). It does no I/O and reads no clock, so a test or a simulator drives it as a server does. Cost of a
command follows the rows it names, never the rows alive. Not thread-safe: one thread owns it.

Built in layers, each adding the commands of one idea to the one below:
state → noticing → ending → policing → stepping → choosing → leasing → finishing → teaming → intake → publishing → versioning → swapping
→ rolling_back → losing → resuming → meeting → ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..errors import AsyncFlowError, DeadlineExceeded, Ended, LeaseLost, PayloadLost
from . import commands as cmd
from .commands import TERMINAL, Ids
from .explain import explain
from .meeting import Meeting, meeting_place
from .records import Effects, Session, Waiter
from .remembering import KEYS, KeyedPuts
from .reporting import report
from .rows import Rows


class Ledger(Meeting):
    """See the module docstring. ``now`` is ledger seconds, never falling. ``initial_rows``: memory to begin with; it grows.
    ``kept_keys``: how many keys of puts are remembered whose rows have ended."""

    def __init__(self, initial_rows: int = 1024, kept_keys: int = KEYS) -> None:
        super().__init__()
        self.rows = Rows(initial_rows)
        self._keys = KeyedPuts(kept_keys)
        self._handlers: dict[type, Callable[[Session, Any], cmd.Reply | None]] = {
            cmd.Configure: self._configure,
            cmd.Declare: self._declare,
            cmd.Put: self._put,
            cmd.Lease: self._lease,
            cmd.Complete: self._complete,
            cmd.GiveBack: self._give_back,
            cmd.Renew: self._renew,
            cmd.AwaitLost: self._await_lost,
            cmd.OpenPublisher: self._open_publisher,
            cmd.ClosePublisher: self._close_publisher,
            cmd.Announce: self._announce,
            cmd.Publish: self._publish,
            cmd.Withdraw: self._withdraw_version,
            cmd.Rollback: self._roll_back,
            cmd.GetRestoration: self._get_restoration,
            cmd.Restored: self._restored,
            cmd.AwaitVersion: self._await_version,
            cmd.Staged: self._staged,
            cmd.Swap: self._swap,
            cmd.Loaded: self._loaded,
            cmd.NotLoaded: self._not_loaded,
            cmd.Retire: self._retire,
            cmd.Wanted: self._wanted,
            cmd.End: self._end,
            cmd.Cancel: self._cancel,
            cmd.Dismiss: self._dismiss,
            cmd.Prepare: self._prepare,
            cmd.Leave: self._leave,
            cmd.GetAudit: self._get_audit,
            cmd.GetFailed: self._get_failed,
            cmd.GetStatus: self._get_status,
            cmd.Checkpoint: self._checkpoint,
            cmd.Resume: self._resume,
            cmd.GetCut: self._get_cut,
            cmd.Meet: self._meet,
            cmd.GetPut: self._get_put,
        }

    def apply(self, session: int, command: cmd.Command, now: float, ticket: int) -> None:
        """Carry out a command. Its answer, now or later, is in the effects under ``ticket``.

        A command that fails changes nothing. Raises nothing for what a client can get wrong.
        """
        self._now = now
        if isinstance(command, cmd.Join):
            self._answer(ticket, self._join(command))
            return
        try:
            member = self.sessions.get(session)
            if member is None:
                raise LeaseLost(f"session {session} is closed; connect again")
            reply = self._handlers[type(command)](member, command)
        except AsyncFlowError as error:
            self._answer(ticket, error)
            return
        if reply is not None:
            self._answer(ticket, reply)
        else:
            until = now + command.timeout_s  # type: ignore[attr-defined]
            waiter = Waiter(ticket, session, command, _place(command), now, until)
            if not until > now:  # not a number is no deadline
                self._answer(ticket, DeadlineExceeded(explain(self, waiter, now)))
            else:
                self._park(waiter)
        self._settle()

    def tick(self, now: float) -> None:
        """Let time pass: leases and parked requests past their deadline end."""
        self._now = now
        for lease in self._lease_ends.due(now):
            if lease.token not in self.leases:
                continue  # its rows ended with those of another
            limit = self.tasks[lease.task].spec.lease_s
            self._void(lease, f"the lease expired after {limit:g} s", blame=True)
        self._settle()
        late = self._request_ends.due(now)
        for waiter in late:
            self._answer(waiter.ticket, DeadlineExceeded(explain(self, waiter, now)))
        for waiter in late:
            self._unpark(waiter)
        if late:
            self._settle()

    def next_deadline(self) -> float | None:
        """When ``tick`` has something to do."""
        times = [self._lease_ends.next(), self._request_ends.next()]
        return min((time for time in times if time is not None), default=None)

    def session_died(self, session: int, now: float, reason: str, *, blame: bool = True) -> None:
        """A client is gone: its parked requests are dropped and its rows go back. ``blame``: an attempt of theirs is spent."""
        self._now = now
        self._drop_session(session, reason, blame)
        self._settle()

    def forget(self, ticket: int, now: float) -> None:
        """Nobody waits for a parked request any more."""
        self._now = now
        if ticket in self.parked:
            self._unpark(self.parked[ticket])
            self._settle()

    def unheard(self, session: int, version: int, now: float) -> None:
        """The permission to load a version never arrived."""
        self._now = now
        if session in self.sessions:
            self._take_back(session, version)
            self._settle()

    def lose(self, ids: Ids, now: float, reason: str, tickets: Iterable[int] = ()) -> None:
        """The payload of rows is gone: they fail with their groups, each counted. The same of puts that wait under
        ``tickets``: they are refused, before the room that the rows leave is given to anybody."""
        self._now = now
        for ticket in tickets:
            self._unpark(self.parked[ticket])
            self._answer(ticket, PayloadLost(f"{reason} while the put waited for room; nothing of it was stored"))
        self._lose(ids, reason)
        self._settle()

    def drain(self) -> Effects:
        """Everything since the last call."""
        effects, self._effects = self._effects, Effects()
        return effects

    def _settle(self) -> None:
        """Try the parked requests that what happened may have made possible, in an order a replay repeats."""
        self._refill()
        while self._dirty:
            place = min(self._dirty)
            self._dirty.remove(place)
            for waiter in list(self.waiters.get(place, {}).values()):
                if waiter.ticket not in self.parked:
                    continue  # answered with another rank of its team
                session = self.sessions[waiter.session]
                reply: cmd.Reply | AsyncFlowError | None
                try:
                    reply = self._handlers[type(waiter.command)](session, waiter.command)
                except AsyncFlowError as error:
                    reply = error
                if reply is not None:
                    self._unpark(waiter)
                    self._answer(waiter.ticket, reply)
                elif not self._all_woken and self._nothing_for(waiter.command):
                    break
            self._refill()
        self._all_woken = self._judging = False

    def _nothing_for(self, command: cmd.Command) -> bool:
        """Whether all who wait where this request waits do so for rows, and none is there; or for room, behind it."""
        if isinstance(command, cmd.Put):
            return not self._judging and self._in_line()
        if not isinstance(command, cmd.Lease) or self.ended_partitions or (self.ended and len(self.partitions) > 1):
            return False  # of different partitions, one may have ended and another not
        task = self.tasks[command.task]
        return not task.spec.grouped and not any(task.fit.values())

    def _wanted(self, session: Session, command: cmd.Wanted) -> cmd.Reply | None:
        if self._supply_ended():
            raise Ended("every step is filled; no more rows are wanted")
        if self.steps is None:
            return None
        count = self.steps.window.wanted - self.unselected
        return cmd.RowsWanted(count=count) if count > 0 else None

    def _get_audit(self, session: Session, command: cmd.GetAudit) -> cmd.Reply:
        return self.audit()

    def _get_failed(self, session: Session, command: cmd.GetFailed) -> cmd.Reply:
        letters = self.letters
        newest = list(letters.groups)[len(letters.groups) - max(min(command.count, len(letters.groups)), 0) :]
        return cmd.Failed(groups=tuple(newest), forgotten=letters.total - len(letters.groups))

    def _get_status(self, session: Session, command: cmd.GetStatus) -> cmd.Reply:
        return self.status()

    def _get_put(self, session: Session, command: cmd.GetPut) -> cmd.Reply:
        return self._keys.newest(command.prefix)

    def audit(self) -> cmd.Audit:
        """The balance, its live rows counted afresh."""
        live = len(self.rows.live_ids())
        ended = dict(zip(TERMINAL, self.rows.ended[1:].tolist(), strict=True))
        return cmd.Audit(put=self.put_total, live=live, reasons=dict(self.reasons), **ended)

    def status(self) -> cmd.StatusReport:
        """Rows by task and state, sessions, leases, and what each parked request waits for."""
        return report(self)


PLACES = {
    cmd.Put: "put", cmd.AwaitVersion: "version", cmd.Wanted: "wanted", cmd.Announce: "announce", cmd.Swap: "swap",
    cmd.AwaitLost: "lost",
}  # fmt: skip


def _place(command: cmd.Command) -> str:
    """Where a parked command waits."""
    if isinstance(command, cmd.Lease):
        return f"task {command.task}"
    if isinstance(command, cmd.Meet):
        return meeting_place(command.team)
    return PLACES[type(command)]
