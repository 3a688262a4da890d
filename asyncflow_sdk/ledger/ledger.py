"""The ledger: every row, lease, step and version, and which client may have which.

A pure state machine: commands, the time and deaths go in; answers, events and retired rows come out (``drain``). It does no I/O and
reads no clock, so a test or a simulator drives it as a server does. The cost of a command depends on the rows it names, never on the
rows alive. Not thread-safe: one thread owns it.

    ledger = Ledger()
    ledger.apply(session, command, now, ticket)
    for ticket, reply in ledger.drain().answers: ...

``LedgerState`` is the data, of parts that own their attributes: rows, tasks, leases, steps, versions. The rules act on it, each on one idea:
    Staleness, TaskSamplers                    user code that decides
    Terminations, StepAssembly                 rows end, become ready, and fill steps
    Training, Admission, Completion            rows are leased, completed and returned
    RankGroups, RankBarrier                    the ranks of one job act as one
    Configuration, Puts                        limits, tasks and rows come in
    Replicas, Publication, WeightUpdates       versions come in and go out
    Rollbacks, PayloadLoss, Checkpoints        versions, payload and progress are lost
    Diagnostics, StatusReporter                why requests wait
A rule uses the rules above it and knows none below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..errors import AsyncFlowError, DeadlineExceeded, LeaseLost, PayloadLost
from ..interfaces import Sampler, StalenessPolicy
from . import commands as cmd
from .admission import Admission
from .assembly import StepAssembly
from .checkpoints import Checkpoints
from .commands import TERMINAL, Ids, PolicySpec, SamplerSpec
from .completion import Completion
from .configuration import Configuration
from .diagnostics import Diagnostics
from .factory import make_policy, make_sampler
from .payload_loss import PayloadLoss
from .publication import Publication
from .puts import Puts
from .rank_groups import RankBarrier, RankGroups
from .replicas import Replicas
from .rollback import Rollbacks
from .sampling import TaskSamplers
from .staleness import Staleness
from .state import LedgerState
from .state.context import Effects
from .state.idempotency import MAX_KEYS
from .state.leases import positions
from .state.parked import ParkedRequest, place_of
from .state.sessions import Preparation, Session
from .status import StatusReporter
from .terminations import Terminations
from .training import Training
from .version_diagnostics import VersionDiagnostics
from .weight_updates import WeightUpdates

Handler = Callable[[Session, Any], cmd.Reply | None]


class Ledger:
    """Dispatches commands to the parts, parks requests that have to wait, and tries them again. ``now`` is ledger seconds, never falling.

    ``initial_rows``: rows that the arrays hold at first; they grow. ``kept_keys``: keys of puts that are remembered after their rows
    have ended. ``make_sampler``, ``make_policy``: the sampler or staleness policy of a name; they raise ConfigError for one they do
    not know.
    """

    def __init__(
        self,
        initial_rows: int = 1024,
        kept_keys: int = MAX_KEYS,
        *,
        make_sampler: Callable[[SamplerSpec], Sampler] = make_sampler,
        make_policy: Callable[[PolicySpec], StalenessPolicy] = make_policy,
    ) -> None:
        state = self.state = LedgerState(initial_rows, kept_keys)
        self.staleness = Staleness(state, make_policy)
        self.samplers = TaskSamplers(state, make_sampler)
        self.terminations = Terminations(state)
        self.assembly = StepAssembly(state, self.staleness, self.terminations)
        self.training = Training(state)
        self.admission = Admission(state, self.training, self.staleness, self.samplers)
        self.completion = Completion(state, self.training, self.terminations, self.assembly)
        self.rank_groups = RankGroups(state, self.admission, self.completion)
        self.barrier = RankBarrier(state)
        self.configuration = Configuration(state, self.staleness, self.samplers, self.assembly)
        self.puts = Puts(state, self.terminations, self.assembly)
        self.replicas = Replicas(state)
        self.publication = Publication(state, self.training, self.replicas)
        self.weight_updates = WeightUpdates(state, self.replicas, self.terminations, self.completion)
        self.rollback = Rollbacks(state, self.terminations, self.publication)
        self.payload_loss = PayloadLoss(state, self.terminations)
        self.checkpoints = Checkpoints(state, self.terminations, self.completion, self.publication, self.payload_loss)
        weights = VersionDiagnostics(state, self.publication, self.replicas, self.weight_updates)
        self._diagnostics = Diagnostics(state, self.staleness, weights)
        self._reporter = StatusReporter(state, self.staleness, self.publication, self.replicas, self._diagnostics)
        self._handlers: dict[type, Handler] = self._handlers_by_command()

    def _handlers_by_command(self) -> dict[type, Handler]:
        publication, updates, checkpoints = self.publication, self.weight_updates, self.checkpoints
        return {
            cmd.Configure: self._configure,
            cmd.Declare: lambda session, command: self.configuration.declare(command),
            cmd.Put: lambda session, command: self.puts.put(command),
            cmd.Cancel: lambda session, command: self.puts.cancel(command),
            cmd.End: lambda session, command: self.puts.end(command),
            cmd.Wanted: lambda session, command: self.puts.wanted(),
            cmd.GetPut: lambda session, command: self.state.keys.newest(command.prefix),
            cmd.Lease: self._lease,
            cmd.Complete: self._complete,
            cmd.GiveBack: self._give_back,
            cmd.Renew: self._renew,
            cmd.AwaitLost: lambda session, command: self.state.sessions.take_lost(session),
            cmd.Meet: self.barrier.gather,
            cmd.OpenPublisher: publication.open,
            cmd.ClosePublisher: self._close_publisher,
            cmd.Announce: publication.announce,
            cmd.Publish: publication.publish,
            cmd.Withdraw: publication.withdraw,
            cmd.Rollback: self.rollback.roll_back,
            cmd.GetRestoration: lambda session, command: self.rollback.restoration(),
            cmd.Restored: self.rollback.restored,
            cmd.AwaitVersion: updates.await_version,
            cmd.Staged: updates.staged,
            cmd.Swap: updates.swap,
            cmd.Loaded: updates.loaded,
            cmd.NotLoaded: updates.not_loaded,
            cmd.Retire: lambda session, command: updates.retire(session),
            cmd.Checkpoint: lambda session, command: checkpoints.add(command),
            cmd.Resume: checkpoints.resume,
            cmd.GetCut: lambda session, command: checkpoints.cut(),
            cmd.Dismiss: self._dismiss,
            cmd.Prepare: self._prepare,
            cmd.Leave: self._leave,
            cmd.GetAudit: lambda session, command: self.audit(),
            cmd.GetFailed: self._get_failed,
            cmd.GetStatus: lambda session, command: self.status(),
        }

    # ---- inputs

    def apply(self, session: int, command: cmd.Command, now: float, ticket: int) -> None:
        """Carry out a command. Its answer, now or later, is in the effects under ``ticket``.

        A command that fails changes nothing. Raises nothing for errors of a client.
        """
        self.state.context.now = now
        if isinstance(command, cmd.Join):
            self.state.context.answer(ticket, cmd.Joined(session=self.state.sessions.open(command.name, now).id))
            return
        try:
            member = self.state.sessions.by_id.get(session)
            if member is None:
                raise LeaseLost(f"session {session} is closed; connect again")
            reply = self._handlers[type(command)](member, command)
        except AsyncFlowError as error:
            self.state.context.answer(ticket, error)
            return
        if reply is not None:
            self.state.context.answer(ticket, reply)
        else:
            until = now + command.timeout_s  # type: ignore[attr-defined]
            request = ParkedRequest(ticket, session, command, place_of(command), now, until)
            if not until > now:  # NaN is no deadline
                self.state.context.answer(ticket, DeadlineExceeded(self._diagnostics.explain(request)))
            else:
                self._park(request)
        self._settle()

    def tick(self, now: float) -> None:
        """Let time pass: leases and parked requests past their deadline end."""
        self.state.context.now = now
        for grant in self.state.leases.deadlines.due(now):
            if grant.token in self.state.leases.by_token:  # else its rows ended with those of another
                limit = self.state.tasks[grant.task].spec.lease_s
                self.completion.void(grant, f"the lease expired after {limit:g} s", blame=True)
        self._settle()
        late = self.state.parked.deadlines.due(now)
        for request in late:
            self.state.context.answer(request.ticket, DeadlineExceeded(self._diagnostics.explain(request)))
        for request in late:
            self.state.parked.remove(request)
        if late:
            self._settle()

    def next_deadline(self) -> float | None:
        """The time of the next ``tick`` that has something to do."""
        times = [self.state.leases.deadlines.next(), self.state.parked.deadlines.next()]
        return min((time for time in times if time is not None), default=None)

    def session_died(self, session: int, now: float, reason: str, *, blame: bool = True) -> None:
        """Close a session: its parked requests are dropped and its rows go back. ``blame``: that counts as an attempt of theirs."""
        self.state.context.now = now
        self._close(session, reason, blame=blame)
        self._settle()

    def forget(self, ticket: int, now: float) -> None:
        """Drop a parked request."""
        self.state.context.now = now
        if ticket in self.state.parked.by_ticket:
            self.state.parked.remove(self.state.parked.by_ticket[ticket])
            self._settle()

    def unheard(self, session: int, version: int, now: float) -> None:
        """Take back the permission to load a version: its answer did not arrive."""
        self.state.context.now = now
        if session in self.state.sessions.by_id:
            self.weight_updates.unheard(session, version)
            self._settle()

    def lose(self, ids: Ids, now: float, reason: str, tickets: Iterable[int] = ()) -> None:
        """Fail rows whose payload is gone, with their groups. Puts parked under ``tickets`` lost theirs too: they are refused before the
        room of the rows is given to other puts."""
        self.state.context.now = now
        for ticket in tickets:
            self.state.parked.remove(self.state.parked.by_ticket[ticket])
            refused = PayloadLost(f"{reason} while the put waited for room; nothing of it was stored")
            self.state.context.answer(ticket, refused)
        self.payload_loss.lose(ids, reason)
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

    def audit(self) -> cmd.Audit:
        """The balance. Live rows are counted afresh."""
        ended = dict(zip(TERMINAL, self.state.rows.ended[1:].tolist(), strict=True))
        live = len(self.state.rows.live_ids())
        return cmd.Audit(put=self.state.budget.put, live=live, reasons=dict(self.terminations.reasons), **ended)

    def status(self) -> cmd.StatusReport:
        """Rows by task and state, sessions, leases, and why each parked request waits."""
        return self._reporter.report()

    def parts(self) -> dict[str, object]:
        """The parts of the state, and the rules, by name: a snapshot consists of their attributes."""
        rules = {
            name: rule for name, rule in vars(self).items() if not name.startswith("_") and rule is not self.state
        }
        return {**vars(self.state), **rules}

    # ---- parking

    def _park(self, request: ParkedRequest) -> None:
        self.state.parked.add(request)
        command = request.command
        if isinstance(command, cmd.Lease) and command.world_size > 1:
            self.rank_groups.parked(request)
        elif isinstance(command, cmd.AwaitVersion | cmd.Swap):
            self.weight_updates.parked(request)
        elif isinstance(command, cmd.Meet):
            self.barrier.parked(request)

    def _settle(self) -> None:
        """Try parked requests again that may now succeed, in an order that a replay repeats."""
        context = self.state.context
        self.assembly.refill()
        while (place := context.next_woken()) is not None:
            for request in self.state.parked.at(place):
                if request.ticket not in self.state.parked.by_ticket:
                    continue  # answered with another rank of its group
                session = self.state.sessions.by_id[request.session]
                reply: cmd.Reply | AsyncFlowError | None
                try:
                    reply = self._handlers[type(request.command)](session, request.command)
                except AsyncFlowError as error:
                    reply = error
                if reply is not None:
                    self.state.parked.remove(request)
                    context.answer(request.ticket, reply)
                elif not context.all_woken and self._nothing_for_others(request.command):
                    break
            self.assembly.refill()
        context.all_woken = context.every_put = False

    def _nothing_for_others(self, command: cmd.Command) -> bool:
        """True if no request that waits at the same place can succeed, since this one could not."""
        partitions = self.state.partitions
        if isinstance(command, cmd.Put):
            return not self.state.context.every_put and self.puts.in_line()
        if not isinstance(command, cmd.Lease):
            return False
        if partitions.ended_names or (partitions.ended and len(partitions.numbers) > 1):
            return False  # of different partitions, one may have ended and another not
        task = self.state.tasks[command.task]
        return not task.spec.grouped and not any(task.fit.values())

    # ---- commands that concern several parts

    def _configure(self, session: Session, command: cmd.Configure) -> cmd.Reply:
        reply = self.configuration.configure(command)
        self.replicas.quorum_changed()
        return reply

    def _lease(self, session: Session, command: cmd.Lease) -> cmd.Reply | None:
        task = self.state.tasks.find(command.task)
        self.admission.check(task, command)
        self.rank_groups.check(session, task, command)
        self.admission.check_open(session, task, command)
        if task.spec.admits:
            swapping = session.id in self.weight_updates.swapping
            return self.admission.lease_prompts(session, task, command, swapping=swapping)
        if command.world_size > 1:
            return self.rank_groups.lease(session, task, command)
        return self.admission.lease_rows(session, task, command)

    def _complete(self, session: Session, command: cmd.Complete) -> cmd.Reply:
        grant = self.state.leases.held(session, command.token, command.rank)
        if grant.shards is not None:
            return self.rank_groups.complete(grant, grant.shards, command)
        return self.completion.complete(grant, grant.ids, command)

    def _give_back(self, session: Session, command: cmd.GiveBack) -> cmd.Reply:
        grant = self.state.leases.held(session, command.token, command.rank)
        self.rank_groups.check_give_back(grant, command.rank)
        part = grant.part(command.rank)
        ids = part if command.index is None else part[positions(command.index, len(part))]
        held = ids[self.state.leases.having(grant, ids)]
        reason = command.reason or f"given back by {session.name}"
        self.completion.give_back(grant, held, reason, blame=command.blame)
        self.rank_groups.gave_back(grant, command)
        return cmd.Done()

    def _renew(self, session: Session, command: cmd.Renew) -> cmd.Reply:
        self.state.leases.renew(self.state.leases.held(session, command.token, command.rank))
        return cmd.Done()

    def _close_publisher(self, session: Session, command: cmd.ClosePublisher) -> cmd.Reply:
        self.publication.close(session, "closed its publisher")
        return cmd.Done()

    def _dismiss(self, session: Session, command: cmd.Dismiss) -> cmd.Reply:
        known = self.state.sessions.by_id
        if command.session:
            named = [known[command.session]] if command.session in known else []
        else:
            named = [each for each in known.values() if each.name == command.name] if command.name else [session]
        for member in named:
            if command.ended and member is not session:
                self._close(member.id, command.ended, blame=True)
            member.dismissed = True
        self.state.parked.wake_all()
        return cmd.Dismissed(count=len(named))

    def _prepare(self, session: Session, command: cmd.Prepare) -> cmd.Reply:
        if command.what:
            self.state.sessions.preparing[session.id] = Preparation(command.task, command.what, self.now)
        else:
            self.state.sessions.preparing.pop(session.id, None)
        return cmd.Done()

    def _leave(self, session: Session, command: cmd.Leave) -> cmd.Reply:
        self._close(session.id, f"{session.name} left", blame=False)
        return cmd.Done()

    def _get_failed(self, session: Session, command: cmd.GetFailed) -> cmd.Reply:
        groups = self.state.letters.groups
        newest = list(groups)[len(groups) - max(min(command.count, len(groups)), 0) :]
        return cmd.Failed(groups=tuple(newest), forgotten=self.state.letters.total - len(groups))

    def _close(self, session: int, reason: str, *, blame: bool) -> None:
        """Close a session, if it is open."""
        member = self.state.sessions.by_id.get(session)
        if member is None:
            return
        self.weight_updates.session_closed(member, reason)
        self.publication.close(member, f"died: {reason}" if blame else "left")
        for ticket in list(member.parked):
            self.state.parked.remove(self.state.parked.by_ticket[ticket])
        self.rank_groups.session_closed(member, reason, blame=blame)
        self.state.sessions.remove(session)
        self.replicas.remove(session)
