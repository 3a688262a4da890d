"""Replicas of one host that is not the publisher's: one of them fetches a version, the others map it, and none gets a part."""

import contextlib
import errno
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from children import Child, hear, say
from transport_ends import ManyHosts, fetch_and_stay, numbers, replica
from waiting import in_thread, until

from asyncflow_sdk.errors import DeadlineExceeded, WireError
from asyncflow_sdk.interfaces import Fetched, Host
from asyncflow_sdk.interfaces.weights import Bytes
from asyncflow_sdk.memory import meeting_directory, segment
from asyncflow_sdk.testing.transport_harness import BUCKET
from asyncflow_sdk.types import Manifest
from asyncflow_sdk.weights.transports import host_share

NBYTES = 64 * BUCKET
SLACK = 1.15


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories in which processes of a host meet."""
    paths = list[Path]()

    def meet(name: str) -> tuple[Path, int]:
        path, owner = meeting_directory(name)
        paths.append(path)
        return path, owner

    monkeypatch.setattr(host_share, "meeting_directory", meet)
    return paths


def fetch_when_told(manifest: str, where: str, host: str, run: str) -> None:
    """In a process of a host: fetch a version, say its bytes moved, notes and directory, and stay."""
    known, receiver = msgspec.msgpack.decode(bytes.fromhex(manifest), type=Manifest), replica(host, run)
    say("ready")
    hear()
    fetched = receiver.fetch(known, bytes.fromhex(where), timeout_s=3600.0)
    say([fetched.moved, fetched.notes, str(Path(fetched.places[0].path).parent)])
    hear()


def test_processes_that_start_at_once_fetch_one_copy_and_the_next_one_removes_it_after_a_kill() -> None:
    with ManyHosts() as hosts:
        sent = hosts.publish(1, NBYTES)
        assert hosts.proxy is not None
        arguments = (msgspec.msgpack.encode(sent.manifest).hex(), sent.where.hex(), "a", hosts.run)
        with contextlib.ExitStack() as children:
            # given many processes of a host
            replicas = [children.enter_context(Child(fetch_when_told, *arguments)) for _ in range(8)]
            for each in replicas:
                assert each.hear() == "ready"
            # when all fetch their first version at once
            for each in replicas:
                each.say("fetch")
            fetched = [each.hear() for each in replicas]
            # then one has fetched it, and all map it
            assert sorted(moved for moved, _, _ in fetched) == [0] * 7 + [NBYTES]
            assert [notes for _, notes, _ in fetched] == [[]] * 8
            (directory,) = {path for _, _, path in fetched}
            assert hosts.proxy.back < NBYTES * SLACK + (64 << 10)
        # when all are killed, then the next one removes the version that nobody owns
        assert hosts.fetch(sent, "a")().moved == NBYTES
        assert not Path(directory).exists()


def test_the_publisher_sends_each_host_one_copy(met: list[Path]) -> None:
    with ManyHosts() as hosts:
        bases = {}
        for version in (1, 2):
            # given three hosts, two of them with two replicas
            weights = numbers(1, NBYTES)
            if version == 2:
                weights[::1000] += 1
            sent = hosts.publish(version, {"w": weights})
            assert hosts.proxy is not None
            before = hosts.proxy.back
            # when all fetch at once
            names = ("a1", "b1", "c1", "a2", "b2")
            joins = {name: hosts.fetch(sent, name, bases.get(name)) for name in names}
            fetched = {name: join() for name, join in joins.items()}
            # then one replica of each host has fetched, from the second version on what differs
            for host in "abc":
                moved = sorted(each.moved for name, each in fetched.items() if name[0] == host)
                assert moved[-1] == NBYTES if version == 1 else 0 < moved[-1] < NBYTES / 20
                assert moved[:-1] in ([], [0])
            assert all(not each.notes for each in fetched.values())
            # and the publisher has sent a copy to each
            assert hosts.proxy.back - before < 3 * max(each.moved for each in fetched.values()) * SLACK + (64 << 10)
            bases = fetched
        # and what one replica writes is nobody else's
        fetched["a1"].chunks[0][:] = 0
        sent.check(fetched["a2"])
        directories = {Path(each.places[0].path).parent for each in fetched.values()} | set(met)
    # and nothing is left of them
    assert not [each for each in directories if each.exists()]


def test_a_replica_that_waits_takes_over_from_one_that_is_killed_in_the_middle() -> None:
    with ManyHosts() as hosts:
        sent = hosts.publish(1, NBYTES)
        assert hosts.proxy is not None
        hosts.proxy.most = NBYTES // 4
        manifest = msgspec.msgpack.encode(sent.manifest).hex()
        with Child(fetch_and_stay, manifest, sent.where.hex(), "a", hosts.run) as dying:
            # given a replica that waits for another process of its host, which has a part of the version
            assert hosts.proxy.held.wait(60)
            other = hosts.fetch(sent, "a")
            # when that process dies
            dying.kill()
        hosts.proxy.resume()
        # then the replica fetches the whole version, also for the third one
        assert other().moved == NBYTES
        assert hosts.fetch(sent, "a3")().moved == 0


def test_a_replica_does_not_wait_for_ever_for_one_that_stands_still(
    monkeypatch: pytest.MonkeyPatch, met: list[Path]
) -> None:
    with ManyHosts() as hosts:
        sent = hosts.publish(1, NBYTES)
        assert hosts.proxy is not None
        hosts.proxy.most = NBYTES // 4
        manifest = msgspec.msgpack.encode(sent.manifest).hex()
        with Child(fetch_and_stay, manifest, sent.where.hex(), "a", hosts.run) as still:
            assert hosts.proxy.held.wait(60)
            # given a process that holds the lock and does nothing
            still.stop()
            hosts.proxy.resume()
            # when replicas of its host fetch, then one ends at its deadline, one when it is told to
            with pytest.raises(DeadlineExceeded, match="another process of this host fetches it, and holds the lock"):
                hosts.receiver("a1").fetch(sent.manifest, sent.where, timeout_s=0.2)
            ended, receiver = threading.Event(), hosts.receiver("a2")

            def fetch_until_told() -> None:
                with pytest.raises(WireError, match="wanted no more"):
                    receiver.fetch(sent.manifest, sent.where, timeout_s=3600.0)
                ended.set()

            in_thread(fetch_until_told)
            until(lambda: receiver.interrupt() or ended.is_set(), "the end of a fetch")
            # and one fetches for itself after a while
            monkeypatch.setattr(host_share, "STALL_S", 0.5)
            alone = hosts.fetch(sent, "a3")()
            assert alone.moved == NBYTES
            assert "nothing has arrived for 0.5 s" in alone.notes[0]
            # and the next version at once
            still_ns = time.time_ns() - 3600 * 10**9
            os.utime(met[-1] / "fetching", ns=(still_ns, still_ns))
            monkeypatch.setattr(host_share, "STALL_S", 3000.0)
            alone = hosts.fetch(hosts.publish(2, NBYTES), "a3")()
            assert "nothing has arrived for 3000 s" in alone.notes[0]


def test_versions_that_are_wanted_no_more_leave_no_memory_behind() -> None:
    with ManyHosts() as hosts:
        sizes, bases = list[int](), dict.fromkeys(("a1", "a2"))
        for version in range(1, 8):
            sent = hosts.publish(version, {"w": np.full(NBYTES, version, np.uint8)})
            hosts.ends.keep(version)
            # when they take turns to fetch first
            for name in sorted(bases, reverse=version % 3 == 0):
                fetched = hosts.fetch(sent, name, bases[name])()
                if bases[name] is not None:
                    bases[name].release()
                bases[name] = fetched
            sizes.append(sum(hosts.receiver(name).nbytes for name in bases))  # type: ignore[attr-defined]
        assert max(sizes) <= 4 * NBYTES


def test_bytes_that_were_changed_in_the_memory_of_a_host_are_fetched_again() -> None:
    with ManyHosts() as hosts:
        sent = hosts.publish(1, NBYTES)
        place = hosts.fetch(sent, "a1")().places[0]
        # given shared memory with a wrong byte
        with open(place.path, "r+b") as file:
            file.seek(place.offset)
            file.write(bytes(8))
        # when
        fetched = hosts.fetch(sent, "a2")()
        # then
        assert fetched.moved == NBYTES
        assert "the memory of this host is damaged" in fetched.notes[0]


@contextlib.contextmanager
def occupied(place: Path) -> Iterator[None]:
    """Put a file in the place of the directory."""
    place.touch()
    try:
        yield
    finally:
        place.unlink()


@contextlib.contextmanager
def locked(place: Path) -> Iterator[None]:
    """Hold the lock of the directory, as a process that removes it."""
    place.mkdir(mode=0o700, exist_ok=True)
    with open(place / "owner", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    shutil.rmtree(place)


@pytest.mark.parametrize("taken", [occupied, locked])
def test_a_host_where_somebody_else_has_the_directory(
    taken: Callable[[Path], contextlib.AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet(name: str) -> tuple[Path, int]:
        with taken(Path("/dev/shm") / f"asyncflow-{os.getuid()}-{name}"):
            return meeting_directory(name)

    monkeypatch.setattr(host_share, "meeting_directory", meet)
    with ManyHosts() as hosts:
        sent = hosts.publish(1, NBYTES)
        # when, then each replica fetches for itself, and says so
        for name in ("a1", "a2"):
            fetched = hosts.fetch(sent, name)()
            assert fetched.moved == NBYTES
            assert "version 1 is not shared on this host" in fetched.notes[0]


def test_a_directory_that_is_removed_is_made_again(met: list[Path]) -> None:
    with ManyHosts() as hosts:
        hosts.fetch(hosts.publish(1, NBYTES), "a1")()
        # given
        shutil.rmtree(met[0])
        # when
        sent = hosts.publish(2, NBYTES)
        moved = [hosts.fetch(sent, name)().moved for name in ("a1", "a2")]
        # then it is shared again
        assert moved == [NBYTES, 0]


def test_a_host_without_room_keeps_no_part_of_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    with ManyHosts() as hosts:
        sent = hosts.publish(1, {f"w{n}": numbers(n, NBYTES) for n in range(3)})
        free = [1 << 40, 1 << 40]
        # given room for two of three chunks, in shared memory
        monkeypatch.setattr(segment, "free_bytes", lambda _: free.pop() if free else 0)
        # when
        fetched = hosts.fetch(sent, "a1")()
        # then the version is in memory of the process, and only there
        assert "version 1 is not shared on this host: no room for" in fetched.notes[0]
        assert hosts.receiver("a1").nbytes == 3 * NBYTES  # type: ignore[attr-defined]


def test_a_process_without_descriptors_fetches_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> Fetched:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with ManyHosts() as hosts:
        sent = hosts.publish(1, NBYTES)
        hosts.fetch(sent, "a1")()
        monkeypatch.setattr(host_share.ShmReceiver, "fetch", refused)
        assert "Too many open files" in hosts.fetch(sent, "a2")().notes[0]


def test_an_interrupt_before_the_thread_of_a_fetch_runs_ends_it() -> None:
    with ManyHosts() as hosts:
        sent, receiver = hosts.publish(1, NBYTES), hosts.receiver("a1")
        for fetching in (False, True):
            if fetching:  # a version that is there
                hosts.fetch(sent, "a2")()
            receiver.interrupt()
            with pytest.raises(WireError, match="wanted no more"):
                receiver.fetch(sent.manifest, sent.where, timeout_s=3600.0)
        assert hosts.fetch(sent, "a1")().moved == 0


def test_memory_with_threads_that_still_write_is_not_used_again() -> None:
    with ManyHosts() as hosts:
        sent, told = hosts.publish(1, NBYTES), threading.Event()
        host, former = Host(directory=None, name="a1", identity="a", run=hosts.run), []
        share = host_share.HostShare(host, 0, told)

        def interrupted(chunks: Sequence[Bytes], _: object) -> Fetched:
            former.extend(chunks)
            raise KeyboardInterrupt

        def received(chunks: Sequence[Bytes], _: object) -> Fetched:
            for chunk, whole in zip(chunks, sent.chunks, strict=True):
                chunk[:] = whole
            return Fetched(sent.manifest, chunks, NBYTES)

        # given a fetch that was left in the middle, with threads that go on
        with contextlib.closing(share):
            with pytest.raises(KeyboardInterrupt):
                share.fetch(sent.manifest, interrupted, time.monotonic() + 100)
            fetched = share.fetch(sent.manifest, received, time.monotonic() + 100)
            # when they write
            for chunk in former:
                chunk[:] = 0
            # then the next version is as it was
            sent.check(fetched)
