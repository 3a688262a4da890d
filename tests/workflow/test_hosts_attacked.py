"""Runs over three hosts, two of them reached by ssh, while hosts die, a cable is cut, and the driver is killed."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from children import Child, hear, say
from echo_runs import echo_workflow, events_of, trained_rows
from functions import length
from hosts_in_namespaces import Network, network
from processes import with_mark
from ssh_hosts import SshServer, ssh_servers
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.types.events import Event, StepTrained

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


def workflow(config: str, address: str) -> af.Workflow:
    """A rollout and a rank of the trainer on each of two hosts, a stage on one."""
    there: dict[str, Any] = {"launcher": "ssh", "launcher_options": {"config": config}, "max_restarts": 20}
    return echo_workflow(
        rollout=af.Rollout("echo", group_size=4, prompt="prompt_ids", hosts=["two", "three"], **there),
        reward=af.Stage(length, task="reward", hosts=["two"], **there),
        train=af.Train("echo-ranks", world_size=2, delay_s=0.1, hosts=["two", "three"], **there),
        steps=STEPS, checkpoint=af.Checkpoint(every=2), address=address,
    )  # fmt: skip


def drive(directory: str, config: str, address: str) -> None:
    """Run the workflow, or go on with it. Says each step."""

    def on_event(event: Event) -> None:
        if isinstance(event, StepTrained):
            say(event.step)

    if Path(directory, "workflow.json").exists():
        result = af.resume(directory, on_event=on_event)
    else:
        result = workflow(config, address).run(directory, on_event=on_event)
    say(["ended", result.summary["status"], result.summary["balanced"]])
    hear()


class Drivers:
    """The driver of a run on host 1, again and again."""

    def __init__(self, net: Network, folder: Path, name: str = "run", port: int = 7000) -> None:
        self.directory = folder / name
        self.arguments = str(self.directory), str(folder / "ssh_config"), f"tcp://{net.address(1)}:{port}"
        self.within = net.within(1)
        self.start()

    def start(self) -> None:
        self.child = Child(drive, *self.arguments, within=self.within)

    def follow(self, step: int) -> None:
        """Wait until a step was trained."""
        while self.child.hear() != step:
            pass

    def end(self) -> None:
        """Wait for the end of the run, and check that each row was trained once."""
        while not isinstance(said := self.child.hear(), list):
            pass
        assert said == ["ended", "completed", True]
        rows = Counter(trained_rows(self.directory))
        assert len(rows) == STEPS * 16
        assert set(rows.values()) == {1}


def restarted(drivers: Drivers) -> set[str]:
    """Workers that were started again."""
    return {event["worker"] for event in events_of(drivers.directory, "worker") if event["state"] == "restarting"}


def test_hosts_and_drivers_that_die_cost_no_row_of_two_runs(
    net: Network, tmp_path: Path, servers: dict[int, SshServer]
) -> None:
    """Both runs are on the same hosts. Each host has a rollout and a rank of the trainer; one also the stage."""
    one, other = Drivers(net, tmp_path), Drivers(net, tmp_path, "other", 7001)
    with other.child:
        with one.child:
            for host, step in ((2, 1), (3, 3)):
                one.follow(step)
                net.kill(host)
                servers[host].start()
            one.follow(5)
            one.child.kill()
        one.start()
        with one.child:
            one.end()
        other.end()
    assert restarted(one) >= {"rollout-0", "reward-0", "rollout-1", "train-0 rank 0", "train-0 rank 1"}
    until(lambda: not agents(), "the end of all agents")


def agents() -> dict[int, str]:
    """The far ends of ssh that run."""
    return with_mark("asyncflow_sdk.workflow\0remote\0", "cmdline")


@pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE") != "long", reason="takes half a minute: make fuzz")
def test_a_cable_that_is_cut_for_20_s_costs_no_worker(
    net: Network, tmp_path: Path, servers: dict[int, SshServer]
) -> None:
    drivers = Drivers(net, tmp_path)
    with drivers.child:
        for host, step in ((2, 2), (3, 5)):
            drivers.follow(step)
            net.cut(host)
            time.sleep(20.0)
            net.mend(host)
        drivers.end()
    assert not restarted(drivers)
