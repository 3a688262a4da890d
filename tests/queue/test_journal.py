"""The files of a run that comes back: whatever happens to their bytes, a prefix of what was done is there, and it is said."""

import itertools
import os
import random
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from queue_runs import Durable, running
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.memory.directory import MARK
from asyncflow_sdk.queue import snapshot
from asyncflow_sdk.queue.journal_directory import JournalDirectory

PUTS = 6
MAGIC = b"asyncfl-journal\n"
FRAME = struct.Struct("<8sQQQQ")
"""Before the content of a record: a mark, its length, its number, where its commit began, and a checksum."""


@dataclass
class Killed:
    """A run of six puts whose server was killed. ``parts``: the records of its journal, the first is its head."""

    run: Durable
    journal: Path
    parts: list[bytes]
    copy: Path

    def put_back(self, content: bytes) -> None:
        """Put its files back, with another content of the journal."""
        for name, folder in (("run", self.run.directory), ("memory", self.run.memory)):
            for path in folder.rglob(
                "*"
            ):  # but not the folder: servers of other tests sweep memory of runs that are gone
                path.is_file() and path.name != MARK and path.unlink()
            shutil.copytree(self.copy / name, folder, dirs_exist_ok=True)
        self.journal.write_bytes(content)

    def served(self, content: bytes, read: Callable[..., Any] = af.serve) -> tuple[int, Any]:
        """Serve it as it was, with another content of the journal. Returns how many of the puts are there, too."""
        self.put_back(content)
        run = read(self.run.directory)
        return run.audit().put, run

    @property
    def mark(self) -> bytes:
        return self.parts[0][len(MAGIC) : len(MAGIC) + 8]

    def reframed(self, number: int, content: bytes | None = None, began: int | None = None) -> bytes:
        """A record with another content, or in a commit that began elsewhere."""
        part = self.parts[number].removeprefix(MAGIC)
        began = FRAME.unpack_from(part)[3] if began is None else began
        return framed(self.mark, number, part[FRAME.size :] if content is None else content, began)

    def with_head(self, change: Callable[[list[Any]], list[Any]]) -> bytes:
        """The first part with another head."""
        head = msgspec.msgpack.decode(self.parts[0][len(MAGIC) + FRAME.size :])
        return MAGIC + self.reframed(0, msgspec.msgpack.encode(change(head)))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    path = tmp_path_factory.mktemp("journal")
    with Durable(path / "run") as run:
        with pytest.MonkeyPatch.context() as impatient, run.client() as client:
            for number in range(PUTS):
                client.queue.put({"x": [number]}, key=f"key-{number}-")
            run.kill()
            impatient.setattr("asyncflow_sdk.wire.client.GRACE_S", 0.0)  # the client closes, and no server answers
            for name, directory in (("run", run.directory), ("memory", run.memory)):
                shutil.copytree(directory, path / name / name, ignore=shutil.ignore_patterns("queue"))
        (journal,) = (run.directory / "journal").glob("journal-*")
        copy = path / "copy"
        copy.mkdir()
        for name in ("run", "memory"):
            (path / name / name).rename(copy / name)
        whole = journal.read_bytes()
        parts, at = [], len(MAGIC)
        while length := FRAME.unpack_from(whole, at)[1]:
            parts.append(whole[at : at + FRAME.size + length])
            at += FRAME.size + length
        parts[0] = MAGIC + parts[0]
        yield Killed(run, journal, parts, copy)


def framed(mark: bytes, number: int, content: bytes, began: int) -> bytes:
    frame = struct.pack("<8sQQQ", mark, len(content), number, began)
    return frame + xxhash.xxh3_64_digest(content, xxhash.xxh3_64_intdigest(frame)) + content


def ended(run: af.Run) -> af.Run:
    run.close()
    return run


def puts_of(parts: list[bytes]) -> int:
    return sum(b"key-" in part for part in parts)


def test_a_file_that_is_cut_anywhere_gives_the_records_before_the_cut(killed: Killed) -> None:
    numbers, whole = random.Random(0), b"".join(killed.parts)
    ends = list(itertools.accumulate(map(len, killed.parts)))
    for cut in [*ends[2:5], *(numbers.randrange(ends[0], len(whole)) for _ in range(12))]:
        for behind in (b"", bytes(5000)):  # what is allocated ahead is zero
            puts, run = killed.served(whole[:cut] + behind)
            there = [end for end in ends if end <= cut or (behind and not whole[cut:end].strip(b"\0"))]
            found = ended(run).recovered
            assert found is not None
            assert puts == puts_of(killed.parts[: len(there)])
            assert (found.differing, found.lost) == (0, 0)
            assert found.discarded_bytes == len(whole[there[-1] : max(cut, there[-1])].rstrip(b"\0"))


def changed(parts: list[bytes]) -> Iterator[tuple[bytes, int]]:
    """Damaged journals, and the number of the first record of each that is not there."""
    numbers = random.Random(1)
    for _ in range(12):
        at = numbers.randrange(2, len(parts) - 1)
        record = bytearray(parts[at])
        record[numbers.randrange(len(record))] ^= 0x41
        yield b"".join([*parts[:at], bytes(record), *parts[at + 1 :]]), at
    yield b"".join([*parts[:3], *parts[4:]]), 3  # missing
    yield b"".join([*parts[:4], *parts[3:]]), 4  # twice
    yield b"".join([*parts[:3], parts[4], parts[3], *parts[5:]]), 3  # swapped
    page = bytes(sum(map(len, parts[2:5])))
    yield b"".join([*parts[:2], page, *parts[5:]]), 2  # a page that was never written


def test_damage_before_a_valid_record_is_an_error_that_changes_nothing(killed: Killed) -> None:
    for damaged, number in changed(killed.parts):
        for read in (af.serve, af.replay):
            with pytest.raises(ConfigError, match=f"is damaged: record {number}, at byte .* valid records follow it"):
                killed.served(damaged + bytes(1000), read)
            assert killed.journal.read_bytes() == damaged + bytes(1000)
    puts, run = killed.served(b"".join(killed.parts))
    run.close()
    assert puts == PUTS


def test_a_journal_without_its_head_is_not_a_new_run(killed: Killed) -> None:
    whole = b"".join(killed.parts)
    for damaged in (b"", bytes(len(whole)), whole[:30], b"X" + whole[1:], whole[:60] + bytes([whole[60] ^ 1])):
        for read in (af.serve, af.replay):
            with pytest.raises(ConfigError, match="has no valid head"):
                killed.served(damaged, read)
            assert killed.journal.read_bytes() == damaged
    # and of damage in the last record nothing is claimed but what the bytes show
    puts, run = killed.served(whole[:-1] + bytes([whole[-1] ^ 0x41]))
    assert "bytes of the journal are no whole commit and were left out" in str(ended(run).recovered)
    assert puts == puts_of(killed.parts[:-1])


def test_pages_of_the_last_commit_may_be_missing_in_any_order(killed: Killed) -> None:
    # given a commit of several records, of which one in the middle was never written when the host lost power
    first = 3
    began = len(b"".join(killed.parts[:first]))
    commit = [killed.reframed(number, began=began) for number in range(first, len(killed.parts) - 1)]
    torn = b"".join([*killed.parts[:first], commit[0], bytes(len(commit[1])), *commit[2:]])
    # when it is served, then the records before count, for none of the commit was acknowledged
    puts, run = killed.served(torn + bytes(1000))
    found = ended(run).recovered
    assert found is not None
    assert (puts, found.incomplete) == (puts_of(killed.parts[: first + 1]), False)
    # but with another commit behind, it was whole, and is damaged
    with pytest.raises(ConfigError, match=f"is damaged: record {first + 1}, "):
        killed.served(torn + killed.parts[-1])


def test_a_client_cannot_write_what_is_taken_for_a_record(killed: Killed) -> None:
    # given a torn record with bytes of a client, which look like a record
    forged = framed(b"\xf7record\n", len(killed.parts) + 1, b"abc", 1 << 40)
    torn = FRAME.pack(killed.mark, 1 << 20, len(killed.parts), len(b"".join(killed.parts)), 0) + forged
    # when it is served, then it is torn, and no damage
    puts, run = killed.served(b"".join(killed.parts) + torn)
    assert puts == PUTS
    found = ended(run).recovered
    assert found is not None
    assert found.discarded_bytes == len(torn)
    # and no two journals have the same mark
    (journal,) = (killed.run.directory / "journal").glob("journal-*")
    assert journal.read_bytes()[len(MAGIC) :][:8] != killed.mark


def test_replay_reads_again_what_a_live_server_was_writing(killed: Killed, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a first copy of the journal that lacks a record of which the server wrote the page meanwhile
    copies = iter([b"".join([*killed.parts[:3], bytes(len(killed.parts[3])), *killed.parts[4:]])])
    read_bytes = Path.read_bytes
    killed.put_back(b"".join(killed.parts))
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: (path == killed.journal and next(copies, None)) or read_bytes(path)
    )
    # when, then
    found = af.replay(killed.run.directory)
    assert (found.audit.put, found.torn_bytes, found.incomplete) == (PUTS, 0, False)


def test_replay_goes_on_where_its_server_closes_meanwhile(tmp_path: Path) -> None:
    # given a server that closes, which cuts its journal, while this is replayed
    run = af.serve(tmp_path / "run", durability="process")
    run.queue.declare("train", needs=["x"])
    run.queue.put({"x": [1.0]})
    # when, then
    found = af.replay(tmp_path / "run", lambda milestone: run.close() if "opens session" in milestone.what else None)
    assert found.audit.put == 1
    with af.serve(tmp_path / "run") as run:
        run.queue.end(cancel=True)


def test_damage_is_torn_where_a_host_that_never_synced_was_started_again(killed: Killed) -> None:
    # given a journal of an earlier boot, of which a page in the middle was never written
    earlier = killed.with_head(lambda head: [*head[:6], "another boot", *head[7:]])
    parts = [earlier, *killed.parts[1:3], bytes(len(killed.parts[3])), *killed.parts[4:]]
    # when it is served, then the records before the page count, and the loss of the others is an error
    puts, run = killed.served(b"".join(parts))
    found = ended(run).recovered
    assert found is not None
    assert puts == puts_of(killed.parts[:3])
    assert found.discarded_bytes > 0
    assert (found.incomplete, found.level) == (True, "error")
    assert "and so was acknowledged work behind them: the host was started again" in str(found)
    # and a replay reports the same
    killed.put_back(b"".join(parts))
    assert af.replay(killed.run.directory).incomplete


def test_what_belongs_to_a_run_that_may_come_back_is_not_swept_until_its_directory_is_gone(tmp_path: Path) -> None:
    with Durable(tmp_path / "run") as run:
        run.kill()
        with running():
            assert run.memory.is_dir()
        shutil.rmtree(run.directory)
        with running():
            until(lambda: not run.memory.exists(), "its end, by this server or one that started just before")


def a_byte_of_the_snapshot(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def test_a_snapshot_that_cannot_be_read_is_no_run_and_not_silently_a_new_one(
    tmp_path: Path,
) -> None:
    af.serve(tmp_path / "run", durability="process").close()
    (snapshot,) = (tmp_path / "run" / "journal").glob("snapshot-*")
    whole = snapshot.read_bytes()
    for kind in ("snapshot", "journal"):  # an older pair, which could not be removed
        shutil.copy(snapshot.with_name(f"{kind}-000001"), snapshot.with_name(f"{kind}-000000"))
    snapshot.write_bytes(a_byte_of_the_snapshot(whole))
    with pytest.raises(ConfigError, match="snapshot-000001 is damaged. Nothing was changed: "):
        af.serve(tmp_path / "run")
    snapshot.write_bytes(b"asyncfl-snapsh4\n" + whole)
    with pytest.raises(
        ConfigError, match="snapshot-000001 is of an earlier version of the SDK: continue its run with"
    ):
        af.serve(tmp_path / "run")
    snapshot.write_bytes(whole)
    with af.serve(tmp_path / "run") as run:
        run.queue.end(cancel=True)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("FORMAT", 99, "has journal format 99 of asyncflow-sdk .*; .* has format .*, and may replay it differently"),
        ("__version__", "0.0.1", "has journal format .* of asyncflow-sdk 0.0.1; .* may replay it differently"),
    ],
)
def test_a_journal_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, said: str
) -> None:
    with monkeypatch.context() as other:
        other.setattr(f"asyncflow_sdk.queue.journal_directory.{name}", value)
        other.setattr(f"asyncflow_sdk.queue.journal.{name}", value)
        af.serve(tmp_path / "run", durability="process").close()
    for read in (af.serve, af.replay):
        with pytest.raises(ConfigError, match=said):
            read(tmp_path / "run")


def another_layout(head: list[Any]) -> list[Any]:
    return [99, "9.0", {"run": head[2]}]


def another_version(head: list[Any]) -> list[Any]:
    return [head[0], "0.0.1", *head[2:]]


def another_run(head: list[Any]) -> list[Any]:
    return [*head[:2], "ab" * 8, *head[3:]]


def no_head(head: list[Any]) -> list[Any]:
    return head[:4]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (another_layout, r"journal-\d+ has journal format 99 of asyncflow-sdk 9.0; .* has format .*with 9.0"),
        (another_version, r"journal-\d+ has journal format .* of asyncflow-sdk 0.0.1; .* may replay it differently"),
        (another_run, r"journal-\d+ belongs to run abababababababab, and the snapshot beside it to run"),
        (no_head, r"journal-\d+ has no head of a journal"),
    ],
)
def test_a_journal_file_of_another_writer_than_its_snapshot_is_refused_and_unchanged(
    killed: Killed, change: Callable[[list[Any]], list[Any]], error: str
) -> None:
    # given a valid first record with another head; the snapshot is that of the run
    changed = killed.with_head(change) + b"".join(killed.parts[1:])
    # when, then
    for read in (af.serve, af.replay):
        with pytest.raises(ConfigError, match=error):
            killed.served(changed, read)
        assert killed.journal.read_bytes() == changed
    puts, run = killed.served(b"".join(killed.parts))
    run.close()
    assert puts == PUTS


def test_a_directory_is_served_by_one_process_with_one_durability_for_the_eyes_of_its_owner(tmp_path: Path) -> None:
    run = af.serve(tmp_path / "run", durability="process")
    assert run.recovered is None
    files = [path for path in (tmp_path / "run" / "journal").iterdir() if path.is_file()]
    assert {path.stat().st_mode & 0o077 for path in files} == {0}
    with pytest.raises(ConfigError, match=f"being served by process {os.getpid()}, on .*connect to it"):
        af.serve(tmp_path / "run")
    run.close()
    with pytest.raises(ConfigError, match="durability 'process'; it cannot continue as 'host'"):
        af.serve(tmp_path / "run", durability="host")
    with af.serve(tmp_path / "run") as run:
        run.queue.end(cancel=True)


def test_an_answer_that_differs_from_the_first_one_is_counted(killed: Killed) -> None:
    # given a record whose answers had another digest when it was written
    at = next(number for number, part in enumerate(killed.parts) if b"key-3" in part)
    entry = msgspec.msgpack.decode(killed.parts[at][FRAME.size :])
    other = killed.reframed(at, msgspec.msgpack.encode([*entry[:-1], entry[-1] ^ 1]))
    # when it is replayed
    puts, run = killed.served(b"".join([*killed.parts[:at], other, *killed.parts[at + 1 :]]))
    # then nothing is lost, and the difference is an error to report
    found = ended(run).recovered
    assert found is not None
    assert (puts, found.differing, found.level) == (PUTS, 1, "error")


def test_a_new_pair_counts_where_the_old_journal_cannot_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = JournalDirectory(tmp_path / "run" / "journal", "process")
    directory.begin(b"", tmp_path, 0.0)
    close, broken = os.close, vars(directory.journal)["_fd"]

    def failing(descriptor: int) -> None:
        close(descriptor)
        if descriptor == broken:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "close", failing)
    directory.begin(b"", tmp_path, 0.0)
    monkeypatch.undo()
    assert {path.name for path in directory.path.glob("*-*")} == {"journal-000002", "snapshot-000002"}
    assert directory.journal.path.name == "journal-000002"
    directory.close(over=True)


class Importing(str):
    """A name of a module. Another module is imported while it is looked at."""

    __slots__ = ()

    def startswith(self, *_: Any) -> bool:
        return bool(sys.modules.setdefault("one_module_more", sys))


def test_other_threads_may_import_while_a_snapshot_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, Importing("importing"), struct)
    monkeypatch.setitem(sys.modules, "one_module_more", sys)
    monkeypatch.delitem(sys.modules, "one_module_more")
    assert "queue:CallResult" in snapshot.classes()
