"""Runs over three hosts, two of them reached by ssh, while hosts die, a cable is cut, and the driver is killed."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from echo_runs import Driver, echo_workflow, events_of, trained_rows
from functions import length
from gates import Gates
from hosts_in_namespaces import HERE, Network, network
from processes import with_mark
from ssh_hosts import SshServer, ssh_servers
from waiting import until

import asyncflow_sdk as af

STEPS = 8
NAMES = {2: "two", 3: "three"}


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    with network(3) as made:
        yield made


@pytest.fixture
def servers(net: Network, tmp_path: Path) -> Iterator[dict[int, SshServer]]:
    with ssh_servers(net, tmp_path, NAMES) as made:
        yield made


def workflow(config: str, port: str, gates: str) -> af.Workflow:
    """A rollout and a rank of the trainer on each of two hosts, a stage on one. The trainer waits at ``gates``."""
    there: dict[str, Any] = {"launcher": "ssh", "launcher_options": {"config": config}, "max_restarts": 20}
    return echo_workflow(
        rollout=af.Rollout("echo", group_size=4, prompt="prompt_ids", hosts=["two", "three"], **there),
        reward=af.Stage(length, task="reward", hosts=["two"], **there),
        train=af.Train("gates:GatedRanks", world_size=2, delay_s=0.1, gates=gates, hosts=["two", "three"], **there),
        steps=STEPS, checkpoint=af.Checkpoint(every=2), address=f"tcp://{HERE}:{port}",
    )  # fmt: skip


def drive(net: Network, directory: Path, port: int = 7000) -> Driver:
    """Run the workflow from host 1, or go on with it."""
    new = f"test_hosts_attacked:workflow:{directory.parent / 'ssh_config'}:{port}:{directory.parent / 'gates'}"
    return Driver(directory, "resume" if (directory / "workflow.json").exists() else new, within=net.within(1))


def end(driver: Driver, directory: Path) -> None:
    """Wait for the end of a run, and check that each row was trained once."""
    while driver.last != "done":
        driver.read()
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["status"], summary["balanced"]) == ("completed", True)
    rows = Counter(trained_rows(directory))
    assert len(rows) == STEPS * 16
    assert set(rows.values()) == {1}


def restarted(directory: Path) -> set[str]:
    """Workers that were started again."""
    return {event["worker"] for event in events_of(directory, "worker") if event["state"] == "restarting"}


def test_hosts_and_drivers_that_die_cost_no_row_of_two_runs(
    net: Network, tmp_path: Path, servers: dict[int, SshServer]
) -> None:
    """Both runs are on the same hosts. Each host has a rollout and a rank of the trainer; one also the stage."""
    run, others, gates = tmp_path / "run", tmp_path / "other", Gates(tmp_path / "gates", 2, 4, 6)
    with drive(net, others, 7001) as other:
        with drive(net, run) as one:
            for host, step in ((2, 1), (3, 3)):
                one.follow(step)
                net.kill(host)
                servers[host].start()
                gates.open(step + 1)
            one.follow(5)
            one.kill()
        gates.open(6)
        with drive(net, run) as one:
            end(one, run)
        end(other, others)
    assert restarted(run) >= {"rollout-0", "reward-0", "rollout-1", "train-0 rank 0", "train-0 rank 1"}
    until(lambda: not agents(), "the end of all agents")


def agents() -> dict[int, str]:
    """The far ends of ssh that run."""
    return with_mark("asyncflow_sdk.workflow\0remote\0", "cmdline")


@pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE") != "long", reason="takes half a minute: make fuzz")
def test_a_cable_that_is_cut_for_20_s_costs_no_worker(
    net: Network, tmp_path: Path, servers: dict[int, SshServer]
) -> None:
    with drive(net, tmp_path / "run") as driver:
        for host, step in ((2, 2), (3, 5)):
            driver.follow(step)
            net.cut(host)
            time.sleep(20.0)
            net.mend(host)
        end(driver, tmp_path / "run")
    assert not restarted(tmp_path / "run")
