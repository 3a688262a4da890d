"""DistReceiver: the fetching end of the transport ``dist``. It takes part in rounds of publishers,
and verifies buckets on arrival."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import traceback
from collections.abc import Callable

import msgspec

from asyncflow_sdk.errors import AsyncFlowError, DeadlineExceeded, ProtocolError, ServerLost, WeightError, WireError
from asyncflow_sdk.interfaces import Fetched, Host, WeightReceiver
from asyncflow_sdk.interfaces.weights import Bytes
from asyncflow_sdk.types import Manifest
from asyncflow_sdk.types.manifest import Bucket
from asyncflow_sdk.weights import BufferPool
from asyncflow_sdk.weights.host import own_address
from asyncflow_sdk.weights.transports import ServiceClient

from .dist_group import BroadcastGroup, StoreProxy, flat
from .dist_messages import (
    BAD,
    CLOSING,
    GO_ON,
    DistAddress,
    EndRound,
    GetKeys,
    JoinRound,
    LeaveRound,
    PutKey,
    RoundStart,
    bucket_batches,
    decode_address,
    encode,
)

LAST_WORD_S = 2.0
"""For a call that tells a publisher that nobody waits for its answer."""
MAX_LINKS = 64
"""Publishers a receiver stays connected to: one for each rank that publishes a part."""


class DistReceiver(WeightReceiver):
    """``fits(backend, insecure, address)``: raises ConfigError if this end cannot work with a
    publisher at that address."""

    def __init__(self, host: Host, fits: Callable[[str, bool, str], None]) -> None:
        self._host, self._fits = host, fits
        self._memory = BufferPool("fetched weights, of which a replica holds two versions")
        self._asks = itertools.count(1)
        self._links: dict[bytes, _PublisherLink] = {}
        self._places: dict[int, bytes] = {}  # the last that gave a version, by rank
        self._asking: tuple[_PublisherLink, int] | None = None  # by the fetch under way

    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        until = time.monotonic() + timeout_s
        link, ask = self._link(where), next(self._asks)
        chunks = self._memory.take([chunk.nbytes for chunk in manifest.chunks])
        join = JoinRound(ask, manifest.version, manifest.root, self._host.name, _left(until))
        self._asking = link, ask
        try:
            start = link.join(join, until)
            _RoundMember(link, start, manifest, chunks, until).take()
            self._gave(link.where.rank, where)
        except (ServerLost, DeadlineExceeded):
            link.given_up = True
            raise
        finally:
            self._asking = None
            if link.given_up:
                self._drop(where)  # another one next time; and the publisher, if it lives, hears of it
            if link.closed:
                link.drop_group()
        return Fetched(manifest, chunks, manifest.nbytes, "full")

    def interrupt(self) -> None:
        """A round with other members goes on to its end, and so does this ``fetch``: leaving would
        break the round for them."""
        asking = self._asking
        if asking is not None:
            link, ask = asking
            link.leave(ask, lambda: self._asking == asking)

    def close(self) -> None:
        asking = self._asking
        for raw, link in list(self._links.items()):
            self._drop(raw, under_way=asking is not None and asking[0] is link)
        self._memory.close()

    def _gave(self, rank: int, raw: bytes) -> None:
        """Remove links to replaced publishers: a replica may outlive many trainers."""
        self._places[rank] = raw
        for former in set(self._links) - set(self._places.values()):
            self._drop(former)

    def _drop(self, raw: bytes, *, under_way: bool = False) -> None:
        """Close a link. Called by ``close``, and by the fetch that it ends."""
        link = self._links.pop(raw, None)
        if link is not None:
            link.close(under_way)

    def _link(self, raw: bytes) -> _PublisherLink:
        link = self._links.pop(raw, None)
        if link is None:
            link = _PublisherLink(decode_address(raw), self._host)
            try:
                self._fits(link.where.backend, link.where.insecure, link.publisher)
            except BaseException:
                link.close()
                raise
            while len(self._links) >= MAX_LINKS:
                self._drop(next(iter(self._links)))
        self._links[raw] = link  # the last of them is the one used last
        return link


class _PublisherLink:
    """A connection to one publisher, at the IP address ``publisher``: its calls, and the group of
    the last round."""

    def __init__(self, where: DistAddress, host: Host) -> None:
        self.where = where
        self.given_up = self.closed = False
        self._client = ServiceClient(where.service, host.own_key)
        self.publisher = self._client.address.partition("://")[2].rpartition(":")[0].strip("[]")
        self._address = own_address(self._client.address)  # where others of its rounds reach this end
        self._group: BroadcastGroup | None = None
        self._number = 0

    def join(self, join: JoinRound, until: float) -> RoundStart:
        """Wait for a round of that version with this receiver as a member, and return it."""
        what = f"version {join.version} from {self.where.name}"
        try:
            body = self._client.call(encode(join), _left(until), what).body
            start = msgspec.msgpack.decode(body, type=RoundStart)
            if not 0 < start.rank < len(start.names):
                raise ProtocolError(f"{what}: rank {start.rank} of {len(start.names)}")
        except BAD as error:
            raise ProtocolError(f"{what}: its answer cannot be read: {error}") from None
        except ServerLost as error:
            if not self.closed and time.monotonic() >= until:
                raise DeadlineExceeded(f"{error}; no round of it began") from None
            raise
        return start

    def leave(self, ask: int, still_asks: Callable[[], bool]) -> None:
        """Cancel the request for a version, without waiting. A publisher that does not answer is
        dropped."""

        def give_up() -> None:
            if still_asks():
                self.given_up = True
                self._client.interrupt()

        def tell() -> None:
            timer = threading.Timer(LAST_WORD_S, give_up)
            timer.daemon = True
            timer.start()
            with contextlib.suppress(AsyncFlowError):
                self._client.call(encode(LeaveRound(ask)), LAST_WORD_S, "the last word")
                timer.cancel()

        threading.Thread(target=tell, name="weights dist leave", daemon=True).start()

    def group(self, start: RoundStart, until: float) -> BroadcastGroup:
        """Return the group of a round: the last one if it is the same. Waits until ``until`` at
        most."""

        def limit_s() -> float:
            return min(self.where.stall_s, _left(until))

        def put(key: str, value: bytes) -> None:
            self._client.call(encode(PutKey(start.group, key, value)), limit_s(), "making a group")

        def look(keys: list[str]) -> list[bytes]:
            body = self._client.call(encode(GetKeys(start.group, tuple(keys))), limit_s(), "making a group").body
            return msgspec.msgpack.decode(body, type=list[bytes])

        if self._group is None or self._number != start.group:
            self.drop_group()
            store, size = StoreProxy(put, look), len(start.names)
            self._group = BroadcastGroup(self.where.backend, store, start.rank, size, self._address, limit_s)
            self._number = start.group
        self._group.limit_s = limit_s
        return self._group

    def drop_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(Exception):
                group.close()

    def over(self, over: EndRound, timeout_s: float, what: str) -> str:
        return bytes(self._client.call(encode(over), timeout_s, what).body).decode(errors="replace")

    def close(self, under_way: bool = False) -> None:
        """``under_way``: another thread is in a round, and closes the group after its last
        broadcast."""
        self.closed = True
        if not under_way:
            self.drop_group()
        self._client.close()


class _RoundMember:
    """One receiver's part in one round."""

    def __init__(
        self, link: _PublisherLink, start: RoundStart, manifest: Manifest, chunks: list[Bytes], until: float
    ) -> None:
        self._link, self._start, self._manifest, self._chunks, self._until = link, start, manifest, chunks, until
        self._what = f"version {manifest.version}: round {start.round} with {', '.join(start.names)}"
        self._damage: WeightError | None = None

    def take(self) -> None:
        """Receive the version. Raises the errors of ``fetch``."""
        try:
            word = self._receive(self._link.group(self._start, self._until))
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold works, and those the connections
            self._link.drop_group()  # first of all, so that the others see it
            raise self._verdict(error) from None
        try:
            self._link.over(EndRound(self._start.round), min(_left(self._until), LAST_WORD_S), self._what)
        except WireError:  # what came is here; only the publisher does not know it
            self._link.given_up = True
        if self._damage is not None:
            raise self._damage
        if word == CLOSING:
            raise ServerLost(f"{self._what}: its publisher {self._link.where.name} has closed")
        if word != GO_ON:
            raise WireError(f"{self._what}: {self._end_here()}")

    def _receive(self, group: BroadcastGroup) -> int:
        tensors = [flat(chunk) for chunk in self._chunks]
        for batch in bucket_batches(self._manifest):
            word = group.word()
            if word != GO_ON:
                return word
            group.stream(tensors, batch, self._arrived)
        return GO_ON

    def _arrived(self, bucket: Bucket) -> None:
        if self._link.closed:
            raise WireError("the receiver was closed")
        if time.monotonic() > self._until:
            raise DeadlineExceeded(f"the deadline passed at bucket {bucket.index} of chunk {bucket.chunk}")
        if self._damage is None:
            memory = self._chunks[bucket.chunk][bucket.start : bucket.stop]
            try:
                self._manifest.check(bucket, memoryview(memory))  # type: ignore[arg-type]
            except WeightError as error:  # the others have done no wrong: for them the round goes on
                self._damage = error

    def _verdict(self, error: Exception) -> AsyncFlowError:
        """Return the error of a broken round, with its faulty member: known when all members have
        reported or were silent for long. At the deadline, return the error seen here."""
        where, saw = self._link.where, f"{type(error).__name__}: {error}"[:1000]
        if self._link.closed:
            return WireError(f"{self._what}: {self._end_here()}")
        try:
            left = 0.0 if self._link.given_up else min(3 * where.stall_s, _left(self._until))
            why = self._link.over(EndRound(self._start.round, saw), left, self._what) or saw
        except ServerLost as lost:
            if self._link.given_up:
                return WireError(f"{self._what}: {self._end_here()}")
            if time.monotonic() < self._until:
                return ServerLost(f"{self._what}: its publisher {where.name} died or stopped ({lost})")
            why = f"not here at the deadline ({saw})"
        except AsyncFlowError as other:
            why = f"{saw} ({other})"
        kind = DeadlineExceeded if time.monotonic() >= self._until else WireError
        return kind(f"{self._what}: {why}; ask again")

    def _end_here(self) -> str:
        """Return why this receiver ended the round."""
        return "this receiver was closed before it had it" if self._link.closed else "interrupted"


def _left(until: float) -> float:
    return max(until - time.monotonic(), 0.0)
