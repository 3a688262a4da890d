"""Carrying: what the ledger's answers mean for payload, memory and those who wait for them.

The ledger says what came of a command; here its block is placed or freed, rows are located, the answer is made, and
memory of rows that ended goes back to its writers with their next answers. All of it is a function of the calls in
their order, so that a replay does the same.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import AsyncFlowError
from ..ledger import Ledger, pack_ids, unpack_ids
from ..ledger import commands as cmd
from ..ledger.commands import Ids
from ..ledger.state.grants import Grant
from ..memory import Hold, Mapper, blocks_there
from ..types import Batch, ColumnSpec, Event
from ..wire import Server
from . import remote
from .blocks import Block, Located
from .clock import Clock
from .files import Files
from .gauges import Gauges
from .keeping import Keeping
from .kept import Kept
from .places import LOST, Places, There
from .protocol import Answer, encode, failure
from .reader import Reader
from .remote import Remote
from .user_frames import said, user_trace

MOST_UNREAD = 16
"""Steps that may keep descriptors of their segments open until they are read. Rows of further ones are read at once."""
_log = logging.getLogger(__name__)


class Pending(NamedTuple):
    """A request under way, with what only the command that began it knows."""

    session: str
    command: cmd.AnyCommand
    owner: str  # of the block
    block: Block | None
    ids: Ids | None  # of a completion, in the order of the block's entries
    inline: bool  # whether payload goes beside the answer
    then: cmd.Lease | None = None  # to be carried out when this one has had its effect
    first: cmd.Reply | None = None  # what came of the command that this one rode with


class Carrying:
    """One half of a queue server; the other hears calls and says what they change. In the server's thread."""

    _wire: Server

    def __init__(
        self,
        keeping: Keeping,
        on_event: Callable[[Event], None] | None,
        on_step: Callable[[int, Callable[[], Batch]], None] | None,
        on_final: Callable[[int], None] | None,
    ) -> None:
        self._keeping = keeping
        self.durability, self.directory, self.rows = keeping.durability, keeping.directory, keeping.rows
        self.ledger = Ledger()
        self._places = Places()
        self._files = Files(self.rows, self.directory.path)
        self._mapper = Mapper(self.rows)
        self._reader = Reader(self._mapper)
        self._remote = Remote(self.rows, self._reader, synced=self.durability == "host")
        self._gauges = Gauges({self.directory.path, self.rows}, self._places)
        self._on_event = on_event
        self._on_step = on_step
        self._on_final = on_final
        self._kept: weakref.WeakSet[Kept] = weakref.WeakSet()  # what was told of and may not be read yet
        self._clock = Clock()
        self._replaying = False
        self._sessions: dict[str, int] = {}
        self._processes: dict[str, tuple[int, str]] = {}  # pid and key of each session's
        self._pending: dict[int, Pending] = {}
        self._schemas: dict[tuple[tuple[str, ...], int], dict[str, ColumnSpec]] = {}  # by columns, and all rows have
        self._freed: dict[str, bytes] = {}  # session → serials of its blocks

    def _flush(self, trained: tuple[int, Ids, Ids, Ids] | None = None) -> None:
        """Answer, tell, and free. ``trained``: step, rows, groups of rows of a step being acknowledged, and what was current when
        each was completed."""
        effects = self.ledger.drain()
        following: list[tuple[int, Pending, cmd.Lease]] = []
        for ticket, reply in effects.answers:
            pending = self._pending.pop(ticket, None)
            if pending is None:
                continue
            answer = self._carry_out(pending, reply)
            if pending.then is not None and answer.error is None:
                rider = Pending(
                    pending.session,
                    pending.then,
                    remote.OWNER,
                    None,
                    None,
                    pending.inline,
                    first=reply,  # type: ignore[arg-type]
                )
                following.append((ticket, rider, pending.then))
            else:
                self._answer(ticket, pending.session, answer, made=pending.inline and bool(answer.located))
        if (
            trained is not None
            and self._on_step is not None
            and not self._replaying
            and any(isinstance(reply, cmd.Completed) for _, reply in effects.answers)
        ):
            self._tell_step(*trained)
        if not self._replaying:
            for event in effects.events:
                self._emit(self._clock.told(event))
        for ids in effects.retired:
            for owner, segment, serials in self._places.retire(ids):
                self._free_in(owner, segment, serials)
        for ticket, rider, lease in following:
            self._pending[ticket] = rider
            self.ledger.apply(self._sessions[rider.session], lease, self.ledger.now, ticket)
        if following:
            self._flush()

    def _carry_out(self, pending: Pending, reply: cmd.Reply | AsyncFlowError) -> Answer:
        """What a reply means for payload, and the answer to send."""
        located: tuple[Located, ...] = ()
        schema: dict[str, ColumnSpec] = {}
        block = pending.block
        if isinstance(reply, AsyncFlowError) or (isinstance(reply, cmd.PutDone) and reply.again):
            if block is not None:  # once sent, a block is its writer's again by the server's word alone
                self._free(pending.owner, block)
        elif isinstance(reply, cmd.PutDone):
            assert block is not None
            assert isinstance(pending.command, cmd.Put)
            if reply.groups:  # of what was put before, those that were lost
                ids = np.arange(reply.first, reply.first + reply.count)
                entries = unpack_ids(reply.groups).repeat(pending.command.group_size)
                self._places.add(ids, block, pending.owner, entries)
            else:
                self._places.put(reply.first, block, pending.owner, pending.command.group_size)
        elif isinstance(reply, cmd.Completed):
            self._place_completion(pending, unpack_ids(reply.revoked + reply.again))
        elif isinstance(reply, (cmd.Published, cmd.RolledBack)):
            self._files.keep_weights(self.ledger.state.versions.sessions())
        elif isinstance(reply, cmd.Leased):
            needs = self.ledger.state.tasks[reply.task].spec.needs
            if isinstance(pending.command, cmd.Lease) and pending.command.columns is not None:
                needs = pending.command.columns
            located, schema = self._locate(unpack_ids(reply.ids), needs)
        if isinstance(reply, AsyncFlowError):
            return Answer(error=failure(reply), first=pending.first)  # type: ignore[arg-type]
        return Answer(reply, None, located, schema, first=pending.first)  # type: ignore[arg-type]

    def _place_completion(self, pending: Pending, revoked: Ids) -> None:
        if pending.block is None or pending.ids is None:
            return
        entries = np.arange(pending.block.rows)
        if not len(revoked):
            self._places.add(pending.ids, pending.block, pending.owner, entries)
            return
        kept = ~np.isin(pending.ids, revoked)
        self._places.add(pending.ids[kept], pending.block, pending.owner, entries[kept])
        if not kept.any():
            self._free(pending.owner, pending.block)

    def _free(self, owner: str, block: Block) -> None:
        self._free_in(owner, block.segment, block.packed_serial)

    def _free_in(self, owner: str, segment: str, serials: bytes) -> None:
        if owner == remote.OWNER and self._remote.free(segment, serials):
            return
        if owner in self._sessions:
            self._free_later(owner, serials)
        elif segment not in {
            *self._places.segments_of(owner),
            *(block.segment for _, block in self._waiting_blocks()),
        }:
            self._files.remove(segment)

    def _lost(self, there: There) -> tuple[Ids, list[int]]:
        """Rows whose payload is gone, and tickets of the puts that wait for room and have lost theirs."""
        waiting = [
            ticket
            for ticket, block in self._waiting_blocks()
            if not there(block.segment, *np.array([[block.start], [block.serial], [block.nbytes]])).all()
        ]
        return self._places.lost(there), waiting

    def _look_for(self, unread: Ids, now: float) -> None:
        """Rows of a lease cannot be read. If their payload is gone, all rows fail of which it is."""

        def there(segment: str, starts: Ids, serials: Ids, sizes: Ids) -> npt.NDArray[np.bool_]:
            return blocks_there(self.rows / segment, starts, serials, sizes)

        def look() -> bytes:
            if not len(self._places.lost(there, among=unread)):  # they have ended meanwhile
                return b""
            lost, waiting = self._lost(there)
            return msgspec.msgpack.encode((pack_ids(lost), waiting))

        if found := self.ledger.state.context.log.record(look):
            lost, waiting = msgspec.msgpack.decode(found, type=tuple[bytes, list[int]])
            self.ledger.lose(unpack_ids(lost), now, LOST, waiting)

    def _waiting_blocks(self) -> list[tuple[int, Block]]:
        """Blocks of puts that wait for room, by their tickets: no row lies in them yet."""
        return [(ticket, pending.block) for ticket, pending in self._pending.items() if pending.block is not None]

    def _free_later(self, owner: str, serials: bytes) -> None:
        """With the owner's next answer."""
        self._freed[owner] = self._freed.get(owner, b"") + serials

    def _close_session(self, session: str, number: int) -> None:
        self._wire.forget(session)
        self._freed.pop(session, None)
        self._processes.pop(session, None)
        for ticket in [ticket for ticket, pending in self._pending.items() if pending.session == session]:
            pending = self._pending.pop(ticket)
            if pending.owner == remote.OWNER and pending.block is not None:
                self._free(remote.OWNER, pending.block)
        self._gauges.went(number)
        self._files.ended(number, self._places.segments_of(session), self.ledger.state.versions.sessions())

    def _answer(self, ticket: int, session: str, answer: Answer, made: bool = False) -> None:
        """The answer to a call that is recorded, with the news of freed memory. ``made``: see ``make``."""
        freed = self._freed.pop(session, b"")
        if freed:
            answer = msgspec.structs.replace(answer, freed=freed)
        body = encode(answer)
        if self.ledger.state.context.log.keep or self._replaying:
            self._keeping.telling(body)
        self._wire.answer(ticket, body, made)

    def _fail(self, ticket: int, session: str, error: AsyncFlowError) -> None:
        self._answer(ticket, session, Answer(error=failure(error)))

    # ---- rows to read

    def _trained(self, lease: Grant | None, ids: Ids | None) -> tuple[int, Ids, Ids, Ids] | None:
        """Step, rows, groups and ages of rows of a step that are acknowledged now, of a team's all of its rows."""
        if lease is None or ids is None:
            return None
        ids = ids if lease.shards is None else lease.ids
        rows, at = self.ledger.state.rows, self.ledger.state.rows.at(ids)
        return lease.step, ids, rows.first[at], rows.current[at]

    def _tell_again(self) -> None:
        """Acknowledged steps whose rows are held: whoever was told of them may have died with its server before it had read them."""
        rows = self.ledger.state.rows
        for step, ids in self.ledger.state.steps.acknowledged() if self._on_step is not None else ():
            at = rows.at(ids)
            self._tell_step(step, ids, rows.first[at], rows.current[at])

    def _tell_step(self, step: int, ids: Ids, groups: Ids, completed_at: Ids) -> None:
        try:
            read = self._keep(ids, groups, completed_at)
        except Exception:  # what follows must be done all the same
            _log.exception("the rows of step %d cannot be kept for reading", step)
        else:
            self._tell(self._on_step, step, read)

    def _keep(self, ids: Ids, groups: Ids, completed_at: Ids) -> Kept:
        """Return a reader of rows with every column they have, for any thread, at any time: their blocks and the mappings
        of them are held until then.

        The ledger may have forgotten them by now; their places are known until they are retired.
        """
        columns_of = self._places.columns_of(ids)
        located = self._places.locate(ids, columns_of)
        schema = {name: self.ledger.state.columns.specs[name] for name in columns_of}
        held: list[Hold] = []
        stretches = self.ledger.state.versions.lineage.offsets

        def read() -> Batch:
            columns = remote.read(self._reader, located, schema)
            held.clear()  # the columns hold their blocks themselves, where they are views
            batch = Batch(ids, groups, columns)
            batch.completed_at, batch.stretches = completed_at, stretches
            return batch

        kept = Kept(read)
        try:
            if sum(each.unread for each in self._kept) >= MOST_UNREAD:
                kept.now()
            else:
                held += [hold for part in located for hold in self._reader.hold(part)]
        except (AsyncFlowError, OSError):  # no descriptor is left, or a segment is gone, of which its reader is told
            kept.now()
        self._kept.add(kept)
        return kept

    def _locate(self, ids: Ids, columns: tuple[str, ...]) -> tuple[tuple[Located, ...], dict[str, ColumnSpec]]:
        if not len(ids):  # a rank of a team without rows: what they would be
            return (), {
                name: self.ledger.state.columns.specs[name]
                for name in columns
                if name in self.ledger.state.columns.specs
            }
        have = self.ledger.state.rows.columns[self.ledger.state.rows.at(ids)]
        common = int(np.bitwise_and.reduce(have)) if len(have) else 0
        schema = self._schemas.get((columns, common))
        if schema is None:
            here = [name for name in columns if self.ledger.state.columns.contains(common, name)]
            schema = self._schemas[columns, common] = {name: self.ledger.state.columns.specs[name] for name in here}
        return self._places.locate(ids, tuple(schema)), schema

    # ---- who listens

    def _emit(self, event: Event) -> None:
        self._tell(self._on_event, event)

    def _tell(self, listener: Callable[..., None] | None, *what: object) -> None:
        if listener is not None:
            try:
                listener(*what)
            except Exception as error:
                name = getattr(listener, "__qualname__", type(listener).__name__)
                _log.error("listener %s of the queue server failed: %s\n%s", name, said(error), user_trace(error))
