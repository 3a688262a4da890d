"""The files of a run that comes back: whatever happens to their bytes, a prefix of what was done is there, and it is said."""

import itertools
import os
import random
import shutil
import struct
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

PUTS = 6
FRAME = struct.Struct("<8sQQQ")
"""What comes before the content of a record: a mark, its length, its number and a checksum."""


@dataclass
class Killed:
    """A run of six puts whose server was killed. ``parts``: the records of its journal, the first is its head."""

    run: Durable
    journal: Path
    parts: list[bytes]
    copy: Path

    def served(self, content: bytes, read: Callable[..., Any] = af.serve) -> tuple[int, Any]:
        """Serve it as it was, with another content of the journal. Returns how many of the puts are there, too."""
        for name, folder in (("run", self.run.directory), ("memory", self.run.memory)):
            for path in folder.rglob(
                "*"
            ):  # but not the folder: servers of other tests sweep memory of runs that are gone
                path.is_file() and path.name != MARK and path.unlink()
            shutil.copytree(self.copy / name, folder, dirs_exist_ok=True)
        self.journal.write_bytes(content)
        run = read(self.run.directory)
        return run.audit().put, run


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
        parts, at = [], 16  # behind a magic number
        while length := FRAME.unpack_from(whole, at)[1]:
            parts.append(whole[at : at + FRAME.size + length])
            at += FRAME.size + length
        parts[0] = whole[:16] + parts[0]
        yield Killed(run, journal, parts, copy)


def framed(number: int, content: bytes) -> bytes:
    return FRAME.pack(b"\xf7record\n", len(content), number, xxhash.xxh3_64_intdigest(content, number)) + content


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
    whole = b"".join(parts)
    for at in (0, len(parts[0]) - 1):  # the magic number, and the head
        yield bytes([*whole[:at], whole[at] ^ 0x41, *whole[at + 1 :]]), 1
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


def test_damage_is_torn_where_a_host_that_never_synced_was_started_again(killed: Killed) -> None:
    # given a journal of an earlier boot, of which a page in the middle was never written
    _, head = killed.parts[0][:16], msgspec.msgpack.decode(killed.parts[0][16 + FRAME.size :])
    head[6] = "another boot"
    earlier = killed.parts[0][:16] + framed(0, msgspec.msgpack.encode(head))
    parts = [earlier, *killed.parts[1:3], bytes(len(killed.parts[3])), *killed.parts[4:]]
    # when it is served, then the records before the page count
    puts, run = killed.served(b"".join(parts))
    found = ended(run).recovered
    assert found is not None
    assert puts == puts_of(killed.parts[:3])
    assert found.discarded_bytes > 0


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
    snapshot.write_bytes(a_byte_of_the_snapshot(whole))
    with pytest.raises(ConfigError, match="cannot be read: .*is damaged, or of another version. Move"):
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
    head = msgspec.msgpack.encode(change(msgspec.msgpack.decode(killed.parts[0][16 + FRAME.size :])))
    changed = killed.parts[0][:16] + framed(0, head) + b"".join(killed.parts[1:])
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
    other = framed(at, msgspec.msgpack.encode([*entry[:-1], entry[-1] ^ 1]))
    # when it is replayed
    puts, run = killed.served(b"".join([*killed.parts[:at], other, *killed.parts[at + 1 :]]))
    # then nothing is lost, and the difference is an error to report
    found = ended(run).recovered
    assert found is not None
    assert (puts, found.differing, found.level) == (PUTS, 1, "error")
