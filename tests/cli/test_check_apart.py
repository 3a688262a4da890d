"""``asyncflow check`` asks in a process of its own: whatever an engine does to that one, the next check is asked, and nothing stays."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from children import warm_python
from processes import alive, below
from typer.testing import CliRunner, Result
from waiting import until

from asyncflow_sdk.cli.app import app

PYTHON = sys.executable  # of processes whose children are looked for
WRONG = """
import asyncio, ctypes, os, subprocess, sys
from asyncflow_sdk.testing import EchoRollout

class Crashes(EchoRollout):
    async def load_weights(self, update):
        ctypes.string_at(0)

class Exits(EchoRollout):
    async def load_weights(self, update):
        os._exit(3)

class HoldsTheLock(EchoRollout):
    async def load_weights(self, update):
        ctypes.PyDLL(None).sleep(100)

class ClosesNever(EchoRollout):
    async def close(self):
        ctypes.PyDLL(None).sleep(100)

class MadeOnce(EchoRollout):
    made = False
    def __init__(self, model):
        assert not MadeOnce.made, "the process group is initialised already"
        MadeOnce.made = True
        super().__init__(model)

class LeavesAServer(EchoRollout):
    # detached: nobody's child, in a session of its own
    def __init__(self, model):
        super().__init__(model)
        detached = ["setsid", "sh", "-c", "sleep 600 > /dev/null 2>&1 & echo $!"]
        with open("servers", "a") as file:
            file.write(subprocess.run(detached, check=True, capture_output=True, text=True).stdout)

class AwaitsAnOrphan(EchoRollout):
    async def load_weights(self, update):
        orphan = ["sh", "-c", "sleep 0.1 > /dev/null & echo $!"]
        pid = subprocess.run(orphan, check=True, capture_output=True, text=True).stdout.strip()
        while os.path.exists(f"/proc/{pid}"):
            await asyncio.sleep(0.01)
        return await super().load_weights(update)

class HangsWithAServer(LeavesAServer):
    async def load_weights(self, update):
        open("hangs", "w").close()
        ctypes.PyDLL(None).sleep(100)

class Unmade(EchoRollout):
    def __init__(self, model):
        with open("tries", "a") as file:
            file.write("made\\n")
        os.abort()
"""


@pytest.fixture(autouse=True)
def _wrong_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_apart.py").write_text(WRONG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", warm_python())


def check(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["check", *arguments], env={"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"})


def asked(engine: str, *checks: str, more: tuple[str, ...] = ()) -> Result:
    only = [word for name in checks for word in ("--only", name)]
    return check(f"wrong_apart:{engine}", *only, "--json", "said.json", *more)


def said() -> dict[str, tuple[str, str]]:
    (engine,) = json.loads(Path("said.json").read_text())["engines"]
    return {result["check"]: (result["outcome"], result.get("detail", "")) for result in engine["results"]}


def asked_to_close(engine: str, how: str) -> Result:
    """With a short limit; with a longer one where a machine is too slow for what is right."""
    for limit in ("2", "20"):
        done = asked(engine, "greedy", "closes", more=("--limit", limit))
        if said()["greedy"][0] == "passed" and re.search(how, said()["closes"][1]):
            break
    return done


def servers() -> list[int]:
    return [int(line) for line in Path("servers").read_text().split()]


@pytest.mark.parametrize(
    ("engine", "how"),
    [
        ("Crashes", "the engine's process was ended by SIGSEGV; it was in string_at"),
        ("Exits", "the engine's process ended with status 3"),
        (
            "HoldsTheLock",
            "it did not end within 15 s, and its process was killed; it was in load_weights (wrong_apart.py:",
        ),
    ],
)
def test_an_engine_that_takes_its_process_with_it_fails_that_check_and_no_other(engine: str, how: str) -> None:
    loads, more = ["update", "stale_cache", "scores"], ()
    if engine == "HoldsTheLock":  # each is waited for
        loads, more = loads[:2], ("--limit", "10")

    done = asked(engine, "greedy", *loads, more=more)

    assert done.exit_code == 1, done.output
    came = said()
    assert {name: outcome for name, (outcome, _) in came.items()} == {"greedy": "passed"} | dict.fromkeys(
        loads, "failed"
    )
    assert how in came["update"][1]
    assert done.output.count(how) == 1  # those that failed in the same way are told together


def test_an_engine_may_wait_until_an_orphan_is_gone() -> None:
    asked("AwaitsAnOrphan", "greedy", "update")

    assert said()["update"] == ("passed", "")


def test_a_crash_that_is_expected_is_none() -> None:
    done = asked("Crashes", "greedy", "update", more=("--expect", "update=its issue 12"))

    assert done.exit_code == 0, done.output
    assert said()["update"] == ("failed as expected", "its issue 12")


def test_an_engine_whose_close_hangs_fails_closes_only_and_keeps_nobody() -> None:
    how = r"close\(\) did not end within 20? s|its process was killed"
    done = asked_to_close("ClosesNever", how)

    came = said()
    assert (came["greedy"][0], came["closes"][0]) == ("passed", "failed")
    assert re.search(how, came["closes"][1])
    assert done.exit_code == 1


def test_an_engine_that_a_process_can_make_once_is_right() -> None:
    done = check("wrong_apart:MadeOnce")

    assert done.exit_code == 0, done.output
    assert "level reached: full" in done.output


def test_an_engine_that_ends_its_process_when_it_is_made_is_made_twice_and_no_more() -> None:
    done = asked("Unmade", "greedy", "update", "stops", "scores")

    assert done.exit_code == 1
    assert {outcome for outcome, _ in said().values()} == {"failed"}
    assert done.output.count("SIGABRT") == 1
    assert len(Path("tries").read_text().split()) == 2


def test_servers_that_detached_themselves_are_named_and_ended() -> None:
    done = asked_to_close("LeavesAServer", r"\(sleep 600\)")

    came = said()
    assert came["greedy"][0] == "passed"
    assert "processes are still alive after close()" in came["closes"][1]
    assert "(sleep 600)" in came["closes"][1]
    assert "left running when the engine was closed, and killed: " in done.output
    assert servers()
    assert not any(map(alive, servers()))


def test_a_check_that_is_killed_leaves_what_is_known_and_no_process() -> None:
    command = [PYTHON, "-m", "asyncflow_sdk.cli", "check", "wrong_apart:HangsWithAServer"]
    only = ["--only", "greedy", "--only", "update", "--json", "said.json"]
    with subprocess.Popen([*command, *only], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as it:
        until(Path("hangs").exists, "the engine to hang")
        started = below(it.pid)
        assert len(started) >= 2
        it.send_signal(signal.SIGKILL)
        it.wait()

    until(lambda: not any(map(alive, (*started, *servers()))), "all that it started to end")
    told = json.loads(Path("said.json").read_text())
    assert (told["ok"], told["complete"]) == (False, False)
    assert said() == {"greedy": ("passed", "")}


def test_what_was_asked_and_with_what_is_told_with_the_results() -> None:
    check(
        "echo",
        "--kind",
        "rollout",
        "--only",
        "greedy",
        "--tolerance",
        "0.5",
        "--option",
        "max_rows=8",
        "--json",
        "said.json",
    )

    told = json.loads(Path("said.json").read_text())
    (engine,) = told["engines"]
    assert told["complete"] is True
    assert engine["tolerance"] == 0.5
    assert engine["options"] == {"max_rows": 8}
    assert {"numpy", "msgspec"} <= engine["packages"].keys()
