"""Three hosts in a chain, and the cable of the one in the middle pulled for 20 s. In ``make fuzz``: it takes a minute."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from waiting import until

from benchmarks.hosts.network import Network, line_of, unavailable

pytestmark = [
    pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE") != "long", reason="it takes a minute: make fuzz"),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "hosts can be made"),
]
ROLES = ["-m", "benchmarks.hosts.weights"]
NBYTES, CUT_S = 32 << 20, 20.0


def test_a_cable_that_is_cut_in_the_middle_of_a_version_is_routed_around(tmp_path: Path) -> None:
    with Network(3, "20mbit", shape=("64kb", "256kb")) as network:
        # given a trainer, a host that fetches from it, and one behind that host
        address, directory = f"tcp://{network.address(1)}:7000", str(tmp_path / "run")
        options = {"address": address, "directory": directory, "nbytes": NBYTES, "options": {"fanout": 1}}
        trainer = network.start(1, [*ROLES, "publish", json.dumps(options)])
        assert line_of(trainer.stdout) == "ready"
        replicas = []
        for host in (2, 3):
            options = {"address": address, "key": str(tmp_path / "run" / "run.key"), "name": f"host{host}"}
            replicas.append(network.start(host, [*ROLES, "replicate", json.dumps(options)]))
            assert line_of(replicas[-1].stdout) == "ready"
        assert trainer.stdin is not None
        trainer.stdin.write("go\n")
        trainer.stdin.flush()
        sent = [network.link_bytes(host)[1] for host in (1, 2, 3)]
        until(lambda: max(network.link_bytes(host)[1] for host in (2, 3)) > 4 << 20, "bytes from host to host")
        middle, last = (2, 3) if network.link_bytes(2)[1] > network.link_bytes(3)[1] else (3, 2)
        # when the cable of the one in the middle is cut
        network.cut(middle)
        # then the last host gets the version all the same, from the trainer
        assert float(line_of(replicas[last - 2].stdout)) > 0
        assert network.link_bytes(1)[1] - sent[0] > NBYTES
        # and the other one, once its cable is back
        time.sleep(CUT_S)
        network.mend(middle)
        assert float(line_of(replicas[middle - 2].stdout)) > 0
        for process in (*replicas, trainer):
            process.kill()
            process.wait(60)
