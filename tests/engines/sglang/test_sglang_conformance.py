"""SGLang keeps to the contract of rollout engines: most is asked of one server, to which one engine after another attaches; the
rest of servers that an engine starts and ends."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import one_server
import pytest
from processes import with_mark
from waiting import until

from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.testing.kit.conformance import BoundCheck, checks_of

LIMIT_S = 300.0
# The shared server is there after an engine that used it.
SHARED = [each.name for each in checks_of("rollout") if each.tier in ("basic", "full") and each.name != "closes"]
kit = Conformance("rollout", one_server.attached, only=SHARED, limit_s=LIMIT_S)
any_order = Conformance("rollout", one_server.attached, only=["any_order"], limit_s=80.0)


@kit.parametrize
def test_an_attached_engine_conforms(check: BoundCheck) -> None:
    check()


@any_order.parametrize
def test_an_attached_engine_conforms_in_any_order(check: BoundCheck) -> None:
    check()


@pytest.mark.timeout(2000)  # two checks, and a server for each replica
def test_an_engine_with_a_server_of_its_own_leaves_nothing_also_where_replicas_are_killed() -> None:
    """In a process that knows nothing of the shared server, which is still there when an engine is closed. A server has a session of
    its own, so that nobody else ends it where its worker is killed."""
    mark = secrets.token_hex(8)
    code = (
        "import one_server\n"
        "from asyncflow_sdk.testing import Conformance\n"
        "from asyncflow_sdk.testing.kit.rollout import chaos\n"
        "chaos.KILLED_AT = {2: 0, 4: 1}\n"
        "kit = Conformance('rollout', 'sglang', options=one_server.OWN, only=['closes', 'killed'], limit_s=300.0)\n"
        "raise SystemExit(not kit.run(print).ok)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env={**os.environ, "ASYNCFLOW_TEST_MARK": mark},
        capture_output=True,
        text=True,
        timeout=1900,
        check=False,
    )

    assert not done.returncode, done.stdout + done.stderr[-5000:]
    until(lambda: not with_mark(mark), "the end of all processes", 120.0)
