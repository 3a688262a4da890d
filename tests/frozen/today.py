"""Drive today's ledger with recorded inputs, and write what comes of them as the recordings do.

The only file here that names classes of the ledger. When the ledger is redrawn, this file and the two tables of names change.
"""

from __future__ import annotations

import functools
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncflow_sdk import serve
from asyncflow_sdk.errors import AsyncFlowError
from asyncflow_sdk.ledger import Ledger, commands
from asyncflow_sdk.queue import snapshot
from asyncflow_sdk.types import ColumnSpec, tasks

Json = Any

TYPES: dict[str, str] = {
    "Checkpoint": "AddCheckpoint", "Cut": "TrainingPosition", "GetCut": "GetTrainingPosition",
    "GetRestoration": "GetRestoreTarget", "Join": "OpenSession", "Joined": "SessionOpened", "Lease": "LeaseRows",
    "Leave": "CloseSession", "Loaded": "ReportLoaded", "Meet": "AllGather", "Met": "AllGathered",
    "NotLoaded": "ReportLoadFailed", "Part": "VersionPart", "Published": "PublishReply", "Put": "AddRows",
    "Restoration": "RestoreTarget", "Restored": "ReportRestored", "RolledBack": "RollbackDone",
    "Sampling": "SamplerTraits", "Staged": "ReportStaged", "Wanted": "AwaitRowsWanted",
}  # fmt: skip
"""Recorded name → today's name of a command, reply, event or error, where it is another one."""
FIELDS: dict[str, str] = {
    "Lease.team": "group", "Leased.stretches": "version_step_offsets",
    "Meet.team": "group", "Meet.word": "payload", "Met.words": "payloads",
    "StatusReport.came": "arrived", "StatusReport.passed": "completed",
}  # fmt: skip
"""Recorded "Type.field" → today's name of the field, where it is another one."""
NUMBERS = {
    "ids": "i8", "groups": "i8", "revoked": "i8", "again": "i8", "completed_at": "i8",
    "index": "i4", "filtered": "i4", "lengths": "i4", "measures": "f8",
}  # fmt: skip
"""Fields of packed little-endian numbers, where they are bytes."""
TEXTS = {"reason", "reasons", "why", "promise", "waiting", "weights", "detail", "text"}
"""Fields of replies and events with words for people: recorded is only which there are, and how often."""
RECORDED_TYPES = {today: recorded for recorded, today in TYPES.items()}
RECORDED_FIELDS = {f"{name.partition('.')[0]}.{today}": name.partition(".")[2] for name, today in FIELDS.items()}
CLASSES: dict[str, Any] = {**vars(tasks), **vars(commands), "ColumnSpec": ColumnSpec}


class LedgerOfToday:
    """A new ledger, which carries out one recorded input after another."""

    def __init__(self) -> None:
        self._ledger = Ledger()

    def carry_out(self, line: dict[str, Json]) -> dict[str, Json]:
        """Return the answers, events and retired rows; of a look, what the ledger says of itself."""
        ledger, kind = self._ledger, line["input"]
        if kind == "look":
            return {"look": self._look()}
        if kind == "apply":
            ledger.apply(line["session"], made(line["command"]), line["now"], line["ticket"])
        elif kind == "tick":
            ledger.tick(line["now"])
        elif kind == "session_died":
            ledger.session_died(line["session"], line["now"], line["reason"], blame=line["blame"])
        elif kind == "forget":
            ledger.forget(line["ticket"], line["now"])
        elif kind == "unheard":
            ledger.reply_undelivered(line["session"], line["version"], line["now"])
        else:
            ledger.lose(np.array(line["ids"], "<i8"), line["now"], line["reason"], line["tickets"])
        effects = ledger.drain()
        return effects_of(effects.answers, effects.events, effects.retired)

    def _look(self) -> Json:
        ledger = self._ledger
        return {
            "audit": plain(ledger.audit()),
            "status": plain(ledger.status()),
            "version": ledger.state.versions.current,
            "ended": ledger.ended,
            "weight_sessions": sorted(ledger.state.versions.sessions()),
            "acknowledged_steps": [[step, sorted(ids.tolist())] for step, ids in ledger.state.steps.acknowledged()],
        }


def effects_of(answers: list[Any], events: list[Any], retired: list[Any]) -> dict[str, Json]:
    """Return what an input led to, without what is empty."""
    found = {
        "answers": [{"ticket": ticket, "reply": plain(reply)} for ticket, reply in answers],
        "events": [plain(event) for event in events],
        "retired": sorted(row for ids in retired for row in ids.tolist()),
    }
    return {name: value for name, value in found.items() if value}


def renew_snapshot(directory: Path, fresh: Path) -> None:
    """Replace the snapshot of a recorded run by one in today's format. Its server had served nobody when it made it, so it is that of
    a run that has just begun, in ``fresh``. The journal stays as it was recorded."""
    head, _ = _frames(directory / "journal" / "snapshot-000001")
    with serve(fresh, durability="host"):
        _, state = _frames(fresh / "journal" / "snapshot-000001")
    snapshot.write(directory / "journal" / "snapshot-000001", head, state)


def _frames(path: Path) -> list[bytes]:
    """Return head and state of a snapshot of any format: each has its length and a checksum before it."""
    data, at, found = path.read_bytes(), len(snapshot.MAGIC), []
    for _ in range(2):
        length, _checksum = struct.unpack_from("<QQ", data, at)
        found.append(data[at + 16 : at + 16 + length])
        at += 16 + length
    return found


def plain(value: Any, field: str = "", *, lean: bool = False) -> Json:
    """Return a value as JSON, by recorded names. ``lean``: of an input, whose texts stay and whose defaults are left out."""
    if field in TEXTS and not lean and value is not None:
        return _without_words(value)
    if isinstance(value, AsyncFlowError):
        return {"error": RECORDED_TYPES.get(type(value).__name__, type(value).__name__)}
    if isinstance(value, bytes):
        dtype = NUMBERS.get(field, "")
        if dtype and not len(value) % int(dtype[1]):
            return {dtype: np.frombuffer(value, f"<{dtype}").tolist()}
        return {"hex": value.hex()}
    if isinstance(value, msgspec.Struct):
        kind = RECORDED_TYPES.get(type(value).__name__, type(value).__name__)
        found = {"type": kind}
        for each in _fields(type(value)):
            name, content = RECORDED_FIELDS.get(f"{kind}.{each.name}", each.name), getattr(value, each.name)
            default = {} if each.default_factory is dict else each.default
            if not lean or content != default:
                found[name] = plain(content, name, lean=lean)
        return found
    if isinstance(value, dict):
        return {str(key): plain(each, field, lean=lean) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each, field, lean=lean) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def made(value: Json) -> Any:
    """Return the object that a recorded input stands for."""
    if isinstance(value, list):
        return tuple(made(each) for each in value)
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (dtype := next(iter(value))) in ("hex", "i4", "i8", "f8"):
        return bytes.fromhex(value["hex"]) if dtype == "hex" else np.array(value[dtype], f"<{dtype}").tobytes()
    kind = value.get("type")
    if not isinstance(kind, str):
        return {key: made(each) for key, each in value.items()}
    fields = {FIELDS.get(f"{kind}.{key}", key): made(each) for key, each in value.items() if key != "type"}
    return CLASSES[TYPES.get(kind, kind)](**fields)


_fields = functools.cache(msgspec.structs.fields)


def _without_words(value: Any) -> Json:
    if isinstance(value, str):
        return bool(value)
    if isinstance(value, dict) and all(isinstance(each, int) for each in value.values()):
        return sorted(value.values())  # counted by their words
    if isinstance(value, dict):
        return {key: bool(each) for key, each in value.items()}
    return [bool(each) for each in value]
