"""The journal's files: whatever happens to their bytes, what is read is a prefix of what was written, and it is said."""

import itertools
import os
import shutil
from pathlib import Path

import pytest
from children import Child
from journal_children import fill_a_small_disk

from asyncflow_sdk.errors import ConfigError, MemoryFull
from asyncflow_sdk.memory import SharedDirectory, remove_if_ownerless, sweep
from asyncflow_sdk.queue import QueueServer, journal
from asyncflow_sdk.queue.journal import FORMAT, Asked, Dropped, Entry, Gone, Head, Journal, Recorded, Ticked

HEAD = Head(FORMAT, "0", "run", "process", "/nowhere", "", "boot", 1.5)
RECORDS = [
    Asked(2.0, "session", 1, 1, 1, b"hello" * 5),
    Ticked(3.0),
    Gone(4.0, "session", "its process ended"),
    Dropped(4.5, "session", 7),
    Asked(5.0, "session", 2, 1, 3, b""),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of five records, committed one by one."""
    written = Journal(tmp_path / "journal", HEAD, sync=True)
    for number, record in enumerate(RECORDS):
        written.reserve(100)
        written.append(record, (b"note",) * number, number)
        assert written.commit()
    written.close()
    return written.path


def read(path: Path) -> tuple[list[Entry], Recorded]:
    recorded = Recorded(path)
    entries = list(recorded.entries())
    recorded.close()
    return entries, recorded


def test_what_was_written_is_read(path: Path) -> None:
    entries, recorded = read(path)
    assert recorded.head == HEAD
    assert [entry.record for entry in entries] == RECORDS
    assert [(len(entry.notes), entry.told) for entry in entries] == [(n, n) for n in range(5)]
    assert recorded.end == path.stat().st_size


def test_a_file_that_is_cut_anywhere_gives_the_records_before_the_cut(path: Path, tmp_path: Path) -> None:
    whole, ends = path.read_bytes(), ends_of(path)
    for cut in range(len(whole)):
        torn = tmp_path / "torn"
        for rest in (b"", bytes(5000)):  # what is allocated ahead is zero
            torn.write_bytes(whole[:cut] + rest)
            recorded = Recorded(torn)
            entries = list(recorded.entries())
            # then: a record is whole, too, if all that it lacks are zeros, and zeros follow
            there = [end for end in ends if end <= cut or (rest and not whole[cut:end].strip(b"\0"))]
            assert [e.record for e in entries] == RECORDS[: max(len(there) - 1, 0)]
            assert (recorded.head is None) == (not there)
            if there:
                assert recorded.cut == len(whole[there[-1] : max(cut, there[-1])].rstrip(b"\0"))
            assert recorded.readable_behind() == 0
            recorded.close()


def test_any_byte_that_changes_ends_what_is_read_and_the_rest_is_found(path: Path, tmp_path: Path) -> None:
    whole, ends = path.read_bytes(), ends_of(path)
    for at in range(ends[0], len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 0x41
        (tmp_path / "changed").write_bytes(changed)
        recorded = Recorded(tmp_path / "changed")
        entries = list(recorded.entries())
        hit = sum(end <= at for end in ends[1:])
        assert [e.record for e in entries] == RECORDS[:hit]
        assert recorded.readable_behind() == len(RECORDS) - hit - 1
        assert recorded.cut > 0
        recorded.close()


@pytest.mark.parametrize("change", ["missing", "twice", "swapped"])
def test_records_that_are_missing_doubled_or_out_of_order_are_seen(path: Path, change: str) -> None:
    whole, ends = path.read_bytes(), ends_of(path)
    parts = [whole[: ends[0]], *(whole[a:b] for a, b in itertools.pairwise(ends))]
    if change == "missing":
        del parts[2]
    elif change == "twice":
        parts.insert(2, parts[2])
    else:
        parts[2:4] = parts[3], parts[2]
    path.write_bytes(b"".join(parts))
    entries, _ = read(path)
    assert [e.record for e in entries] == RECORDS[: 2 if change == "twice" else 1]
    again = Recorded(path)
    list(again.entries())
    assert again.readable_behind() >= 1
    again.close()


def test_a_full_disk_is_found_before_anything_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Journal(tmp_path / "journal", HEAD, sync=False)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal.os, "posix_fallocate", full)
    written.reserve(1000)  # of what was allocated ahead
    with pytest.raises(MemoryFull, match="No space left.*Nothing was stored"):
        written.reserve(10 << 20)
    # when the write itself fails, nothing more is taken until it is made up for
    written.append(RECORDS[0])
    monkeypatch.setattr(journal.os, "pwrite", full)
    assert not written.commit()
    with pytest.raises(MemoryFull):
        written.reserve(1)
    monkeypatch.undo()
    assert written.commit()
    written.reserve(1)
    written.close()
    assert [entry.record for entry in read(written.path)[0]] == RECORDS[:1]


def test_a_server_whose_disk_is_full_refuses_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    # a process that may write no file beyond a few megabytes, which is a small disk to it
    with Child(fill_a_small_disk, str(tmp_path / "journal")) as child:
        said = child.hear()
        assert "s: the journal" in said["refused"]
        assert said["put"] == said["acknowledged"] == said["recovered"]
        assert said["live_blocks"] == said["acknowledged"]
        assert said["after"] == said["acknowledged"] + 1


def test_what_a_journal_owns_is_not_swept_until_the_journal_is_gone(tmp_path: Path) -> None:
    # given a run that was killed, in effect
    owner = tmp_path / "run"
    owner.mkdir()
    directory = SharedDirectory(tmp_path, journal=owner)
    directory.close(keep=True)
    # then no start and no worker removes it
    assert sweep(tmp_path) == []
    assert not remove_if_ownerless(directory.path)
    assert directory.path.is_dir()
    # but the server that takes it up has the same, made anew if need be
    again = SharedDirectory(journal=owner, path=directory.path)
    assert again.path == directory.path
    again.close()
    again = SharedDirectory(journal=owner, path=directory.path)
    again.close(keep=True)
    # and when the journal is gone, it goes
    shutil.rmtree(owner)
    assert sweep(tmp_path) == [directory.path]


def test_a_start_that_got_no_further_than_its_directory_leaves_nothing(tmp_path: Path) -> None:
    owner = tmp_path / "run"
    owner.mkdir()
    first = SharedDirectory(tmp_path, journal=owner)
    first.close(keep=True)
    second = SharedDirectory(tmp_path, journal=owner)
    assert not first.path.exists()
    second.close()


def test_a_directory_is_served_by_one_process_and_one_version(tmp_path: Path) -> None:
    server = QueueServer([], journal=tmp_path / "journal", durability="process")
    with pytest.raises(ConfigError, match=f"being served by process {os.getpid()}, on .*connect to it"):
        QueueServer([], journal=tmp_path / "journal")
    server.close()
    with pytest.raises(ConfigError, match="durability 'process'; it cannot go on as 'host'"):
        QueueServer([], journal=tmp_path / "journal", durability="host")
    from asyncflow_sdk.queue import recovery

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery, "__version__", "9.9")
        with pytest.raises(ConfigError, match=r"written by asyncflow-sdk \d.*and this is 9.9"):
            QueueServer([], journal=tmp_path / "journal")
    # a snapshot that is damaged is no run, and not silently a new one either
    (snapshot,) = (tmp_path / "journal").glob("snapshot-*")
    data = bytearray(snapshot.read_bytes())
    data[-1] ^= 1
    snapshot.write_bytes(data)
    with pytest.raises(ConfigError, match="cannot be read: .*is damaged. Move it away"):
        QueueServer([], journal=tmp_path / "journal")
    assert not sweep(server.directory.path.parent)
    shutil.rmtree(server.directory.path)


def ends_of(path: Path) -> list[int]:
    """Where the head and each record end."""
    recorded = Recorded(path)
    ends = [recorded.end]
    ends += [recorded.end for _ in recorded.entries()]
    recorded.close()
    return ends
