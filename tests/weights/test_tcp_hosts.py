"""Weights from a trainer on one host to a replica on another, in a run with keys, over a cable that does what cables do."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import Child, hear, say
from hosts_in_namespaces import HERE, network, poor_cable

import asyncflow_sdk as af
from asyncflow_sdk.types.events import WeightState
from asyncflow_sdk.weights import host

ADDRESS, COUNT = f"tcp://{HERE}:7000", 1 << 18


def train(directory: str, options: dict[str, Any]) -> None:
    """Serve a run, and publish a version with each line; print the sum of its bits, and what staging it took."""
    staged: list[WeightState] = []

    def on_event(event: Any) -> None:
        if isinstance(event, WeightState) and event.state == "staged":
            staged.append(event)

    with af.serve(directory, address=ADDRESS, on_event=on_event) as run:
        publisher = run.weight_publisher("tcp", **options)
        numbers = np.random.default_rng(0)
        weights = (numbers.standard_normal(COUNT) * 0.02).astype(np.float32)
        say(run.address)
        for version in range(1, 100):
            hear()
            weights[numbers.random(COUNT) < 0.01] *= np.float32(1.0000001)
            publisher.publish(version, {"w": weights}).wait(60.0)
            say([version, int(weights.view(np.uint32).sum(dtype=np.uint64))])
            hear()
            say([(each.version, each.encoding, each.moved) for each in staged][-1])


def replicate(key: str) -> None:
    """Load each version; print what it is. This host sees the other's memory, and does not know it."""
    host.identity = lambda: "another host"
    with af.connect(ADDRESS, key=key, name="replica") as run, run.weight_updates() as updates:
        say("ready")
        for update in updates:
            with update:
                total = int(dict(update.arrays())["w"].view(np.uint32).sum(dtype=np.uint64))
            say([update.version, total])


@pytest.mark.parametrize("insecure", [False, True], ids=["keys", "insecure"])
def test_a_replica_on_another_host_follows_its_trainer(tmp_path: Path, insecure: bool) -> None:
    options = {"insecure": True} if insecure else {}
    with (
        network(2) as hosts,
        poor_cable(hosts) as cable,
        Child(train, str(tmp_path / "run"), options, within=hosts.within(1)) as trainer,
    ):
        assert trainer.hear() == ADDRESS
        key = tmp_path / "copy.key"
        shutil.copy(tmp_path / "run" / "run.key", key)
        with Child(replicate, str(key), within=hosts.within(2)) as replica:
            assert replica.hear() == "ready"
            # when versions are published, while the cable is good, and slow and lossy
            for befalls in ({}, {"delay_s": 0.002, "loss": 0.02}):
                assert cable(befalls) == "done"
                trainer.say("publish")
                version, total = trainer.hear()
                # then each arrives, the later ones as what differs
                assert replica.hear() == [version, total]
                trainer.say("how")
                staged, encoding, moved = trainer.hear()
                assert (staged, encoding) == (version, "full" if version == 1 else "delta")
                assert moved == 4 * COUNT if version == 1 else moved < 4 * COUNT / 20
