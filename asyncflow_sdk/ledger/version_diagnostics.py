"""Version diagnostics: explain who writes, fetches, may load or failed to load a version."""

from __future__ import annotations

from collections.abc import Iterable

from .publication import VersionPublication
from .replica_updates import ReplicaUpdates
from .replicas import Replicas
from .state import LedgerState
from .state.parked import ParkedRequest
from .state.sessions import Session

MAX_NAMED = 5
"""Number of sessions named in a sentence."""


class VersionDiagnostics:
    """Reads the ledger and changes nothing."""

    def __init__(
        self, state: LedgerState, publication: VersionPublication, replicas: Replicas, updates: ReplicaUpdates
    ) -> None:
        self._state, self._publication, self._replicas, self._updates = state, publication, replicas, updates

    def why_missing(self) -> str:
        """Explain why no newer version can be fetched: the current one is gone, one is being
        written, or replicas failed; "" if none of these."""
        failures = join_some(self._doing(self._state.sessions.by_id[number]) for number in self._replicas.failing)
        return "; ".join(part for part in (self._state.versions.unavailable, self.why_unfinished(), failures) if part)

    def why_unfinished(self) -> str:
        """Explain why the announced or last discarded version is not current; "" if there is
        none."""
        publication = self._publication
        announced = publication.announced
        if announced is None:
            return publication.discarded[1]
        first = self._state.sessions.name(publication.ranks[min(announced.ranks)])
        since = self._state.context.now - announced.since
        text = f"version {announced.version} was announced {since:.1f} s ago by {first}"
        lacks = [rank for rank in range(publication.world_size) if rank not in announced.parts]
        if publication.world_size == 1:
            return f"{text}, not published yet"
        return f"{text} and lacks {join_some(self._rank(rank) for rank in lacks)}"

    def why_no_swap(self, request: ParkedRequest) -> str:
        """Explain why a replica may not load its staged version."""
        version, limits, now = request.command.version, self._state.limits, self._state.context.now
        if limits.quorum and version > self._state.versions.committed:
            return self._why_uncommitted(version)
        loading = join_some(
            f"{self._state.sessions.name(session)} for {now - since:.1f} s"
            for session, since in self._updates.swapping.items()
        )
        earlier = sum(other.since < request.since for other in self._state.parked.at("swap"))
        queue = f"; {earlier} waited before it" if earlier else ""
        return f"at most {limits.max_swapping} at a time (max_swapping), now {loading}{queue}"

    def _why_uncommitted(self, version: int) -> str:
        quorum, replicas = self._state.limits.quorum, self._replicas.sessions()
        lacks = [r for r in replicas if r.replica is not None and version not in (r.replica.staged, r.loaded)]
        has = len(replicas) - len(lacks)
        text = f"{has} of the {quorum} required replicas (quorum) have it staged"
        if lacks:
            text += f"; without it: {join_some(self._doing(each) for each in lacks)}"
        if len(replicas) < quorum:
            text += f"; there are {len(replicas)} replicas, {quorum - len(replicas)} too few"
        return text

    def _doing(self, session: Session) -> str:
        text = doing(session)
        since = session.replica.since if session.replica is not None else session.since
        if not text:
            on = "no version" if session.loaded is None else f"version {session.loaded}"
            return f"{session.name} (on {on})"
        return f"{session.name} ({text}, for {self._state.context.now - since:.1f} s)"

    def _rank(self, rank: int) -> str:
        session = self._publication.ranks.get(rank)
        return (
            f"rank {rank} (no session)" if session is None else f"rank {rank} ({self._state.sessions.name(session)})"
        )


def doing(session: Session) -> str:
    """Describe a replica's activity with a version ("fetching 7"); "" once it generates with it."""
    replica = session.replica
    if replica is None or not replica.doing:
        return ""
    words = {"waits": "waits to load", "swapping": "loading"}
    why = f": {replica.why}" if replica.why else ""
    return f"{words.get(replica.doing, replica.doing)} {replica.version}{why}"


def join_some(things: Iterable[str]) -> str:
    """Join the first MAX_NAMED items, and count the others."""
    known = list(things)
    more = f" and {len(known) - MAX_NAMED} more" if len(known) > MAX_NAMED else ""
    return ", ".join(known[:MAX_NAMED]) + more
