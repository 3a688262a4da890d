"""Checks of weight transports.

def test_my_transport():
    check_transport(lambda: Mine(port=0), Mine)
"""

from __future__ import annotations

import concurrent.futures
import functools
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from ...errors import AsyncFlowError, DigestMismatch, VersionGone
from ...interfaces import Fetched, WeightTransport
from ...types import TensorInfo, carrier
from ...types.dtypes import NUMPY_DTYPES
from ..transport_harness import BUCKET, Array, Sent, TransportHarness, plain_bytes
from .check import Tier, checks
from .lab import EngineThread, PlainLab

SLACK = 2 << 20
Question = Callable[[TransportHarness], None]


def check_transport(
    sending: Callable[[], WeightTransport], fetching: Callable[[], WeightTransport], *, only: Sequence[str] = ()
) -> None:
    """Raise AssertionError with the failed check and the fault.

    ``sending`` makes the transport with its options, as for a new run each time; ``fetching`` without options, as a
    replica does. ``only``: names of checks; by default all. No check waits for ever.
    """
    questions = {question.__name__: question for question in _TABLE}
    unknown = set(only) - set(questions)
    assert not unknown, f"no check of transports is named {', '.join(sorted(unknown))}"
    for name in only or questions:
        try:
            with TransportHarness(sending, fetching) as ends:
                questions[name](ends)
        except AssertionError as error:
            raise AssertionError(f"check {name!r}: {error}") from error
        except Exception as error:
            raise AssertionError(f"check {name!r}: {type(error).__name__}: {error}") from error


def model(ends: TransportHarness, nbytes: int = 1 << 20) -> dict[str, Array]:
    """Return random tensors, a few of them larger than a bucket."""
    parts = {"embed": 0.4, "layer.0": 0.3, "layer.1": 0.2, "head": 0.1}
    return {name: ends.random.integers(0, 256, max(int(nbytes * part), 1), np.uint8) for name, part in parts.items()}


def every_bit(ends: TransportHarness) -> None:
    """All dtypes and shapes arrive bit for bit, tied names and pieces too."""
    tensors: dict[str, Array] = {}
    for name in sorted(NUMPY_DTYPES):
        dtype = carrier(name)
        raw = ends.random.integers(0, 2 if name == "bool" else 256, 24 * dtype.itemsize, np.uint8)
        tensors[f"all.{name}"] = raw.view(dtype).reshape(4, 6)
    tensors |= {
        "empty": np.empty((0, 4), np.float32),
        "scalar": np.array(0.125),
        "nan": np.array([np.nan, -0.0, np.inf], ml_dtypes.bfloat16),
        "long": ends.random.random(3 * BUCKET // 8 + 5),
        "last": ends.random.integers(1, 256, 64, np.uint8),
    }
    sent = ends.publish(1, tensors, tied={"tied": "long"})
    sent.check(ends.fetch(ends.receiver(), sent))
    # a piece of a tensor that other ranks have the rest of
    manifest, memories = ends.write(2, {"w": np.arange(60, dtype=np.float32).reshape(6, 10)})
    piece = TensorInfo("w", "float32", (6, 10), 0, 0, (6, 0), (12, 10))
    manifest = msgspec.structs.replace(manifest, tensors=(piece,))
    part = Sent(manifest, [plain_bytes(memory).copy() for memory in memories], ends.send(manifest))
    part.check(ends.fetch(ends.receiver(), part), " (a piece)")


def boundaries(ends: TransportHarness) -> None:
    """Tensors may end just before, at and just behind the ends of buckets and chunks."""
    receiver, version = ends.receiver(), 0
    for bucket, chunk in ((64, 192), (1000, 1 << 12), (BUCKET, BUCKET), (BUCKET, 3 * BUCKET)):
        edges = [size + more for size in (64, bucket, 2 * bucket, chunk, 2 * chunk) for more in (-1, 0, 1)]
        tensors = {f"t{n}": ends.random.integers(0, 256, size, np.uint8) for n, size in enumerate(edges)}
        for few in (1, len(tensors)):
            version += 1
            some = dict(list(tensors.items())[-few:])
            sent = ends.publish(version, some, bucket=bucket, chunk=chunk, spare=0 if few == 1 else 4096)
            sent.check(ends.fetch(receiver, sent), f" (buckets of {bucket}, chunks of {chunk})")
            ends.keep(version)


def versions(ends: TransportHarness) -> None:
    """Kept versions can be fetched, others are gone; memory is bounded by the kept versions and one more."""
    receiver, nbytes = ends.receiver(), 4 << 20
    sent: list[Sent] = []
    for version in range(1, 9):
        sent.append(ends.publish(version, model(ends, nbytes), chunk=1 << 20))
        ends.keep(*(each.version for each in sent[-2:]))
        held = ends.sender.nbytes
        assert held <= 3 * (nbytes + 4 * 64) + SLACK, f"{held} bytes are held for 3 versions of {nbytes}"
        if version in (3, 8):
            for each in sent[-2:]:
                each.check(ends.fetch(receiver, each), " (kept)")
            for each in sent[:-2]:
                gone(ends, each)
    ends.keep(7)  # a version before the newest may stay alone: a rollback
    gone(ends, sent[7])
    again = ends.publish(9, model(ends, nbytes))
    ends.keep(7, 9)
    for each in (sent[6], again):
        each.check(ends.fetch(receiver, each), " (kept)")


def abandoned(ends: TransportHarness) -> None:
    """An abandoned version, half written or sent, costs nothing and harms no other."""
    receiver, nbytes = ends.receiver(), 1 << 20
    first = ends.publish(1, model(ends, nbytes))
    ends.keep(1)
    for version in range(2, 8):
        if version % 2:
            ends.write(version, model(ends, nbytes))
            ends.trainer("abandon", ends.sender.abandon)
        else:
            given_up = ends.publish(version, model(ends, nbytes))
            ends.trainer("abandon", ends.sender.abandon)
            gone(ends, given_up)
        held = ends.sender.nbytes
        assert held <= 3 * nbytes + SLACK, f"{held} bytes are held after versions were abandoned, of {nbytes} each"
    first.check(ends.fetch(receiver, first), " (kept while others were abandoned)")
    last = ends.publish(8, model(ends, nbytes))
    ends.keep(1, 8)
    for each in (first, last):
        each.check(ends.fetch(receiver, each), " (after others were abandoned)")


def held_for_ever(ends: TransportHarness) -> None:
    """A replica holding a version for ever blocks nobody, and its bytes never change."""
    slow, quick = ends.receiver(), ends.receiver()
    old = ends.publish(1, model(ends))
    ends.keep(1)
    fetched = ends.fetch(slow, old)
    views = list(fetched.chunks)
    for version in range(2, 12):
        sent = ends.publish(version, model(ends))
        ends.keep(version)
        sent.check(ends.fetch(quick, sent), " (while another replica holds version 1)")
        old.check(fetched, f" (held by a replica, with version {version} published)")
    fetched.release()
    fetched.release()
    ends.publish(12, model(ends))
    old.check(Fetched(old.manifest, views), " (views held after their release)")


def written_into(ends: TransportHarness) -> None:
    """An engine may write into its fetched memory."""
    one, two = ends.receiver(), ends.receiver()
    sent = ends.publish(1, model(ends))
    ends.keep(1)
    mine, theirs = ends.fetch(one, sent), ends.fetch(two, sent)
    for chunk in mine.chunks:
        chunk[:] = 7
    sent.check(theirs, " (of a replica, after another one wrote into its own)")
    sent.check(ends.fetch(one, sent), " (fetched again, after the first was written into)")
    sent.check(ends.fetch(two, sent), " (fetched by another, after the first was written into)")


def flipped(ends: TransportHarness) -> None:
    """A flipped bit is found, with its bucket and tensor named; the next version arrives."""
    receiver = ends.receiver()
    for version, name in enumerate(("embed", "layer.0", "layer.1", "head"), 1):
        tensors = model(ends)
        manifest, memories = ends.write(version, tensors)
        info = next(t for t in manifest.tensors if t.name == name)
        at = info.offset + int(ends.random.integers(info.nbytes))
        memories[info.chunk][at] ^= 0x10
        damaged = Sent(manifest, [], ends.send(manifest))
        bucket = at // manifest.bucket_bytes
        said = f"a flipped bit in {name}, bucket {bucket} of chunk {info.chunk},"
        error = raised(DigestMismatch, lambda damaged=damaged: ends.fetch(receiver, damaged))  # type: ignore[misc]
        assert error is not None, f"{said} was not found"
        for word in (f"version {version}", f"bucket {bucket}", name):
            assert word in str(error), f"{said} was found, but the error does not say {word!r}: {error}"
        ends.trainer("abandon", ends.sender.abandon)
    sent = ends.publish(9, model(ends))
    sent.check(ends.fetch(receiver, sent), " (after damaged ones)")


def undigested(ends: TransportHarness) -> None:
    """A version published without digests arrives, too."""
    sent = ends.publish(1, model(ends), digests=False)
    sent.check(ends.fetch(ends.receiver(), sent), " (without digests)")


def from_base(ends: TransportHarness) -> None:
    """Fetched with a base, a version has the same bytes as without, for any base; the base does not change."""
    receiver, other = ends.receiver(), ends.receiver()
    tensors = model(ends)
    sent = [ends.publish(1, tensors)]
    have = ends.fetch(receiver, sent[0])
    ends.keep(1)
    for version in range(2, 8):
        for array in tensors.values():  # a sparse update, then a dense one, then none
            share = (0.01, 1.0, 0.0)[version % 3]
            array[:] = np.where(ends.random.random(array.shape) < share, array + 1, array)
        if version == 6:  # another layout
            tensors = {f"{name}.": array[: len(array) // 2] for name, array in tensors.items()}
        new = ends.publish(version, tensors)
        ends.keep(version - 1, version)
        got = ends.fetch(receiver, new, base=have)
        new.check(got, f" (from version {have.manifest.version})")
        sent[-1].check(have, f" (after version {version} was fetched from it)")
        for chunk in got.chunks:
            chunk[:] = 0
        sent[-1].check(have, f" (after version {version}, fetched from it, was written into)")
        sent.append(new)
        have = ends.fetch(other, new, base=have)
        new.check(have, " (from an older one, by another replica)")
    # a base that is long gone, and one that was damaged
    last = ends.publish(8, tensors)
    ends.keep(8)
    last.check(
        ends.fetch(receiver, last, base=Fetched(sent[0].manifest, sent[0].chunks)), " (from version 1, long gone)"
    )
    damaged = [chunk.copy() for chunk in sent[-1].chunks]
    for chunk in damaged:
        chunk[::97] ^= 0x55
    try:
        fetched = ends.fetch(receiver, last, base=Fetched(sent[-1].manifest, damaged))
    except DigestMismatch:
        fetched = ends.fetch(receiver, last)
    last.check(fetched, " (from a damaged version)")


def together(ends: TransportHarness) -> None:
    """Replicas fetching at the same time, each in its own thread, all get the version."""
    sent = ends.publish(1, model(ends, 8 << 20), chunk=1 << 20)
    ends.keep(1)
    receivers = [ends.receiver() for _ in range(3)]
    threads = [EngineThread() for _ in receivers]
    fetches = [
        thread.start(functools.partial(receiver.fetch, sent.manifest, sent.where, timeout_s=15.0))
        for thread, receiver in zip(threads, receivers, strict=True)
    ]
    waiting = concurrent.futures.wait(fetches, 30.0).not_done
    for thread in threads:
        thread.stuck = bool(waiting)
        thread.close()
    assert not waiting, "one of three replicas that fetch at once does not get its version"
    failed = [fetch.exception() for fetch in fetches if fetch.exception()]
    said = f"of three replicas that fetch at once, {len(failed)} failed"
    assert not failed, f"{said}: {type(failed[0]).__name__}: {failed[0]}"
    for fetch in fetches:
        sent.check(fetch.result(), " (three replicas at once)")


def interrupted(ends: TransportHarness) -> None:
    """An interrupt without a fetch ends at most the next fetch."""
    receiver = ends.receiver()
    sent = ends.publish(1, model(ends))
    receiver.interrupt()
    try:
        fetched = ends.fetch(receiver, sent)
    except AsyncFlowError:
        fetched = ends.fetch(receiver, sent)
    sent.check(fetched, " (after an interrupt)")


def closed(ends: TransportHarness) -> None:
    """Closing twice is harmless, also for fetched versions; a version of a closed publisher
    arrives, or an error is raised."""
    receiver = ends.receiver()
    sent = ends.publish(1, model(ends))
    ends.keep(1)
    fetched = ends.fetch(receiver, sent)
    for _ in range(2):
        ends.trainer("close of the sender", ends.sender.close)
    sent.check(fetched, " (its publisher closed)")
    limit_s = 15.0 if ends.sender.outlives else 1.0  # which may wait for the publisher
    error = raised(AsyncFlowError, lambda: ends.fetch(ends.receiver(), sent, timeout_s=limit_s).release())
    assert error is None or not ends.sender.outlives, f"what outlives its publisher cannot be fetched: {error}"
    assert error is None or "version 1" in str(error), f"the error does not say which version: {error}"
    for _ in range(2):
        receiver.close()
    sent.check(fetched, " (both ends closed)")
    fetched.release()
    fetched.release()


def adopted(ends: TransportHarness) -> None:
    """A new publisher in the place of another has the kept versions, and only those."""
    sent = [ends.publish(version, model(ends)) for version in (1, 2, 3)]
    ends.keep(1, 2, 3)
    ends.trainer("close of the sender", ends.sender.close)
    ends.sender = ends.trainer("another sender", ends.another_sender)
    kept = sent[1:] if ends.sender.outlives else []
    ends.trainer("adopt", lambda: ends.sender.adopt([(each.manifest, each.where) for each in kept]))
    new = ends.publish(4, model(ends))
    receiver = ends.receiver()
    for each in (*kept, new):
        each.check(ends.fetch(receiver, each), " (after the publisher was replaced)")
    if ends.sender.outlives:
        gone(ends, sent[0])
    ends.keep(4)
    for each in kept:
        gone(ends, each)
    new.check(ends.fetch(receiver, new), " (after what was adopted went)")


def strange_places(ends: TransportHarness) -> None:
    """Any bytes as ``where`` raise an error of this SDK, soon, and without much memory."""
    sent = ends.publish(1, model(ends, 1 << 18))
    ends.keep(1)
    receiver = ends.receiver()
    sent.check(ends.fetch(receiver, sent))
    for where in _strange(ends, sent.where):
        tracemalloc.start()
        try:
            fetched = ends.fetch(receiver, sent, where=where, timeout_s=0.05)
        except AsyncFlowError:
            pass
        except AssertionError:
            raise
        except BaseException as error:
            raise AssertionError(f"where = {where[:80]!r} raised {type(error).__name__}: {error}") from error
        else:
            sent.check(fetched, f" (with where = {where[:80]!r})")
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 8 * sent.manifest.nbytes + (16 << 20), f"where = {where[:80]!r} took {peak} bytes of memory"
    sent.check(ends.fetch(receiver, sent), " (after strange places)")


def gone(ends: TransportHarness, sent: Sent) -> None:
    """Expect VersionGone for a version no longer kept."""
    error = raised(VersionGone, lambda: ends.fetch(ends.receiver(), sent))
    assert error is not None, f"version {sent.version} is kept no longer, and was fetched"
    assert f"version {sent.version}" in str(error), f"the error does not say which version is gone: {error}"


def raised(kind: type[Exception], work: Callable[[], object]) -> Exception | None:
    """Return the error of this kind raised by ``work``, or None."""
    try:
        work()
    except kind as error:
        return error
    return None


def _strange(ends: TransportHarness, where: bytes) -> list[bytes]:
    """Return nothing, noise, truncated and flipped locations, deep nesting, and locations with one
    value replaced or added."""
    made = [b"", b"\x00", b"\xc1" * 9, b"\xff" * 4096, b"\x90", b"\x80", b"[]", where + b"\x00", where * 2]
    made += [where[:stop] for stop in range(1, len(where), max(len(where) // 12, 1))]
    made += [ends.random.bytes(int(ends.random.integers(1, 200))) for _ in range(20)]
    for _ in range(20):
        flipped = bytearray(where)
        flipped[int(ends.random.integers(len(flipped)))] ^= 1 << int(ends.random.integers(8))
        made.append(bytes(flipped))
    try:
        value = msgspec.msgpack.decode(where)
    except msgspec.MsgspecError:
        return made
    deep = b"\x91" * 100_000 + b"\xc0"
    made.append(deep)
    if 0x90 <= where[0] < 0x9F:  # an array: with one more, at its end
        made += [bytes([where[0] + 1]) + where[1:] + more for more in (b"\xc0", deep)]
    odd: list[Any] = [
        None, -1, 0, 1 << 62, (1 << 64) - 1, 1e300, True, "", "x" * 5000, "../../../etc", "/etc/passwd", "a\0b",
        b"", b"\xff" * 64, [], [[]] * 100, {}, "/" + "x" * 5000, "/x" * 5000,
    ]  # fmt: skip
    made += [msgspec.msgpack.encode(_with(value, path, each)) for path in _paths(value) for each in odd]
    return made


def _paths(value: Any) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = [()]
    if isinstance(value, list):
        found += [(n, *rest) for n, inner in enumerate(value[:3]) for rest in _paths(inner)]
    elif isinstance(value, dict):
        found += [(key, *rest) for key, inner in list(value.items())[:8] for rest in _paths(inner)]
    return found[:40]


def _with(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copied = list(value) if isinstance(value, list) else dict(value)
    copied[path[0]] = _with(copied[path[0]], path[1:], new)
    return copied


_AFTER = ("every_bit",)
_TABLE: dict[Question, tuple[Tier, tuple[str, ...], str, str]] = {
    every_bit: ("basic", (), "replicas hold other weights than the published ones",
        "dtypes, shapes, tied names and pieces: bytes are moved, not converted"),
    boundaries: ("basic", _AFTER, "a tensor is cut or shifted where a bucket or a chunk ends",
        "off-by-one at the ends of buckets and chunks"),
    versions: ("basic", _AFTER, "a replica is given a version that is not whole, or memory grows with every version",
        "keep(): named versions must stay, others may be reused"),
    abandoned: ("full", _AFTER, "a trainer that dies while it publishes takes the next publication with it",
        "abandon(): as if the version had never been begun"),
    held_for_ever: ("full", _AFTER, "one slow replica holds up the trainer",
        "room() and keep() never wait for receivers"),
    written_into: ("full", _AFTER, "an engine that works in place changes what other replicas load",
        "the chunks of fetch() must be private: private maps or copies"),
    flipped: ("basic", _AFTER, "corrupted weights are loaded, and nobody knows",
        "fetch(): compare every bucket's digest before the return"),
    undigested: ("full", _AFTER, "versions published without digests cannot be fetched",
        "a manifest without digests passes"),
    from_base: ("full", _AFTER, "deltas are applied to the wrong version, or half",
        "fetch(base=): the result shares no memory with the base"),
    together: ("full", _AFTER, "replicas that fetch at the same time get each other's bytes, or wait for each other",
        "state shared by receivers"),
    interrupted: ("full", _AFTER, "a replica fetches an outdated version to its end, and is late for the newest",
        "interrupt(): end the fetch under way with an error"),
    closed: ("full", _AFTER, "memory and sockets of ended runs stay",
        "close(): idempotent; fetched versions stay valid"),
    adopted: ("full", _AFTER, "after a restart of the trainer its published versions are gone",
        "adopt(): take over the versions of the previous sender"),
    strange_places: ("full", _AFTER, "bytes from another process make a replica crash, read other files, or run code",
        "fetch(): `where` is validated before it is used"),
}  # fmt: skip


def _of_lab(question: Question) -> Callable[[PlainLab], None]:
    @functools.wraps(question)
    def _asked(lab: PlainLab) -> None:
        with TransportHarness(lab.made, lab.make) as ends:
            question(ends)

    return _asked


CHECKS = checks("transport", {_of_lab(question): row for question, row in _TABLE.items()})
