"""Damage in a version directory is found and named, and costs a version and no replica."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transport_ends import FIRST, names, tensors

from asyncflow_sdk.errors import DeadlineExceeded, DigestMismatch, VersionGone
from asyncflow_sdk.testing.transport_harness import TransportHarness

pytestmark = pytest.mark.fast
SECOND = "model-00002-of-00003.safetensors"


def change(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)


def swap_files(place: Path) -> None:
    (place / FIRST).rename(place / "x")
    (place / SECOND).rename(place / FIRST)
    (place / "x").rename(place / SECOND)


def link_elsewhere(place: Path) -> None:
    (place / FIRST).rename(place.parent / "elsewhere")
    (place / FIRST).symlink_to(place.parent / "elsewhere")


def turn_into_a_pipe(place: Path) -> None:
    (place / SECOND).unlink()
    os.mkfifo(place / SECOND)


def turn_into_a_directory(place: Path) -> None:
    (place / FIRST).unlink()
    (place / FIRST).mkdir()


def take_from_another_version(place: Path) -> None:
    os.replace(place.parent / "version-00000001" / FIRST, place / FIRST)


DAMAGE: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "a flipped bit": (
        lambda p: change(p / SECOND, -100), DigestMismatch, rf"version 2: bucket 0 of chunk 1 .*layer\.\d.*{SECOND}",
    ),
    "a flipped bit in a header": (lambda p: change(p / FIRST, 30), DigestMismatch, f"{FIRST} has another header.*layer.0"),
    "a flipped bit in the length of a header": (lambda p: change(p / FIRST, 6), DigestMismatch, f"{FIRST} has another header"),
    "a flipped bit in the manifest": (
        lambda p: change(p / "manifest.msgpack", 20), DigestMismatch, "manifest.msgpack has another header",
    ),
    "a truncated file": (
        lambda p: os.truncate(p / SECOND, 1000), DigestMismatch, rf"version 2: .*{SECOND} has 1000 bytes.*layer\.\d",
    ),
    "an empty file": (lambda p: os.truncate(p / SECOND, 0), DigestMismatch, f"{SECOND} has 0 bytes"),
    "a longer file": (lambda p: (p / SECOND).open("ab").write(b"x"), DigestMismatch, f"{SECOND} has"),
    "a truncated manifest": (lambda p: os.truncate(p / "manifest.msgpack", 9), DigestMismatch, "manifest.msgpack has 9"),
    "a huge manifest": (
        lambda p: os.truncate(p / "manifest.msgpack", 1 << 40), DigestMismatch, "manifest.msgpack has 1099511627776",
    ),
    "a missing file": (lambda p: (p / FIRST).unlink(), DigestMismatch, rf"version 2: .*{FIRST} is missing.*layer\.0"),
    "a missing manifest": (lambda p: (p / "manifest.msgpack").unlink(), VersionGone, "version 2 is no longer kept"),
    "a missing directory": (lambda p: p.rename(p.parent / "x"), VersionGone, "version 2 is no longer kept"),
    "files in the place of others": (swap_files, DigestMismatch, "version 2: "),
    "a file of another version": (take_from_another_version, DigestMismatch, "version 2: bucket 0 of chunk 0"),
    "a symbolic link": (link_elsewhere, DigestMismatch, rf"version 2: .*{FIRST} is a symbolic link"),
    "a pipe": (turn_into_a_pipe, DigestMismatch, f"{SECOND} is no regular file"),
    "a directory": (turn_into_a_directory, DigestMismatch, f"{FIRST} is no regular file"),
    "a link in the place of the directory": (
        lambda p: p.rename(p.parent / "x").parent.joinpath(p.name).symlink_to(p.parent / "x"), DigestMismatch, "symbolic link",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_and_the_next_version_comes(what: str, files: TransportHarness, path: Path) -> None:
    # given
    damage, error, reason = DAMAGE[what]
    for version in (1, 2):
        sent = files.publish(version, tensors(version), chunk=1 << 16)
    files.keep(1, 2)
    receiver = files.receiver()
    # when
    damage(path / "version-00000002")
    # then
    for _ in range(2):
        with pytest.raises(error, match=reason):
            files.fetch(receiver, sent)
    files.keep(1)
    sent = files.publish(3, tensors(3))
    sent.check(files.fetch(receiver, sent))


def test_files_of_others_in_a_directory_do_no_harm_and_stay(files: TransportHarness, path: Path) -> None:
    sent = files.publish(1, tensors())
    (path / "version-00000001" / "mine.txt").write_text("{}")
    (path / "notes").write_text("mine")
    sent.check(files.fetch(files.receiver(), sent))
    files.keep()
    assert names(path) == ["notes", "version-00000001"]
    assert names(path / "version-00000001") == ["mine.txt"]


def test_a_version_that_goes_while_it_is_read_is_gone(
    files: TransportHarness, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a read that has come to the second file
    sent = files.publish(1, tensors(), chunk=1 << 16)
    receiver, pread = files.receiver(), os.preadv
    reads: list[int] = []

    def preadv(*arguments: Any) -> int:
        reads.append(1)
        if len(reads) == 3:
            files.keep()
        return pread(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    # when / then
    with pytest.raises(VersionGone, match="version 1 is no longer kept"):
        files.fetch(receiver, sent)


def test_reads_and_writes_may_be_short(files: TransportHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:1000]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: write(fd, [views[0][:777]], at))
    sent = files.publish(1, tensors())
    sent.check(files.fetch(files.receiver(), sent))


def test_a_file_that_shrinks_while_it_is_read_is_named(
    files: TransportHarness, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = files.publish(1, tensors(), chunk=1 << 16)
    read = os.preadv

    def preadv(fd: int, views: Any, at: int) -> int:
        if at:  # behind the headers, of which the sizes were right
            os.truncate(path / "version-00000001" / FIRST, 5000)
        return read(fd, views, at)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(DigestMismatch, match=rf"version 1: .*{FIRST} ends at byte 5000; it holds layer\.0"):
        files.fetch(files.receiver(), sent)


def test_a_read_ends_by_its_deadline_and_by_an_interrupt(
    files: TransportHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = files.publish(1, tensors())
    receiver = files.receiver()
    with pytest.raises(DeadlineExceeded, match="version 1: .*version-00000001 was not read within 0 s"):
        files.fetch(receiver, sent, timeout_s=0.0)
    read = os.preadv

    def preadv(*arguments: Any) -> int:
        receiver.interrupt()
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(VersionGone, match="version 1 is wanted no more"):
        files.fetch(receiver, sent)
    monkeypatch.undo()
    sent.check(files.fetch(receiver, sent))
