"""The ledger: all rows, leases, steps and versions, and the rules for granting them to clients.

A pure state machine. Inputs: commands, the time, and deaths of sessions. Outputs (``drain``): answers, events and
retired rows. It does no I/O and reads no clock; a test or simulator drives it like a server. The cost of a command
depends on the rows it names, never on the number of live rows. Not thread-safe: one thread owns it.

    ledger = Ledger()
    ledger.apply(session, command, now, ticket)
    for ticket, reply in ledger.drain().answers: ...

``LedgerState`` is the data, in parts; the rules below decide about changes, each with the help of earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import AsyncFlowError, DeadlineExceeded, LeaseLost, PayloadLost
from ..interfaces import Sampler, StalenessPolicy
from ..types.reports import TERMINAL, Audit, StatusReport
from ..types.tasks import PolicySpec, SamplerSpec
from . import commands as cmd
from .admission import LeaseAdmission, Puts
from .assembly import StepAssembly
from .checkpoints import StepCheckpoints
from .commands import Ids
from .completion import RowCompletion
from .configuration import QueueConfiguration
from .payload_loss import PayloadLoss
from .pins import VersionPins
from .publication import VersionPublication
from .rank_groups import RankGroups
from .replicas import Replicas
from .samplers import TaskSamplers, make_sampler
from .staleness import StalenessControl, make_policy
from .state import LedgerState
from .state.context import Effects, HomeLoss, LostColumns
from .state.idempotency import MAX_KEYS
from .state.rows import NONE
from .state.sessions import ParkedRequest, Session
from .status import StatusReporter
from .terminations import Terminations

Handler = Callable[[Session, Any], cmd.Reply | None]


class Ledger:
    """Dispatches commands to the rules, parks requests that have to wait, and retries them. ``now``
    is ledger seconds and never falls.

    ``initial_rows``: initial size of the row arrays, which grow. ``kept_keys``: number of put keys kept after their
    rows have ended. ``make_sampler``, ``make_policy``: factories; they raise ConfigError for an unknown name."""

    def __init__(
        self,
        initial_rows: int = 1024,
        kept_keys: int = MAX_KEYS,
        *,
        make_sampler: Callable[[SamplerSpec], Sampler] = make_sampler,
        make_policy: Callable[[PolicySpec], StalenessPolicy] = make_policy,
    ) -> None:
        state = self.state = LedgerState(initial_rows, kept_keys)
        self.staleness = StalenessControl(state, make_policy)
        self.samplers = TaskSamplers(state, make_sampler)
        self.terminations = Terminations(state)
        self.assembly = StepAssembly(state, self.staleness, self.terminations)
        self.pins = VersionPins(state, self.terminations)
        self.admission = LeaseAdmission(state, self.assembly, self.samplers, self.pins)
        self.completion = RowCompletion(state, self.assembly)
        self.rank_groups = RankGroups(state, self.admission, self.completion)
        self.configuration = QueueConfiguration(state, self.samplers, self.assembly)
        self.puts = Puts(state, self.assembly, self.pins)
        self.replicas = Replicas(state, self.completion, self.pins)
        self.publication = VersionPublication(state, self.assembly, self.replicas, self.pins)
        self.payload_loss = PayloadLoss(state, self.completion)
        self.checkpoints = StepCheckpoints(state, self.completion, self.publication, self.payload_loss)
        self._reporter = StatusReporter(state, self.staleness, self.publication, self.replicas)
        self._handlers: dict[type, Handler] = {
            cmd.Configure: self._configure,
            cmd.Declare: self._declare,
            cmd.AddRows: lambda session, command: self.puts.put(command),
            cmd.Cancel: lambda session, command: self.puts.cancel(command),
            cmd.End: lambda session, command: self.puts.end(command),
            cmd.AwaitRowsWanted: lambda session, command: self.puts.wanted(command),
            cmd.GetPut: lambda session, command: self.state.keys.newest(command.prefix),
            cmd.LeaseRows: self._lease,
            cmd.Complete: self.rank_groups.complete,
            cmd.GiveBack: self.rank_groups.give_back,
            cmd.Renew: self._renew,
            cmd.AwaitLost: lambda session, command: session.take_lost(),
            cmd.AllGather: self.rank_groups.gather,
            cmd.OpenPublisher: self.publication.open,
            cmd.ClosePublisher: lambda session, command: self.publication.close(session, "closed its publisher"),
            cmd.Announce: self.publication.announce,
            cmd.Publish: self.publication.publish,
            cmd.Withdraw: self.publication.withdraw,
            cmd.Rollback: self.publication.roll_back,
            cmd.GetRestoreTarget: lambda session, command: self.publication.restoration(command.version),
            cmd.ReportRestored: self.publication.restored,
            cmd.AwaitVersion: self.replicas.await_version,
            cmd.AwaitPins: lambda session, command: self.pins.await_end(),
            cmd.ReportStaged: self.replicas.staged,
            cmd.Swap: self.replicas.swap,
            cmd.ReportLoaded: self.replicas.loaded,
            cmd.ReportLoadFailed: self.replicas.not_loaded,
            cmd.Retire: self.replicas.retire,
            cmd.AddCheckpoint: lambda session, command: self.checkpoints.add(command),
            cmd.Resume: self.checkpoints.resume,
            cmd.GetTrainingPosition: lambda session, command: self.checkpoints.position(),
            cmd.OpenHome: self.state.homes.open,
            cmd.EvictHome: self.state.homes.evict,
            cmd.GetHomes: lambda session, command: self.state.homes.listed(),
            cmd.Dismiss: self._dismiss,
            cmd.Prepare: self._prepare,
            cmd.CloseSession: lambda session, command: self._close(session.id, f"{session.name} left", blame=False),
            cmd.GetAudit: lambda session, command: self.audit(),
            cmd.GetFailed: self._get_failed,
            cmd.GetStatus: lambda session, command: self.status(),
        }

    # ---- inputs

    def apply(self, session: int, command: Any, now: float, ticket: int, first: cmd.Reply | None = None) -> None:
        """Carry out a command. The answer, now or later, is in the effects under ``ticket``. ``first``: see
        ``ParkedRequest``. A failing command changes nothing. Client errors are answers; nothing is raised."""
        context, sessions = self.state.context, self.state.sessions
        context.begin(now)
        if isinstance(command, cmd.OpenSession):
            context.answer(ticket, cmd.SessionOpened(session=sessions.open(command.name, now).id))
            return
        try:
            if session not in sessions.by_id:
                raise LeaseLost(f"session {session} is closed; connect again")
            reply = self._handlers[type(command)](sessions.by_id[session], command)
        except AsyncFlowError as error:
            context.answer(ticket, error)
            return
        if reply is not None:
            context.answer(ticket, reply)
        else:
            until = now + command.timeout_s
            request = ParkedRequest(ticket, session, command, now, until, first)
            if not until > now:  # NaN is no deadline
                context.answer(ticket, DeadlineExceeded(self._reporter.explain(request)))
            else:
                self._park(request)
        self._settle()

    def tick(self, now: float) -> None:
        """Expire leases, parked requests and absent homes past their deadline."""
        state = self.state
        state.context.begin(now)
        due, by_id = state.leases.deadlines.due(now), state.sessions.by_id
        held = [state.tasks[grant.task].held(by_id.get(grant.session)) or 1 for grant in due]
        for grant, lost in zip(due, held, strict=True):
            if grant.token not in state.leases.by_token:
                continue  # it ended with another one in this loop
            if grant.parts != NONE and self.admission.waits_for_part(grant):
                state.leases.renew(grant)
            else:
                limit = state.tasks[grant.task].spec.lease_s
                self.completion.void(grant, f"the lease expired after {limit:g} s", blame=True, lost=lost)
        self._settle()
        late = state.parked.deadlines.due(now)
        for request in late:
            state.context.answer(request.ticket, DeadlineExceeded(self._reporter.explain(request)))
        for request in late:
            state.parked.remove(request)
        if late:
            self._settle()
        self.state.homes.give_up_silent()  # last: nothing is granted before the server answers

    def next_deadline(self) -> float | None:
        """Return the time of the next ``tick`` with work to do; None for none."""
        timers = (self.state.leases.deadlines, self.state.parked.deadlines, self.state.homes.deadlines)
        return min([time for each in timers if (time := each.next()) is not None], default=None)

    def session_died(self, session: int, now: float, reason: str, *, blame: bool = True) -> None:
        """Close a session and return its rows. ``blame``: count it as an attempt of the rows."""
        self.state.context.begin(now)
        self._close(session, reason, blame=blame)
        self._settle()

    def forget(self, ticket: int, now: float) -> None:
        """Drop a parked request."""
        self.state.context.begin(now)
        if ticket in self.state.parked.by_ticket:
            self.state.parked.remove(self.state.parked.by_ticket[ticket])
            self._settle()

    def reply_undelivered(self, session: int, version: int, now: float) -> None:
        """Revoke the permission to load a version, because its answer was not delivered."""
        self.state.context.begin(now)
        self.replicas.reply_undelivered(session, version)
        self._settle()

    def lose(self, ids: Ids, now: float, reason: str, tickets: Iterable[int] = ()) -> None:
        """Fail rows with lost payload, and their groups. Puts parked under ``tickets`` lost theirs too: they are
        refused before the freed room goes to other puts."""
        self.state.context.begin(now)
        self._refuse_puts(tickets, reason)
        self.payload_loss.lose(ids, reason)
        self._settle()

    def lose_homes(
        self, losses: Sequence[tuple[HomeLoss, Sequence[LostColumns]]], now: float, tickets: Iterable[int] = ()
    ) -> None:
        """Answer ``Effects.homes_lost``: lose the columns in all these homes. ``tickets``: see ``lose``."""
        self.state.context.begin(now)
        self._refuse_puts(tickets, "its block was lost, alone or with its home")
        self.payload_loss.lose_homes(losses)
        self._settle()

    # ---- outputs

    def drain(self) -> Effects:
        """Return the effects since the last call."""
        return self.state.context.drain()

    @property
    def now(self) -> float:
        """Ledger seconds at the last input."""
        return self.state.context.now

    @property
    def ended(self) -> bool:
        """True if no further row can be put."""
        return self.state.partitions.ended

    def audit(self) -> Audit:
        """Return the balance of rows, with live rows counted from scratch."""
        ended = dict(zip(TERMINAL, self.state.rows.ended[1:].tolist(), strict=True))
        live = len(self.state.rows.live_ids())
        reasons, homes = dict(self.terminations.reasons), self.state.homes.statuses()
        return Audit(put=self.state.budget.put, live=live, reasons=reasons, homes=homes, **ended)

    def status(self) -> StatusReport:
        """Return rows by task and state, sessions, leases, and the reason of each wait."""
        return self._reporter.report()

    def parts(self) -> dict[str, object]:
        """Return the parts of the state and the rules by name; a snapshot has their attributes."""
        rules = {name: rule for name, rule in vars(self).items() if not name.startswith("_")}
        return {**vars(self.state), **rules}

    def _park(self, request: ParkedRequest) -> None:
        state, command = self.state, request.command
        state.parked.add(request)
        if isinstance(command, cmd.LeaseRows):
            if command.token:
                state.leases.renew(state.leases.by_token[command.token])  # it waits for a part
            if command.world_size > 1:
                self.rank_groups.parked(request)
        elif isinstance(command, (cmd.AwaitVersion, cmd.Swap)):
            self.replicas.parked(request)
        elif isinstance(command, cmd.AllGather):
            self.rank_groups.replace_older(self.state.sessions.by_id[request.session], command)
        elif isinstance(command, cmd.AwaitRowsWanted) and not command.more:
            state.context.wake(*(task.place for task in state.tasks))  # its rows are the last

    def _settle(self) -> None:
        """Retry parked requests that may succeed now, in an order that a replay repeats."""
        context, parked, sessions = self.state.context, self.state.parked, self.state.sessions.by_id
        self.assembly.refill()
        while (woken := context.next_woken()) is not None:
            for request in parked.at(*woken):
                if request.ticket not in parked.by_ticket:
                    continue  # answered together with another rank
                reply: cmd.Reply | AsyncFlowError | None
                try:
                    reply = self._handlers[type(request.command)](sessions[request.session], request.command)
                except AsyncFlowError as error:
                    reply = error
                if reply is not None:
                    parked.remove(request)
                    context.answer(request.ticket, reply)
                elif not context.all_woken and self._blocks_others(request.command):
                    break
            self.assembly.refill()

    def _blocks_others(self, command: cmd.Command) -> bool:
        """True if no later request at the same place can succeed, after this one could not."""
        partitions = self.state.partitions
        if isinstance(command, cmd.AddRows):
            return not self.state.context.every_put and not self.state.steps.lacks_rows
        if not isinstance(command, cmd.LeaseRows):
            return False
        if partitions.ended_names or (partitions.ended and len(partitions.numbers) > 1):
            return False  # requests may name other, ended partitions
        task = self.state.tasks[command.task]
        return not task.grouped and not any(task.fit.values())

    # ---- commands that concern several parts

    def _declare(self, session: Session, command: cmd.Declare) -> cmd.Reply:
        new = command.task.name not in self.state.tasks
        reply = self.configuration.declare(command)
        if new:
            self.payload_loss.end_unreadable(self.state.tasks[command.task.name])
        return reply

    def _configure(self, session: Session, command: cmd.Configure) -> cmd.Reply:
        reply = self.configuration.configure(command)
        self.replicas.commit()
        self.state.homes.set_silence()
        return reply

    def _lease(self, session: Session, command: cmd.LeaseRows) -> cmd.Reply | None:
        task = self.state.tasks[command.task]
        self.admission.check(task, command)
        grant = self.admission.check_part(session, task, command) if command.parts or command.token else None
        if command.world_size != 1 or command.rank or command.shards:
            self.rank_groups.check(session, task, command)
        if grant is None:
            self.admission.check_open(session, task, command)
        if task.must_wait(session):
            return None
        if task.spec.admits:
            if command.most and session.id in self.replicas.swapping:
                return None  # it would have to return them; other replicas can start them now
            return self.admission.lease_prompts(session, task, command)
        if command.world_size > 1:
            return self.rank_groups.lease(session, task, command, grant)
        if command.parts:
            part = self.admission.find_part(command, grant, 1)
            return None if part is None else self.admission.deliver_part(session, grant, *part)
        found = self.admission.find(task, command, 1, session)
        return None if found is None else self.admission.grant(session, task, *found)

    def _renew(self, session: Session, command: cmd.Renew) -> cmd.Reply:
        self.state.leases.renew(self.state.leases.held(session, command.token, command.rank))
        return cmd.Done()

    def _dismiss(self, session: Session, command: cmd.Dismiss) -> cmd.Reply:
        known = self.state.sessions.by_id.values()
        named = [each for each in known if each.name == command.name] if command.name else [session]
        for member in named:
            if command.ended and member is not session:
                self._close(member.id, command.ended, blame=True)
            member.dismiss()
        lost = self.state.dead_letters.explain(command.name, command.ended) if command.ended else 0
        self.state.parked.wake_all()
        return cmd.Dismissed(count=len(named), lost=lost)

    def _prepare(self, session: Session, command: cmd.Prepare) -> cmd.Reply:
        preparing = self.state.sessions.preparing
        preparing[session.id] = command, self.now
        if not command.what:
            del preparing[session.id]
        return cmd.Done()

    def _get_failed(self, session: Session, command: cmd.GetFailed) -> cmd.Reply:
        groups = tuple(self.state.dead_letters.groups)
        return cmd.Failed(groups=groups[max(len(groups) - max(command.count, 0), 0) :])

    def _refuse_puts(self, tickets: Iterable[int], reason: str) -> None:
        for ticket in tickets:
            self.state.parked.remove(self.state.parked.by_ticket[ticket])
            refused = PayloadLost(f"{reason} while the put waited for room; nothing of it was stored")
            self.state.context.answer(ticket, refused)

    def _close(self, session: int, reason: str, *, blame: bool) -> cmd.Reply:
        member = self.state.sessions.by_id.get(session)
        if member is None:
            return cmd.Done()
        self.replicas.remove(member, reason)
        self.publication.close(member, f"died: {reason}" if blame else "left")
        for ticket in list(member.parked):
            self.state.parked.remove(self.state.parked.by_ticket[ticket])
        self.state.homes.session_closed(member, reason)
        self.rank_groups.session_closed(member, reason, blame=blame)
        self.state.sessions.remove(session)
        return cmd.Done()
