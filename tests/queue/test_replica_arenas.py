"""A unit's arenas for replicas: memory of sessions that ended and of calls never sent is free again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncflow_sdk.queue.stores import replica_arenas
from asyncflow_sdk.queue.stores.homes import HomeId
from asyncflow_sdk.queue.stores.replica_arenas import ReplicaArenas
from asyncflow_sdk.queue.stores.replica_chunks import ReplicaChunk, digest_of_chunk
from asyncflow_sdk.types.blocks import BlockPlace

HERE, NEXT = HomeId(2, 1), HomeId(2, 2)
DATA = np.arange(1024, dtype=np.uint8)


def write(arenas: ReplicaArenas, session: int, where: HomeId = HERE, freed: tuple[int, ...] = ()) -> BlockPlace:
    chunk = ReplicaChunk(*where, session, 1024, 0, digest_of_chunk(DATA), freed=np.array(freed, np.int64).tobytes())
    return arenas.write(where, chunk, DATA)


def held(arenas: ReplicaArenas) -> set[int]:
    return {serial for serials in arenas.held().all.values() for serial in serials}


@pytest.fixture
def arenas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReplicaArenas:
    monkeypatch.setattr(replica_arenas, "SWEEP_S", 0.0)
    return ReplicaArenas(tmp_path)


def test_replicas_of_ended_sessions_end_with_their_rows(arenas: ReplicaArenas, tmp_path: Path) -> None:
    needed, other, open_ = write(arenas, 7), write(arenas, 7), write(arenas, 8)
    # when session 7 has ended, with one row left
    arenas.sweep(arenas.held(), HERE, {8}, lambda: {needed.serial})
    # then
    assert held(arenas) == {needed.serial, open_.serial}
    assert other.serial not in held(arenas)
    # and when that row has ended, too, only the files of session 8 are left
    for _ in range(2):
        arenas.sweep(arenas.held(), HERE, {8}, set)
    assert held(arenas) == {open_.serial}
    assert {path.name for path in tmp_path.iterdir()} == {open_.segment}


def test_a_replica_whose_call_was_never_sent_is_freed_after_a_time(
    arenas: ReplicaArenas, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan, needed = write(arenas, 7), write(arenas, 7)
    arenas.sweep(arenas.held(), HERE, {7}, lambda: {needed.serial})
    assert held(arenas) == {orphan.serial, needed.serial}
    monkeypatch.setattr(replica_arenas, "ORPHAN_S", 0.0)
    arenas.sweep(arenas.held(), HERE, {7}, lambda: {needed.serial})
    assert held(arenas) == {needed.serial}
    # and its memory is used again
    assert write(arenas, 7).start == orphan.start


def test_a_sweep_leaves_what_came_after_the_question(arenas: ReplicaArenas) -> None:
    before = arenas.held()
    late = write(arenas, 9)  # of a session that the server did not list yet
    arenas.sweep(before, HERE, set(), set)
    assert held(arenas) == {late.serial}


def test_replicas_of_a_lost_epoch_are_dropped(arenas: ReplicaArenas, tmp_path: Path) -> None:
    write(arenas, 7)
    new = write(arenas, 7, NEXT)
    arenas.sweep(arenas.held(), NEXT, {7}, set)
    assert held(arenas) == {new.serial}
    assert {path.name for path in tmp_path.iterdir()} == {new.segment}


def test_the_writer_frees_with_its_next_chunk(arenas: ReplicaArenas) -> None:
    places = [write(arenas, 7) for _ in range(3)]
    again = write(arenas, 7, freed=(places[1].serial, 12345))
    assert held(arenas) == {places[0].serial, places[2].serial, again.serial}
    assert again.start == places[1].start


def test_segments_of_an_earlier_process_are_abandoned_after_a_time(
    arenas: ReplicaArenas, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, earlier = write(arenas, 7).segment, "h2.1!s7-0123abcd-1"
    assert not arenas.abandoned(earlier)
    monkeypatch.setattr(replica_arenas, "ORPHAN_S", 0.0)
    assert arenas.abandoned(earlier)
    assert not arenas.abandoned(mine)
    assert not arenas.abandoned("h2.1!s7-1")
