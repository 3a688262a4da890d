"""Where a version is: who writes it, who still fetches it, who may load it, and who failed. In words, from the ledger's state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .records import Session, Waiter
    from .state import State

MOST = 5
"""So many are named."""


def why_not_there(ledger: State, now: float) -> str:
    """Why what is announced, or was, is not current; "" when nothing is, or was since."""
    said = ledger.announced
    if said is None:
        return ledger.not_coming[1]
    first, since = ledger._name(ledger.publisher[min(said.ranks)]), now - said.since
    text = f"version {said.version} was announced {since:.1f} s ago by {first}"
    lacks = [rank for rank in range(ledger.publisher_size) if rank not in said.parts]
    if ledger.publisher_size == 1:
        return f"{text}, which has not published it yet"
    return f"{text} and lacks {named(_rank(ledger, rank) for rank in lacks)}"


def why_no_swap(ledger: State, waiter: Waiter, now: float) -> str:
    """What keeps a replica from loading what it has staged."""
    version = waiter.command.version
    if ledger.quorum and version > ledger.committed:
        return _why_undecided(ledger, version, now)
    loading = named(f"{ledger._name(session)} for {now - since:.1f} s" for session, since in ledger.swapping.items())
    earlier = sum(other.since < waiter.since for other in ledger.waiters.get("swap", {}).values())
    queue = f"; {earlier} waited before it" if earlier else ""
    return f"at most {ledger.max_swapping} at a time (max_swapping), now {loading}{queue}"


def what_failed(ledger: State, now: float) -> str:
    """Replicas that could not fetch or load a version, and why."""
    return named(_doing(ledger.sessions[number], now) for number in ledger.failing)


def doing(session: Session) -> str:
    """What a replica does about a version; "" when it is on it."""
    replica = session.replica
    if replica is None or not replica.doing:
        return ""
    words = {"waits": "waits to load", "swapping": "loading"}
    why = f": {replica.why}" if replica.why else ""
    return f"{words.get(replica.doing, replica.doing)} {replica.version}{why}"


def named(things: Iterable[str]) -> str:
    """The first of them."""
    known = list(things)
    more = f" and {len(known) - MOST} more" if len(known) > MOST else ""
    return ", ".join(known[:MOST]) + more


def _why_undecided(ledger: State, version: int, now: float) -> str:
    replicas = list(_replicas(ledger))
    lacks = [r for r in replicas if r.replica is not None and version not in (r.replica.staged, r.loaded)]
    has = len(replicas) - len(lacks)
    text = f"{has} of the {ledger.quorum} replicas that have to (quorum) have it staged"
    if lacks:
        text += f"; without it: {named(_doing(each, now) for each in lacks)}"
    if len(replicas) < ledger.quorum:
        text += f"; there are {len(replicas)} replicas, {ledger.quorum - len(replicas)} too few"
    return text


def _doing(session: Session, now: float) -> str:
    text = doing(session)
    since = session.replica.since if session.replica is not None else session.since
    if not text:
        on = "no version" if session.loaded is None else f"version {session.loaded}"
        return f"{session.name} (on {on})"
    return f"{session.name} ({text}, for {now - since:.1f} s)"


def _replicas(ledger: State) -> Iterator[Session]:
    return (ledger.sessions[number] for number in ledger.replicas)


def _rank(ledger: State, rank: int) -> str:
    held = ledger.publisher.get(rank)
    return f"rank {rank}, which nobody is" if held is None else f"rank {rank} ({ledger._name(held)})"
