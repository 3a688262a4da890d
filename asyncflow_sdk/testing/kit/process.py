"""The subprocess of ``asyncflow check``: JSON lines tell it first the engine, then each check."""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import json
import os
import socket
import sys
from collections.abc import Mapping
from typing import IO, Any

from ...errors import ConfigError, PluginError
from ...interfaces import RolloutEngine, TrainEngine
from ...plugins import import_name
from .conformance import KINDS, Conformance, checks_of

LATE_S = 1.0
"""Seconds after the limit of a wait until a hanging process dumps its stacks."""


def main(line: socket.socket, stacks: IO[bytes]) -> None:
    """Answer until the other end of ``line`` closes. ``stacks``: a file for the stacks of a hang."""

    def say(**what: Any) -> None:
        """Send a JSON line."""
        line.sendall(json.dumps(what).encode() + b"\n")

    def waits(seconds: float) -> None:
        """Report a wait, and dump stacks if it takes longer."""
        say(within_s=seconds, made=kit.ever_made)
        faulthandler.dump_traceback_later(seconds + LATE_S, file=stacks)

    with line.makefile("rb") as told:
        spec = json.loads(told.readline())
        say(pid=os.getpid())
        sys.path += [path for path in spec.pop("path") if path not in sys.path]
        try:
            kit = _kit(spec)
            kit.waits = waits
            say(hello={"kind": kit.kind, "unknowable": kit.unknowable})
            checks = {check.name: check for check in checks_of(kit.kind)}
            for each in told:
                question = json.loads(each)
                result = kit.ask(checks[question["ask"]], renew=False)
                faulthandler.cancel_dump_traceback_later()
                names = ("outcome", "detail", "seconds", "cause", "hint")
                answer = {name: getattr(result, name) for name in names}
                say(made=kit.ever_made, result={**answer, "asked": kit.asked() if question["how"] else None})
        except (ConfigError, PluginError) as error:
            say(refused=[type(error).__name__, str(error)])
            return
    with contextlib.suppress(Exception):  # check `closes` asks about it
        kit.close()


def _kit(spec: Mapping[str, Any]) -> Conformance:
    kind = spec["kind"] or _kind_of(import_name(spec["engine"]), spec["engine"])
    return Conformance(**{**spec, "kind": kind})


def _kind_of(factory: Any, name: str) -> str:
    for kind, base in (("rollout", RolloutEngine), ("train", TrainEngine)):
        if inspect.isclass(factory) and issubclass(factory, base):
            return kind
    raise ConfigError(f"{name} is no subclass of an engine's interface: say --kind {' or --kind '.join(KINDS)}")
