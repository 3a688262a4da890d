"""The same plan with an SDK that costs nothing: an event simulation.

Time is a number that jumps from event to event. Who may have which rows and versions when is asked of the SDK's own ledger, a
pure state machine, so the staleness policy and the queue's order are those of a real run by construction. What
is written here anew is what surrounds it: replicas, stages and the trainer, which answer at once, lose nothing between one
thing and the next, and see a version in the moment in which it is published.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncflow_sdk.errors import AsyncFlowError
from asyncflow_sdk.ledger import Ledger, TaskSpec
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.testing import Decoding
from asyncflow_sdk.types import ColumnSpec
from asyncflow_sdk.types.reports import Audit
from asyncflow_sdk.types.tasks import PolicySpec

from .plan import GROUP, PROMPT_TOKENS, Plan, StagePlan

FLOAT, IDS = ColumnSpec("fixed", "float32"), ColumnSpec("ragged", "int32")
RESPONSE = {
    "response_ids": IDS,
    "logprobs": ColumnSpec("ragged", "float32"),
    "version_spans": ColumnSpec("ragged", "int64", (3,)),
}
FOREVER = 1e12

Heard = Callable[[Any], None]


@dataclass
class Outcome:
    """When each step was trained and published, in the model's seconds, and the balance of rows. ``slots``: shares of all
    slots' time by use, see ``_Replica``."""

    trained_s: list[float]
    audit: Audit
    staleness: list[float]
    slots: dict[str, float]


class Simulation:
    """A clock, a heap of what happens when, and the ledger."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.now = plan, 0.0
        self.ledger = Ledger()
        self.trained_s: list[float] = []
        self.staleness: list[float] = []
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._heard: dict[int, Heard] = {}
        self._answers: deque[tuple[Heard, Any]] = deque()
        self._tickets = self._serial = 0
        self._replicas: list[_Replica] = []

    def run(self) -> Outcome:
        plan = self.plan
        driver = self.join("driver")
        self.send(
            driver,
            cmd.Configure(
                max_staleness=plan.max_staleness, staleness=PolicySpec(plan.policy),
                capacity_rows=plan.prompts * GROUP, max_swapping=plan.max_swapping,
            ),
        )  # fmt: skip
        for spec in specs(plan):
            self.send(driver, cmd.Declare(task=spec))
        trainer = _Trainer(self)
        for number in range(plan.replicas):
            self._replicas.append(_Replica(self, f"rollout-{number}"))
        for stage in plan.stages:
            _Stage(self, stage).ask()
        trainer.publish(0)
        self._until(
            lambda: all(s.loaded == 0 for s in self.ledger.state.sessions.by_id.values() if s.replica is not None)
        )
        self.now_zero()
        self.send(driver, cmd.AddRows(groups=plan.prompts, group_size=GROUP, columns={"prompt_ids": IDS}))
        trainer.ask()
        self._until(lambda: len(self.trained_s) >= plan.steps)
        audit = self.ledger.audit()
        assert audit.balanced
        slots = sum((replica.slots() for replica in self._replicas), Counter[str]())
        shares = {use: seconds / slots.total() for use, seconds in slots.items()}
        return Outcome(self.trained_s[: plan.steps], audit, self.staleness, shares)

    def now_zero(self) -> None:
        """Times are told from here on."""
        self.zero = self.now
        for replica in self._replicas:
            replica.slots().clear()

    def _until(self, there: Callable[[], bool]) -> None:
        self._hear()
        while not there():
            assert self._coming, f"nothing comes after {self.now:g} s: {self.ledger.status()}"
            self.now, _, happens = heapq.heappop(self._coming)
            happens()
            self._hear()

    def at(self, time_s: float, happens: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._coming, (max(time_s, self.now), self._serial, happens))

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        self.at(self.now + seconds, happens)

    def join(self, name: str) -> int:
        session: list[int] = []
        self.send(0, cmd.OpenSession(name=name), lambda joined: session.append(joined.session))
        self._hear()
        return session[0]

    def send(self, session: int, command: cmd.Command, heard: Heard | None = None) -> int:
        """Returns the ticket. ``heard`` is called with the reply, or the error, in this same moment or a later one."""
        self._tickets += 1
        self._heard[self._tickets] = heard or _fine
        self.ledger.apply(session, command, self.now, self._tickets)
        self._take()
        return self._tickets

    def forget(self, ticket: int) -> bool:
        """Take a request back. False when it is answered already."""
        if ticket not in self.ledger.state.parked.by_ticket:
            return False
        del self._heard[ticket]
        self.ledger.forget(ticket, self.now)
        self._take()
        return True

    def _take(self) -> None:
        for ticket, answer in self.ledger.drain().answers:
            self._answers.append((self._heard.pop(ticket), answer))

    def _hear(self) -> None:
        while self._answers:
            heard, answer = self._answers.popleft()
            heard(answer)

    def tokens(self, ids: bytes) -> tuple[int, float]:
        """Rows, and tokens of their prompts and responses."""
        rows = cmd.unpack_ids(ids)
        return len(rows), float(self.plan.lengths[rows].sum() + PROMPT_TOKENS * len(rows))


def specs(plan: Plan) -> list[TaskSpec]:
    """The tasks, as a real run declares them."""
    rollout = TaskSpec(name="rollout", needs=("prompt_ids",), gives=tuple(RESPONSE), lease_s=FOREVER, admits=True)
    stages = [
        TaskSpec(name=stage.task, needs=stage.needs, gives=(stage.gives,), lease_s=FOREVER) for stage in plan.stages
    ]
    train = TaskSpec(
        name="train", needs=("prompt_ids", *RESPONSE, *plan.train_needs), batch_rows=plan.rows, lease_s=FOREVER
    )
    return [rollout, *stages, train]


class _Stage:
    """One call after another, each of what is there."""

    def __init__(self, simulation: Simulation, stage: StagePlan) -> None:
        self._sim, self._stage, self._session = simulation, stage, simulation.join(stage.task)

    def ask(self) -> None:
        at_least = self._stage.rows if self._stage.whole else 0
        lease = cmd.LeaseRows(task=self._stage.task, count=self._stage.rows, timeout_s=FOREVER, at_least=at_least)
        self._sim.send(self._session, lease, self._leased)

    def _leased(self, lease: cmd.Leased) -> None:
        _fine(lease)
        self._sim.after(self._stage.work.seconds(*self._sim.tokens(lease.ids)), lambda: self._done(lease))

    def _done(self, lease: cmd.Leased) -> None:
        column = {self._stage.gives: FLOAT}
        self._sim.send(self._session, cmd.Complete(token=lease.token, columns=column))
        self.ask()


class _Trainer:
    """Trains, whole steps or parts of them, is held for the copy of the weights, and publishes."""

    def __init__(self, simulation: Simulation) -> None:
        self._sim, self._session = simulation, simulation.join("train")
        self._ages: list[npt.NDArray[np.int64]] = []  # of the rows of the open step
        simulation.send(self._session, cmd.OpenPublisher())

    def publish(self, version: int) -> None:
        self._sim.send(self._session, cmd.Announce(version=version))
        self._sim.send(
            self._session,
            cmd.Publish(version=version, part=cmd.VersionPart(manifest=b"", transport="none", where=b"")),
        )

    def ask(self, token: int = 0) -> None:
        """Ask for a step, or for the next part of the one that ``token`` is of."""
        rows = self._sim.plan.part_rows
        lease = cmd.LeaseRows(
            task="train", count=1, timeout_s=FOREVER, parts=rows > 0, token=token, at_least=rows
        )  # fmt: skip
        self._sim.send(self._session, lease, self._leased)

    def _leased(self, lease: cmd.Leased) -> None:
        _fine(lease)
        rows, work = self._sim.ledger.state.rows, self._sim.plan.train
        self._ages.append(lease.version - rows.version[rows.at(cmd.unpack_ids(lease.ids))])
        took = work.seconds(*self._sim.tokens(lease.ids))
        if not isinstance(lease, cmd.LeasedPart) or lease.last:
            self._sim.after(took + self._sim.plan.copy_s, lambda: self._trained(lease))
        else:
            self._sim.after(took - work.call_s, lambda: self.ask(lease.token))

    def _trained(self, lease: cmd.Leased) -> None:
        self._sim.trained_s.append(self._sim.now - self._sim.zero)
        self._sim.staleness.append(float(np.concatenate(self._ages).mean()))
        self._ages.clear()
        self.publish(lease.version + 1)
        self._sim.send(self._session, cmd.Complete(token=lease.token, columns={}))
        self.ask()


class _Replica:
    """A replica: prompts as long as there is room for a group, new versions as its swap policy says.

    Each second of each of its slots has one use: "generating", "loading" (all slots), or, without a row: "draining" for a
    newer version, "waiting" for the permission to load it, "no prompts" that the staleness rule admits, or "part of a group",
    as fewer slots are free than a group needs.
    """

    def __init__(self, simulation: Simulation, name: str) -> None:
        self._sim, self._session = simulation, simulation.join(name)
        plan = simulation.plan
        self._decoding = Decoding[tuple[int, int]](plan.rollout)
        self._room = plan.max_rows
        self._policy, self._load_s = plan.swap, plan.rollout.load_s
        self._loaded = self._staged = self._permitted = self._swap_asked = -1
        self._loading = self._draining = False
        self._asked: int | None = None  # ticket of the request for prompts
        self._held: list[cmd.Leased] = []  # given while a load was under way
        self._alarm = math.inf
        self._slots, self._counted = Counter[str](), 0.0
        self._watch(-1)

    def _watch(self, after: int) -> None:
        self._sim.send(self._session, cmd.AwaitVersion(after=after, timeout_s=FOREVER), self._hears_of)

    def slots(self) -> Counter[str]:
        """Slot seconds up to now, by use. Called before anything that changes it."""
        seconds, self._counted = self._sim.now - self._counted, self._sim.now
        free = 0 if self._loading else self._room
        self._slots["loading" if self._loading else "generating"] += seconds * (self._sim.plan.max_rows - free)
        self._slots[self._without_row()] += seconds * free
        return self._slots

    def _without_row(self) -> str:
        """The use of slots that have no row."""
        newer = self._staged > self._loaded
        if self._draining or (newer and self._policy == "boundary"):
            return "draining"
        if self._room < GROUP:
            return "part of a group"
        return "waiting" if newer else "no prompts"

    def _hears_of(self, told: cmd.Version) -> None:
        _fine(told)
        self.slots()
        self._staged = told.version
        self._sim.send(self._session, cmd.ReportStaged(version=told.version))
        self._watch(told.version)
        self._turn()

    def _turn(self) -> None:
        if self._loading:
            return
        if self._draining or self._permitted == self._staged > self._loaded:
            self._swap()
        elif not self._asks_to_swap() and self._loaded >= 0 and self._asked is None and self._room >= GROUP:
            lease = cmd.LeaseRows(task="rollout", count=self._room, timeout_s=FOREVER)
            self._asked = self._sim.send(self._session, lease, self._leased)

    def _asks_to_swap(self) -> bool:
        """Ask to load what is staged, where that is due. True when the answer comes in this moment: then nothing else
        is begun before it."""
        idle = not self._decoding.running
        if self._staged <= max(self._loaded, self._swap_asked) or not (idle or self._policy != "boundary"):
            return False
        if self._policy == "boundary" and not self._take_back():
            return True
        self._swap_asked = version = self._staged
        swap = cmd.Swap(version=version, timeout_s=FOREVER)
        ticket = self._sim.send(self._session, swap, lambda reply: self._may_swap(version, reply))
        return ticket not in self._sim.ledger.state.parked.by_ticket

    def _may_swap(self, version: int, reply: Any) -> None:
        if isinstance(reply, cmd.Permitted):
            self._permitted = version
        self._turn()

    def _take_back(self) -> bool:
        """Ask for no more prompts. False where some are on their way."""
        if self._asked is not None and self._sim.forget(self._asked):
            self._asked = None
        return self._asked is None

    def _swap(self) -> None:
        """Drain, unless in flight, and load: what was permitted, or what is newer by then."""
        self.slots()
        version, self._draining = self._permitted, True
        if self._policy != "in_flight":
            if not self._take_back() or self._decoding.running:
                return
            if self._staged > version:
                version = self._staged
                self._sim.send(self._session, cmd.Swap(version=version))
        self.slots()
        self._draining, self._loading = False, True
        self._decoding.hold(self._sim.now, self._load_s)
        self._set_alarm()
        self._sim.after(self._load_s, lambda: self._load_ends(version))

    def _load_ends(self, version: int) -> None:
        self.slots()
        self._loading, self._loaded = False, version
        self._sim.send(self._session, cmd.ReportLoaded(version=version))
        held, self._held = self._held, []
        for lease in held:
            self._begin(lease)
        self._turn()

    def _leased(self, reply: Any) -> None:
        self._asked = None
        if isinstance(reply, cmd.LoadFirst):
            return  # until a version, or room, comes
        _fine(reply)
        if self._loading:
            self._held.append(reply)
        else:
            self._begin(reply)
            self._turn()

    def _begin(self, lease: cmd.Leased) -> None:
        self.slots()
        ids = cmd.unpack_ids(lease.ids)
        self._room -= len(ids)
        for group in np.unique(ids // GROUP).tolist():
            rows = np.flatnonzero(ids // GROUP == group).tolist()
            lengths = self._sim.plan.lengths
            keys = [((lease.token, at), int(lengths[ids[at]])) for at in rows]
            self._decoding.start(self._sim.now, keys, PROMPT_TOKENS)
        self._set_alarm()

    def _set_alarm(self) -> None:
        then = self._decoding.next()
        if then is not None:
            self._alarm = then
            self._sim.at(then, lambda: self._ended(then))

    def _ended(self, then: float) -> None:
        if then != self._alarm:
            return  # it was set again since
        self._alarm = math.inf
        self.slots()
        by_lease: dict[int, list[int]] = {}
        for token, at in self._decoding.ended(self._sim.now):
            by_lease.setdefault(token, []).append(at)
        for token, rows in by_lease.items():
            index = np.array(rows, "<i4").tobytes()
            self._sim.send(self._session, cmd.Complete(token=token, columns=RESPONSE, index=index))
            self._room += len(rows)
        self._set_alarm()
        self._turn()


def _fine(answer: Any) -> None:
    if isinstance(answer, AsyncFlowError):
        raise answer


def simulate(plan: Plan) -> Outcome:
    return Simulation(plan).run()


def simulate_steps(plan: Plan) -> list[float]:
    """When the steps of a plan are trained, in the model's seconds."""
    return simulate(plan).trained_s
