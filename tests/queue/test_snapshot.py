"""Snapshots: what is carried is named by its room, and what another format says is not guessed at."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from asyncflow_sdk.errors import ProtocolError
from asyncflow_sdk.ledger import Ledger
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.queue import snapshot


def test_a_class_is_named_by_its_room_wherever_it_stands_there() -> None:
    ledger = Ledger()
    ledger.apply(0, cmd.Join(name="worker"), 0.0, 1)

    data = snapshot.encode(ledger.sessions)

    assert b"ledger:Session" in data
    assert snapshot.decode(data) == ledger.sessions
    with pytest.raises(ProtocolError, match="'ledger:Sessiom', which is none of our classes"):
        snapshot.decode(data.replace(b"ledger:Session", b"ledger:Sessiom"))


def test_a_class_outside_the_rooms_is_not_made() -> None:
    data = msgspec.msgpack.encode(["object", "workflow:Consumer"])
    with pytest.raises(ProtocolError, match="'workflow:Consumer', which is none of our classes"):
        snapshot.decode(data)


def test_a_snapshot_of_another_format_says_so(tmp_path: Path) -> None:
    path = tmp_path / "snapshot-000001"
    snapshot.write(path, b"head", {"a": 1})
    assert snapshot.read(path) == (b"head", {"a": 1})
    path.write_bytes(path.read_bytes().replace(b"snapsh2", b"snapsh1"))

    with pytest.raises(
        ProtocolError, match="of snapshot format '1', and this asyncflow-sdk reads format '2': use the ver"
    ):
        snapshot.read(path)
