"""SGLang keeps to the contract of rollout engines: most is asked of one server, to which one engine after another attaches; the
rest of servers that an engine starts and ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import one_server
import pytest

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


@pytest.mark.timeout(2000)  # five checks of at most 300 s, and a server for each replica
def test_an_engine_with_a_server_of_its_own_conforms_and_leaves_nothing() -> None:
    """In a process that knows nothing of the shared server, which is still there when an engine is closed. Also where replicas are killed."""
    code = (
        "import one_server\n"
        "from asyncflow_sdk.testing import Conformance\n"
        "only = ['capabilities', 'greedy', 'update', 'closes', 'killed']\n"
        "kit = Conformance('rollout', 'sglang', options=one_server.OWN, only=only, limit_s=300.0)\n"
        "raise SystemExit(not kit.run(print).ok)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=1900,
        check=False,
    )

    assert not done.returncode, done.stdout + done.stderr[-5000:]
